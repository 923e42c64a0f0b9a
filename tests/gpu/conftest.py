"""What tests on a GPU run under."""

import os

# Else looking for a GPU uses it, and engines could not be forked.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
