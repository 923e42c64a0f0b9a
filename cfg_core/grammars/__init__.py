"""Bounds on the grammars of requests, and turns for their compilation. Standard library only."""
