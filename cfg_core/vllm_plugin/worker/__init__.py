"""What runs in vLLM's workers: one process for each device."""
