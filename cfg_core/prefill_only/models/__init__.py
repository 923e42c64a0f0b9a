"""Which checkpoints run here, what they compute, and how their transformers models are loaded."""
