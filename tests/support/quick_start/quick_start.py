"""Fewer looks for garbage: a quick start of each process that tests start (quick_starts.py).

Importing vLLM makes a million objects that stay. With Python's own thresholds, looking among them
for garbage takes a quarter of the import, 4 of 17 CPU seconds, in several processes of each server.
"""

import gc

gc.set_threshold(100_000, 20, 100)
