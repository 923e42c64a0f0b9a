"""What the processor of this machine can compute, as Linux tells it.

Only the standard library is imported, so that options can be checked before torch is imported.
"""

from __future__ import annotations

from pathlib import Path

CPUINFO = "/proc/cpuinfo"
AMX_BFLOAT16 = "amx_bf16"
"""Linux's name for a unit that multiplies matrices of bfloat16."""
BFLOAT16 = frozenset({"avx512_bf16", AMX_BFLOAT16, "bf16"})
"""Names that Linux gives to instructions for bfloat16: two on x86-64, one on aarch64."""


def has_bfloat16(cpuinfo: str) -> bool | None:
    """Whether the text of /proc/cpuinfo names instructions for bfloat16.

    None if it lists no features, so that nobody knows.
    """
    found = features(cpuinfo)
    return None if found is None else not BFLOAT16.isdisjoint(found)


def features(cpuinfo: str) -> frozenset[str] | None:
    """The features that the text of /proc/cpuinfo lists for the first core; None if it has no list.

    The names are Linux's.
    """
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return None


def read(path: str) -> str:
    """The text of a file; nothing if it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError:
        return ""
