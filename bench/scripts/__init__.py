"""The programs that are measured: each is a Holdfast script; Ray runs the same text with the import root changed."""
