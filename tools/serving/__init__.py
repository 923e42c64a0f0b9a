"""A served application as seen from outside: its processes, a cluster for it, and its clients.

Tests, benchmarks and the other programs of this folder share it.
"""
