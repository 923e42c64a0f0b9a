"""Variables of a replica's environment, which its engine process inherits."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

STOP_STRINGS = "VLLM_MAX_STOP_STRINGS"
MOST_STOP_STRINGS = 64
"""vLLM's limit of stop strings per request is 4. SillyTavern sends 6, names and marks of a chat."""

NUMBA_THREADS = "NUMBA_NUM_THREADS"
"""Threads of numba's pool, by default one for each core.

vLLM's drafter of n-grams uses one of them, and the others spin after each step. Three engines on
two cores made 37 to 92 tokens a second so, and 266 to 514 without them.
"""


def set_defaults(environment: MutableMapping[str, str], engine: Mapping[str, Any]) -> None:
    """Set what the environment does not say. Call it before vLLM is imported.

    engine: keyword arguments of vLLM's AsyncEngineArgs.
    """
    environment.setdefault(STOP_STRINGS, str(MOST_STOP_STRINGS))
    speculation = engine.get("speculative_config")
    if not isinstance(speculation, Mapping):  # what it must be, vLLM says
        return
    if "ngram" in (speculation.get("method"), speculation.get("model")):
        environment.setdefault(NUMBA_THREADS, "1")
