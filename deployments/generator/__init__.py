"""ModelReplica: a Serve replica that owns one guided vLLM engine."""
