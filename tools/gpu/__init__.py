"""What only a GPU can show: see docs/gpu.md."""
