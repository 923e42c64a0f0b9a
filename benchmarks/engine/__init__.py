"""Steps, schedulers and memory of an engine in this process, on one thread of a CPU or on a GPU.

Importing this package sets variables that torch and vLLM read when they are imported.
"""

import os

for name, value in {
    "OMP_NUM_THREADS": "1",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # else the engine cannot be forked
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
}.items():
    os.environ.setdefault(name, value)
