"""The parts of an engine, in the order in which a sequence passes them: see pipeline.py."""
