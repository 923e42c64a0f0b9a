"""Python imports this at its start if the folder is on PYTHONPATH, and no other comes before it."""

import quick_start  # noqa: F401
