"""Which field of a body vLLM does not take, and why, in words for clients."""
