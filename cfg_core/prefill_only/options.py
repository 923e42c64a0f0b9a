"""The options of an engine.

Only the standard library is imported, so that a YAML file can be checked before torch is imported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

from cfg_core.errors import ConfigError
from cfg_core.keys import check_keys

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Quantization = Literal["int8"]


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """The options of `Engine.load` and of the `engine:` section of an encoder in the YAML."""

    device: str = "auto"
    """For example `cpu`, `cuda` or `cuda:1`. auto takes the first GPU if there is one."""
    dtype: Dtype = "auto"
    """auto: bfloat16 on a GPU, and on a CPU that has instructions for it; float32 on other CPUs.

    The dtype of the checkpoint does not matter, except with the executor `vllm`, which has vLLM's
    own `auto`.
    """
    quantization: Quantization | None = None
    """int8: compute the linear layers in 8 bits, on a CPU with x86-64. The rest is float32.

    Weights are quantised at load, per output, and inputs per token. None: nothing is quantised.
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
    """Maximum number of tokens, estimated, that wait in CfgRouter's queue for this encoder.

    Beyond it, the newest requests of the tenant that fills the queue most are refused (HTTP 429). A
    tenant that has nothing in the encoder does not wait. None: 128 full batches, or two requests of
    `max_request_tokens` if that is more (about 75 seconds on one CPU core).
    """
    max_request_inputs: int = 2048
    """Maximum number of inputs in one request. Online only."""
    max_request_tokens: int = 300_000
    """Maximum number of tokens in one request, as OpenAI has it. Online only.

    A request with more is refused (HTTP 400), after truncation if it asks for that.
    """
    max_request_chars: int = 16_000_000
    """Maximum characters of all texts of one request. Online only.

    A prompt counts once for each input, and the query of a cross-encoder once for each document. A
    token id counts four characters. A request with more is refused (HTTP 400) before any text is
    joined.
    """
    max_text_chars: int = 4_000_000
    """Maximum characters of one input, with its prompt or query. Online only.

    A token id counts four characters. A longer input is refused (HTTP 400).
    """
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
    hang_timeout_s: float = 120.0
    """Seconds without a finished batch after which the device thread counts as stuck. Online only.

    The replica then exits, and Serve starts another one. Time in which the process does not run, or
    in which its event loop is busy, does not count. Set it to more than the longest batch takes,
    compilation included.
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
    int8_range: float | None = None
    """The largest component that int8 and uint8 vectors can show; larger ones are cut.

    None: 6 / sqrt(dimensions), six times the root mean square of a normalised vector's components.
    """
    classifier_from_token: Sequence[str] = ()
    """For a causal language model that is a reranker: its tokens, as `["no", "yes"]`.

    The score of a pair is the probability of the second against the first. With one token, it is
    the sigmoid of that token's logit. Empty: as the checkpoint says.
    """
    score_template: str | None = None
    """The prompt of such a reranker, or of a sequence classifier that was trained with one.

    It has the fields {query} and {document}, and may have {instruction}. None: as the checkpoint
    says.
    """
    instruction: str | None = None
    """The instruction of requests that send none, for rerankers whose prompt has one."""
    workflow: Mapping[str, str] = field(default_factory=dict)
    """Which `attention`, `runner` and `executor` compute: a name, or a path `package.module:Name`.

    docs/embeddings.md has the names.
    """
    vllm: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of vLLM's engine, such as tensor_parallel_size. For the executor `vllm` only."""

    def __post_init__(self) -> None:
        for option in fields(self):
            value = getattr(self, option.name)
            optional = option.type == "int | None" and value is None
            if str(option.type).startswith("int") and option.name != "max_skips" and not optional:
                _at_least_one(option.name, value)
        _above_zero("hang_timeout_s", self.hang_timeout_s)
        if self.int8_range is not None:
            _above_zero("int8_range", self.int8_range)
        tokens = self.classifier_from_token
        texts = not isinstance(tokens, str) and all(isinstance(token, str) for token in tokens)
        if not texts or len(tokens) > 2:
            raise ConfigError(
                f"classifier_from_token is {tokens!r}: give the tokens for no and yes, as"
                ' ["no", "yes"]. Without quotes, YAML reads them as false and true.'
            )
        if self.dtype not in get_args(Dtype):
            raise ConfigError(f"dtype is {self.dtype!r}: use auto, float32, bfloat16 or float16.")
        if self.quantization not in (None, *get_args(Quantization)):
            raise ConfigError(f"quantization is {self.quantization!r}: use int8, or leave it out.")
        if self.quantization and self.dtype not in ("auto", "float32"):
            raise ConfigError(
                f"quantization is {self.quantization} and dtype {self.dtype}: leave dtype out. What"
                " is not quantised is computed in float32."
            )
        if self.quantization and "vllm" in self.workflow.values():
            raise ConfigError(
                "quantization is for this engine's own layers: name vLLM's under `vllm:`, as"
                " `vllm: {quantization: fp8}`."
            )

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


def _above_zero(name: str, value: object) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise ConfigError(f"{name} is {value!r}: it must be a number above 0.")
