"""What tests on a GPU run under."""

import os

# Looking for a GPU uses it, and then an engine's process cannot be forked.
os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
