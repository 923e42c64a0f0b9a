"""How an engine is set up. Standard library only: a YAML file is checked before torch is
imported."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from cfg_core.errors import ConfigError
from cfg_core.keys import check_keys


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """The options of `Engine.load` and of the `engine:` section of an encoder in the YAML."""

    device: str = "auto"
    """`cpu`, `cuda`, `cuda:1`; auto takes the first GPU if there is one."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """auto: float32 on the CPU, bfloat16 on a GPU (whatever the checkpoint is stored in)."""
    max_input_tokens: int | None = None
    """Longest input, special tokens included. None: what the checkpoint says. Never more than its
    positions."""
    max_batch_tokens: int | None = None
    """Token budget of one batch. None: 512 on the CPU (1024 were no faster for MiniLM), 16384 on a
    GPU, and never less than max_input_tokens."""
    max_batch_sequences: int = 256
    """Sequences in one batch."""
    max_queued_tokens: int | None = None
    """Beyond this a request is refused with OverloadedError (HTTP 429) rather than queued; a larger
    one still runs if nothing waits. None: 128 full batches, about a quarter of a minute on one CPU
    core. Online only."""
    max_request_inputs: int = 2048
    """Inputs in one online request."""
    max_text_chars: int = 4_000_000
    """Characters of one input. Beyond, a request is refused (HTTP 400). Online only."""
    max_answer_bytes: int = 64 * 2**20
    """Size of one answer, estimated before anything is computed; beyond, the request is refused
    (HTTP 400). Vectors for each token of long texts are gigabytes as JSON. Online only."""
    sort_window: int = 256
    """Waiting sequences among which those of similar length are looked for."""
    max_skips: int = 8
    """A sequence that so many batches have passed over goes before those whose length fits
    better."""
    max_batches_in_flight: int = 2
    """Batches handed to the executor and not yet returned: one runs, the next waits, so the device
    never does."""
    num_threads: int = 1
    """Threads of torch's operators on the CPU. Replicas of one thread each beat one replica of
    many."""
    is_causal: bool | None = None
    """Attention of decoders. False: bidirectional (LLM2Vec, gte-Qwen2). None: as the checkpoint
    says."""
    pooling: str | None = None
    """cls, mean, last, max, weightedmean, mean_sqrt_len_tokens or splade. None: as the checkpoint
    says."""
    workflow: Mapping[str, str] = field(default_factory=dict)
    """Modules in place of the default ones, see workflow.py: role -> name or dotted path
    `package.module:Class`."""
    vllm: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of vLLM's engine (tensor_parallel_size...), for the executor `vllm` only."""

    def __post_init__(self) -> None:
        for name in (
            "max_batch_sequences",
            "max_request_inputs",
            "sort_window",
            "num_threads",
            "max_text_chars",
            "max_answer_bytes",
        ):
            _at_least_one(name, getattr(self, name))
        for name in ("max_input_tokens", "max_batch_tokens", "max_queued_tokens"):
            if getattr(self, name) is not None:
                _at_least_one(name, getattr(self, name))
        _at_least_one("max_batches_in_flight", self.max_batches_in_flight)
        if self.dtype not in ("auto", "float32", "bfloat16", "float16"):
            raise ConfigError(f"dtype is {self.dtype!r}: use auto, float32, bfloat16 or float16.")

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> EngineOptions:
        """Options from a YAML section. Raises ConfigError on an unknown key, naming the nearest
        one."""
        check_keys(values, [option.name for option in fields(cls)], "engine")
        return cls(**values)


def _at_least_one(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name} is {value!r}: it must be a whole number of at least 1.")
