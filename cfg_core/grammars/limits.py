"""What one trial of a grammar may cost, and how many run. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class GrammarLimits:
    """cpu_s, wall_s: seconds for validation, compilation and the first masks. memory_mb: MiB beyond
    what the helper has. mask_ms: CPU milliseconds for the mask of one token, or for accepting one.
    places: trials at once. max_waiting: of one tenant. remembered: verdicts that are kept. start_s:
    for the helper to load. at_start: load it with the engine, and keep it; else with the first
    grammar. idle_s: after how long without a grammar such a helper ends."""

    cpu_s: float = 4.0
    wall_s: float = 10.0
    memory_mb: int = 1024
    mask_ms: float = 50.0
    places: int = 3
    max_waiting: int = 64
    remembered: int = 1024
    start_s: float = 120.0
    at_start: bool = True
    idle_s: float = 900.0
