"""OpenTelemetry spans of requests; off by default."""
