"""Stands in for arctic-inference where it is not installed: see suffix_decoding."""
