"""ModelReplica: a Serve replica that owns one guided vLLM engine.

Most modules here import vllm when they are imported, so only a replica imports them.
"""
