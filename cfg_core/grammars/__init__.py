"""Bounds on the grammars of requests, and limits of their trials (standard library only)."""
