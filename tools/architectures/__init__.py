"""Every text-generation architecture of the pinned vLLM under guidance, as a table.

rows.py says what a row is, and dense.py, moe.py, ... hold the rows. sizes.py, draw.py and loader.py
make a tiny random model of each. checks.py compares its guided texts with an oracle. __main__.py
does that for all rows, each in a process of its own, and writes results.jsonl, from which
scripts/pages/models_page.py writes docs/models.md.
"""
