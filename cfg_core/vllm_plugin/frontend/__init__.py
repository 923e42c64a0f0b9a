"""What runs in vLLM's frontend: the process of LLM, AsyncLLM or the API server."""
