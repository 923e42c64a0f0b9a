"""The check of a whole YAML file: its text, our `args:`, and what Ray Serve reads.

yaml_text     the text: broken YAML with its line, keys that stand there twice
lines         what is wrong, and in which line
serve_fields  which keys Ray Serve knows, read from its source without importing it
file          all of it but the values of Serve's own options; needs neither ray nor vllm
ray_values    these values, by Ray's own classes
"""
