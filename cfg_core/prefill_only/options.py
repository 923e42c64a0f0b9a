"""The options of an engine.

Only the standard library is imported, so that a YAML file can be checked before torch is imported.
"""

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
    """For example `cpu`, `cuda` or `cuda:1`. auto takes the first GPU if there is one."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """auto: bfloat16 on a GPU, and on a CPU that has instructions for it; float32 on other CPUs.

    The dtype of the checkpoint does not matter, except with the executor `vllm`, which has vLLM's
    own `auto`.
    """
    max_input_tokens: int | None = None
    """Tokens of the longest input, special tokens included.

    None: the checkpoint's limit, or the number of its positions if that is smaller. A number above
    the positions is refused with ConfigError.
    """
    max_batch_tokens: int | None = None
    """Token budget of one batch.

    None: 512 on the CPU (1024 were no faster for MiniLM), 16384 on a GPU, or max_input_tokens if
    that is larger. A number below max_input_tokens is refused with ConfigError.
    """
    max_batch_sequences: int = 256
    """Maximum number of sequences in one batch."""
    max_queued_tokens: int | None = None
    """Maximum number of waiting tokens. Online only.

    A request that would exceed it is refused with OverloadedError (HTTP 429). If nothing waits, a
    request of any size is accepted. None: 128 full batches, about 15 seconds on one CPU core.
    """
    max_request_inputs: int = 2048
    """Maximum number of inputs in one request. Online only."""
    max_text_chars: int = 4_000_000
    """Maximum characters of one input. A longer input is refused (HTTP 400). Online only."""
    max_answer_bytes: int = 64 * 2**20
    """Maximum size of one answer, in bytes. Online only.

    A request whose answer would be larger is refused (HTTP 400): vectors for each token of long
    texts would be gigabytes of JSON. The size is estimated before anything is computed, except that
    of sparse vectors, which is not known before.
    """
    sort_window: int = 256
    """Sequences at the head of the queue, from which those of similar length are chosen."""
    max_skips: int = 8
    """A sequence that so many batches have skipped goes before those whose length fits better."""
    max_batches_in_flight: int = 2
    """Maximum number of batches handed to the executor and not yet returned.

    With 2, one waits while the other runs, so that the device is never idle.
    """
    num_threads: int = 1
    """Threads of torch's operators on the CPU.

    Several replicas with one thread each are faster than one replica with many threads.
    """
    is_causal: bool | None = None
    """Whether the attention of decoders is causal. None: as the checkpoint says.

    False: it is bidirectional (LLM2Vec, gte-Qwen2).
    """
    pooling: str | None = None
    """cls, mean, last, max, weightedmean, mean_sqrt_len_tokens or splade.

    None: as the checkpoint says.
    """
    workflow: Mapping[str, str] = field(default_factory=dict)
    """Modules in place of the default ones: role -> name, or dotted path `package.module:Class`.

    See workflow.py.
    """
    vllm: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of vLLM's engine, such as tensor_parallel_size. For the executor `vllm` only."""

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
        """Options from a YAML section.

        Raises ConfigError on an unknown key; the message suggests the nearest known one.
        """
        check_keys(values, [option.name for option in fields(cls)], "engine")
        return cls(**values)


def _at_least_one(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name} is {value!r}: it must be a whole number of at least 1.")
