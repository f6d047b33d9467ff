"""Processes. Knows no checkpoint, no metric, no storage."""
