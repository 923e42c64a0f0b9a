"""What runs in vLLM's engine core: the process of the scheduler."""
