"""The options that a YAML file may have under `args:`, checked before anything starts."""
