"""Readers of events. They cannot change the course."""
