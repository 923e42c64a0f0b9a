"""What clients are sent: vLLM's answers, with what is added to them and mended in them."""
