"""The blend: `formula` defines it, and `kernel` computes the same on GPUs, in Triton.

Importing this package imports torch, and not Triton.
"""

from cfg_core.blend.formula import (
    LARGEST_WEIGHT,
    NEVER,
    CutRows,
    blend,
    cut,
    divergence,
)
from cfg_core.blend.rules import RuleRows
from cfg_core.blend.strength import StrengthRows, entropy, weaken

__all__ = [
    "LARGEST_WEIGHT",
    "NEVER",
    "CutRows",
    "RuleRows",
    "StrengthRows",
    "blend",
    "cut",
    "divergence",
    "entropy",
    "weaken",
]
