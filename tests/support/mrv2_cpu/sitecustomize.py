"""Runs at the start of every Python process that has this folder on its path: engines, workers, Ray
actors."""

import contextlib
import os

with contextlib.suppress(ImportError):  # this file hides its sitecustomize
    import quick_start  # noqa: F401

if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1":
    import mrv2_cpu

    mrv2_cpu.interpret_triton()
