"""The replaceable stages of a prefill-only engine, in the order of workflow.py."""
