"""What HTTP requests say: read and checked without Ray, vLLM or torch."""
