"""Limits on what the trial of a grammar may cost.

Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class GrammarLimits:
    """Limits on trials of grammars, which run in forks of a helper process.

    cpu_s: seconds of CPU time for one trial, which is validation, compilation and the first masks.
        A grammar that another compiler may take has less (FIRST_CPU_S in
        vllm_plugin/frontend/grammar_sandbox.py), so this is for what only xgrammar has.
    wall_s: seconds of wall-clock time for one trial. This limit says that the machine is busy, and
        nothing about the grammar.
    memory_mb: MiB that a trial may use beyond what the helper has.
    mask_ms: CPU milliseconds for the mask of one token in a trial. For a running request the engine
        core allows twice as much, for a mask and for accepting a token.
    places: number of trials that may run at once.
    max_waiting: number of trials that may wait, for each tenant.
    remembered: number of verdicts that are cached.
    start_s: seconds that the helper has to load.
    at_start: whether the helper is loaded with the engine, and kept. Otherwise the first grammar
        loads it.
    json_whitespace: characters of white space in a row in JSON that a grammar allows, None for any
        number. Small models write newlines for ever where a grammar lets them.
    idle_s: seconds without a grammar after which the helper ends, if `at_start` is false.
    """

    cpu_s: float = 12.0
    wall_s: float = 60.0
    memory_mb: int = 1024
    mask_ms: float = 50.0
    places: int = 3
    max_waiting: int = 64
    remembered: int = 1024
    start_s: float = 120.0
    at_start: bool = True
    idle_s: float = 900.0
    json_whitespace: int | None = 12
