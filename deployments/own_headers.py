"""Headers that the ingress sends a replica with a request. It sets them itself, and takes them from no client."""

CLIENT = "x-cfg-client"
"""Who asks, a tenant or an address: for whatever is fair between clients."""

TENANT = "x-cfg-tenant"
"""Whose KV is found by nobody else. Missing where prefixes are shared, and where there are no API keys."""
