"""Faults under a served cluster, and what clients see of them (`python -m tools.chaos`)."""
