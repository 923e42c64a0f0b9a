"""Logs and spans of the processes."""
