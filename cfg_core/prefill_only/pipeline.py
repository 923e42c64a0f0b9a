"""The parts of an engine with a loaded model, and the batches in flight between them.

Engine and AsyncEngine are loops around a Pipeline:

    inputs -> InputProcessor -> Scheduler -> pack -> Executor(Runner) -> outputs_of -> outputs

There is no KV cache and no decode phase: a sequence is computed whole, in one forward, and is then
forgotten.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cfg_core.errors import ConfigError, EngineError
from cfg_core.prefill_only.batch import Finished, pack
from cfg_core.prefill_only.max_sim import MaxSim
from cfg_core.prefill_only.models.checkpoint import Checkpoint, ModelInfo, locate, read_checkpoint
from cfg_core.prefill_only.models.loading import name_of
from cfg_core.prefill_only.options import EngineOptions
from cfg_core.prefill_only.stages.input_processor import InputProcessor
from cfg_core.prefill_only.stages.late_tokens import with_late_tokens
from cfg_core.prefill_only.stages.outputs import outputs_of
from cfg_core.prefill_only.stages.pair_prompts import completed
from cfg_core.prefill_only.stages.scheduler import Scheduler
from cfg_core.prefill_only.stages.tokenizer import Tokenizer
from cfg_core.prefill_only.types import Output, SequenceState
from cfg_core.prefill_only.workflow import check_workflow, resolve

_CPU_BATCH_TOKENS, _GPU_BATCH_TOKENS = 512, 16384
_QUEUED_BATCHES = 128


class Pipeline:
    """The parts of one engine, and its batches in flight. Owned by one thread.

    deliver: called with each finished batch, by the device thread if the executor has one. The
    owner must then pass the batch to `outputs_of`.
    """

    def __init__(
        self, model: str, options: EngineOptions, deliver: Callable[[Finished], None]
    ) -> None:
        check_workflow(options.workflow)
        executor = options.workflow.get("executor", "thread")
        usual_runner = "vllm" if executor == "vllm" else "transformers"
        runner = options.workflow.get("runner", usual_runner)
        self.options = options
        checkpoint = read_checkpoint(locate(model), options)
        self.tokenizer = Tokenizer(checkpoint)
        checkpoint = with_late_tokens(checkpoint, self.tokenizer)
        self.checkpoint = completed(checkpoint, options, self.tokenizer)
        special_ids = self.tokenizer.special_ids
        self._runner = resolve("runner", runner)(self.checkpoint, options, special_ids)
        self.info = _info(self.checkpoint, options, self.tokenizer, self._runner)
        self.input_processor = InputProcessor(
            self.tokenizer,
            self.info,
            skips_prompt=not self.checkpoint.include_prompt,
            template=self.checkpoint.template,
            late=self.checkpoint.late,
        )
        self.scheduler = Scheduler(options, self.info.max_batch_tokens)
        self._token_types = self._runner.uses_token_types and self.tokenizer.gives_token_types
        self._deliver = deliver
        self._executor = resolve("executor", executor)(self._runner.compute, self._computed)
        self.num_in_flight = 0
        self.num_batches = 0  # since the start
        self.num_computed = 0
        """Batches that the executor has finished since the start. Its own thread counts them.

        It may run ahead of the owner, who takes each batch off `num_in_flight` later.
        """

    def pump(self) -> None:
        """Schedule and submit batches while the executor has room for them."""
        while self.num_in_flight < self.options.max_batches_in_flight:
            sequences = self.scheduler.schedule()
            if not sequences:
                return
            batch = pack(
                sequences,
                first_position=self._runner.first_position,
                token_types=self._token_types,
                pin_memory=self._runner.on_gpu,
            )
            self.num_in_flight += 1
            self.num_batches += 1
            self._executor.submit(batch)

    def _computed(self, finished: Finished) -> None:
        """Called by the executor with each finished batch."""
        self.num_computed += 1
        self._deliver(finished)

    def outputs_of(self, finished: Finished) -> list[tuple[SequenceState, Output | EngineError]]:
        """The output or the error of each sequence of a delivered batch."""
        self.num_in_flight -= 1
        outputs = outputs_of(finished, self.checkpoint)
        return list(zip(finished.sequences, outputs, strict=True))

    @property
    def alive(self) -> bool:
        return bool(self._executor.alive)

    def close(self) -> None:
        self._executor.close()
        self._runner.close()


def _info(
    checkpoint: Checkpoint, options: EngineOptions, tokenizer: Tokenizer, runner: Any
) -> ModelInfo:
    max_input_tokens = _max_input_tokens(checkpoint, options, tokenizer.limit, runner.max_positions)
    max_batch_tokens = _batch_tokens(options, max_input_tokens, runner.on_gpu)
    return ModelInfo(
        tasks=tuple(task for task in checkpoint.tasks if task in runner.tasks),
        dimension=runner.dimension,
        max_input_tokens=max_input_tokens,
        max_batch_tokens=max_batch_tokens,
        max_queued_tokens=options.max_queued_tokens
        or max(_QUEUED_BATCHES * max_batch_tokens, 2 * options.max_request_tokens),
        vocab_size=int(checkpoint.config.get("vocab_size") or tokenizer.vocab_size),
        dtype=options.quantization or name_of(runner.dtype),
        labels=checkpoint.labels,
        token_dimension=runner.token_dimension,
        max_sim=_max_sim(checkpoint),
        int8_range=options.int8_range,
        takes_instruction=bool(checkpoint.template and checkpoint.template.takes_instruction),
        prompts=checkpoint.prompts,
        default_prompt=checkpoint.prompts.get("document", "")
        if checkpoint.late
        else checkpoint.default_prompt,
        matryoshka=checkpoint.matryoshka,
        matryoshka_dimensions=checkpoint.matryoshka_dimensions,
    )


def _max_sim(checkpoint: Checkpoint) -> MaxSim | None:
    if checkpoint.late is not None:
        return "mean" if checkpoint.late.mean else "sum"
    return "mean" if checkpoint.has_bge_m3_heads else None


def _max_input_tokens(
    checkpoint: Checkpoint,
    options: EngineOptions,
    tokenizer_limit: int | None,
    positions: int | None,
) -> int:
    """The limit of the options, else of the checkpoint, else of its tokenizer.

    It is at most the number of the model's positions. Raises ConfigError if the options ask for
    more.
    """
    wanted = (
        options.max_input_tokens or checkpoint.max_seq_length or tokenizer_limit or positions or 512
    )
    if positions is None or wanted <= positions:
        return wanted
    if options.max_input_tokens:
        raise ConfigError(
            f"max_input_tokens is {wanted}, but this model has positions for {positions}: lower it."
        )
    return positions


def _batch_tokens(options: EngineOptions, max_input_tokens: int, on_gpu: bool) -> int:
    if options.max_batch_tokens is None:
        return max(max_input_tokens, _GPU_BATCH_TOKENS if on_gpu else _CPU_BATCH_TOKENS)
    if options.max_batch_tokens < max_input_tokens:
        raise ConfigError(
            f"max_batch_tokens is {options.max_batch_tokens}, but one input may have"
            f" {max_input_tokens} tokens: raise it, or lower max_input_tokens."
        )
    return options.max_batch_tokens
