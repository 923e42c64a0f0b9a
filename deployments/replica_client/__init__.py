"""Calls from the ingress to replicas, and what comes back."""
