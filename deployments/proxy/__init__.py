"""Middleware inside Serve's own HTTP proxy."""
