"""What a YAML file may say under `args:`, checked before anything starts."""
