"""A configuration for a model's name: what `cfg-serve serve MODEL` serves.

model_facts   what the model's config.json says: lengths and sizes
choices       which values suit this machine, pure
"""
