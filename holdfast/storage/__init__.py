"""Bytes at a URL. Knows no checkpoint."""
