"""vLLM's engine as a replica runs it, and what is known of each request in it."""
