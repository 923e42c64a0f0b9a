"""Read and check the bodies and headers of HTTP requests, without Ray, vLLM or torch."""
