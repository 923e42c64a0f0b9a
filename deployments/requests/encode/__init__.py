"""Requests to encoders: bodies read into jobs, and outputs worded as answers."""
