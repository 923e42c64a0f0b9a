"""Requests to encoders: read bodies into jobs, and turn outputs into answers."""
