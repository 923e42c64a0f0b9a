"""AsyncEngine: the engine for servers, in which concurrent calls share batches."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

from cfg_core import lanes
from cfg_core.errors import ConfigError, EngineDeadError, EngineError, RequestError
from cfg_core.prefill_only.batch import Finished
from cfg_core.prefill_only.options import EngineOptions
from cfg_core.prefill_only.pipeline import Pipeline
from cfg_core.prefill_only.sizes import check_num_tokens, check_sizes, slices
from cfg_core.prefill_only.types import (
    Input,
    Output,
    RequestOptions,
    SequenceState,
    too_many_values,
)
from cfg_core.stall import Stall

_AT_ONCE = 4_000
"""Characters. A call with more of them is tokenized in a thread, not on the event loop."""
_CHARS_OF_INPUT = 20
"""Characters that take as long to tokenize as an input takes besides its characters."""
_SLICE = 50_000
"""Characters that the thread tokenizes in one job. Jobs of other requests run between two jobs."""


@dataclass(slots=True, eq=False)
class _Request:
    """A call of `run` that waits for its outputs."""

    future: asyncio.Future[list[Output]]
    num_inputs: int
    outputs: dict[int, Output] = field(default_factory=dict)

    def add(self, index: int, output: Output) -> None:
        """Store the output of one input. The last output wakes the caller."""
        self.outputs[index] = output
        if len(self.outputs) == self.num_inputs:
            self.future.set_result([self.outputs[index] for index in range(self.num_inputs)])


class AsyncEngine:
    """The engine for servers: concurrent calls share batches.

    It is used from one event loop, which schedules batches and tokenizes short inputs. Other
    threads tokenize long inputs, and a device thread computes. An input whose result is not finite
    fails only its own call.

    Tenants take turns, and so do the calls of one tenant. The engine bounds the size of a call, but
    not how many calls wait: whoever calls it does that (deployments/replica_client/encoders.py).
    """

    def __init__(self, model: str, options: EngineOptions) -> None:
        if options.workflow.get("executor") == "inline":
            raise ConfigError(
                "the inline executor would block the event loop: use thread, which is the default."
            )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pipeline = Pipeline(model, options, self._deliver)
        self._pump_is_due = False
        self._lanes = lanes.Lanes("tokenizer")
        self._counts = {"requests": 0, "sequences": 0, "tokens": 0}
        self._stall = Stall(options.hang_timeout_s)
        self.info = self._pipeline.info

    @classmethod
    def load(cls, model: str, options: EngineOptions | None = None) -> AsyncEngine:
        """Load a model, as Engine.load does. Blocks for the seconds that loading takes."""
        return cls(str(model), options or EngineOptions())

    async def run(
        self,
        inputs: Sequence[Input],
        options: RequestOptions,
        max_values: int | None = None,
        *,
        tenant: str = "",
        weight: float = 1.0,
    ) -> list[Output]:
        """An output for each input, in order.

        max_values: how many numbers the outputs may hold together. Sparse vectors are not counted.
        tenant: who sent the call. weight: the tenant's share, relative to other tenants.

        Raises RequestError (bad input, or too much of it), EngineError (the batch failed, or a
        result is not finite), or EngineDeadError (the device thread had ended, or was stuck, before
        the call). Cancelling the call takes its sequences out of the queue.
        """
        self.check_health()
        pipeline, scheduler = self._pipeline, self._pipeline.scheduler
        self._check_count(len(inputs))
        pipeline.input_processor.check_options(options)
        self._loop = asyncio.get_running_loop()
        request = _Request(self._loop.create_future(), len(inputs))
        sequences = await self._process(inputs, options)
        for sequence in sequences:
            sequence.request, sequence.tenant, sequence.weight = request, tenant, weight
        self._check_values(sequences, options, max_values)
        self._counts["requests"] += 1
        self._counts["sequences"] += len(sequences)
        self._counts["tokens"] += sum(map(len, sequences))
        scheduler.add(sequences)
        self._pump_soon()
        try:
            return await request.future
        except (asyncio.CancelledError, EngineError):
            scheduler.cancel(sequences)  # no effect on those that run already
            raise

    async def _process(
        self, inputs: Sequence[Input], options: RequestOptions
    ) -> list[SequenceState]:
        """The sequences of a call.

        A large call is processed in a thread, slice by slice, so that other calls come between.
        """
        limits = self._pipeline.options
        sizes = check_sizes(inputs, options.prompt, limits)
        size, num_tokens = sum(sizes) + _CHARS_OF_INPUT * len(sizes), 0
        sequences: list[SequenceState] = []
        for first, end in slices(sizes, _SLICE):
            process = self._pipeline.input_processor.process
            job = functools.partial(process, inputs[first:end], options, first_index=first)
            made = job() if size <= _AT_ONCE else await self._lanes.run(size, job)
            num_tokens += sum(map(len, made))
            check_num_tokens(num_tokens, limits)
            sequences += made
        return sequences

    def _check_values(
        self, sequences: list[SequenceState], options: RequestOptions, limit: int | None
    ) -> None:
        """Raise RequestError if the outputs would hold more than `limit` numbers.

        Sparse vectors are not counted: their sizes are known only after they are computed.
        """
        width = {
            "embed": options.dimensions or self.info.dimension or 0,
            "classify": len(self.info.labels),
            "token_embed": self.info.token_dimension or 0,
        }
        num_tokens = sum(map(len, sequences))
        values = sum(
            width.get(task, 0) * (num_tokens if task == "token_embed" else len(sequences))
            for task in options.tasks
        )
        if limit is not None and values > limit:
            raise too_many_values(values, limit)

    def _check_count(self, num_inputs: int) -> None:
        limit = self._pipeline.options.max_request_inputs
        if not 1 <= num_inputs <= limit:
            raise RequestError(
                f"a request takes 1 to {limit} inputs, not {num_inputs}: send several requests.",
                "input",
            )

    def _pump_soon(self) -> None:
        """Schedule `_pump` for the next turn of the event loop, if it is not scheduled yet.

        Callers that are ready in this turn queue their sequences first, and so share a batch.
        """
        if not self._pump_is_due:
            self._pump_is_due = True
            assert self._loop is not None
            self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        self._pump_is_due = False
        self._pipeline.pump()

    def _deliver(self, finished: Finished) -> None:
        """Hand a finished batch to the event loop. The device thread calls this."""
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(self._on_finished, finished)
        except RuntimeError:
            """The loop is closed, so no caller waits for the batch."""

    def _on_finished(self, finished: Finished) -> None:
        outputs = self._pipeline.outputs_of(finished)
        self._pipeline.pump()  # before the callers wake, so that the device does not wait for them
        for sequence, output in outputs:
            _settle(sequence, output)

    @property
    def alive(self) -> bool:
        """Whether the device thread runs. Once it has ended, it is not restarted."""
        return self._pipeline.alive

    def watch(self) -> bool:
        """Whether the engine can go on. Call it several times a second, from the event loop.

        False if the device thread has ended, or has finished no batch for `hang_timeout_s`.
        """
        pipeline = self._pipeline
        self._stall.look(pipeline.num_batches, pipeline.num_computed)
        return self.alive and not self._stall.is_stuck

    def check_health(self) -> None:
        """Raise EngineDeadError if the device thread has ended or is stuck."""
        if not self.alive or self._stall.is_stuck:
            raise EngineDeadError("the embedding engine has stopped: send the request again.")

    async def token_ids(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The token ids of `text`. Raises RequestError if it is longer than `max_text_chars`."""
        (size,) = check_sizes([text], "", self._pipeline.options)
        return await self._lanes.run(
            size, self._pipeline.tokenizer.token_ids, text, add_special_tokens
        )

    async def tokens_of(self, token_ids: Sequence[int]) -> list[str]:
        size = lanes.num_chars(token_ids)
        return await self._lanes.run(size, self._pipeline.tokenizer.tokens_of, token_ids)

    async def text_of(self, token_ids: Sequence[int]) -> str:
        """The text of `token_ids`.

        Raises RequestError if there are more ids than a quarter of `max_text_chars`.
        """
        limit = self._pipeline.options.max_text_chars // 4
        if len(token_ids) > limit:
            raise RequestError(
                f"{len(token_ids)} tokens are too many: send at most {limit}.", "tokens"
            )
        size = lanes.num_chars(token_ids)
        return await self._lanes.run(size, self._pipeline.tokenizer.text_of, token_ids)

    def stats(self) -> dict[str, int]:
        """How many sequences and tokens wait now, and how many batches are in flight."""
        return {
            "queued_sequences": self._pipeline.scheduler.queued_sequences,
            "queued_tokens": self._pipeline.scheduler.queued_tokens,
            "batches_in_flight": self._pipeline.num_in_flight,
        }

    def totals(self) -> dict[str, int]:
        """Requests, sequences and tokens that have come, and batches begun, since the start."""
        return {**self._counts, "batches": self._pipeline.num_batches}

    def close(self) -> None:
        self._lanes.close()
        self._pipeline.close()


def _settle(sequence: SequenceState, output: Output | EngineError) -> None:
    """Give an output or an error to the call that waits for it, if it still waits."""
    request: _Request = sequence.request
    if request.future.done():
        return
    if isinstance(output, EngineError):
        request.future.set_exception(output)
        return
    request.add(sequence.index, output)
