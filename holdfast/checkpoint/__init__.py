"""Directories that survive. Knows no run."""
