"""What vocabularies and prompts of real size cost the host."""
