"""A replica goes on with an answer that another one has begun.

vLLM's frontend first reads again what the other replica's has read: the same outputs, in the same
parts. So the detokenizer, the parsers and the counters of its serving class are where they were,
and the same events come out, of which the ingress drops those that the client has. Then the engine
gets each choice that is not complete, with its tokens (cfg_core/vllm_plugin/core/begun.py).
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.v1.engine import FINISH_REASON_STRINGS, EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.outputs import LogprobsLists

from cfg_core.params.begun import BEGUN, TOLD
from deployments.requests.progress import Begun, Part, unpack
from deployments.requests.usage import OutputCounts

if TYPE_CHECKING:
    from vllm.v1.engine.output_processor import RequestState


class Replay:
    """The choices of one request that goes on here.

    is_whole: whether its answer comes in one piece, after all outputs.
    """

    def __init__(self, begun: Begun, is_whole: bool = False) -> None:
        self._begun = begun
        self.is_whole = is_whole
        self._choices: dict[int, tuple[EngineCoreRequest, RequestState]] = {}
        self._are_all_here = asyncio.Event()

    def add(self, request: EngineCoreRequest, state: RequestState) -> None:
        """Take a choice in place of the engine, and put the tokens into it that it has already."""
        self._choices[state.request_index] = request, state
        if tokens := self._begun.tokens_of(state.request_index):
            sampling = request.sampling_params = copy.copy(request.sampling_params)
            sampling.extra_args = {**(sampling.extra_args or {}), BEGUN: [tokens], TOLD: True}
        if len(self._choices) == (1 if state.parent_req is None else state.parent_req.n):
            self._are_all_here.set()

    @property
    def counts(self) -> OutputCounts:
        """What the other replica has counted."""
        return self._begun.counts

    async def has_all(self, adding: asyncio.Future[Any]) -> bool:
        """Wait until all choices are here. False if `adding`, which brings them, has failed."""
        here = asyncio.ensure_future(self._are_all_here.wait())
        try:
            await asyncio.wait({here, adding}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            here.cancel()
        return self._are_all_here.is_set()

    def outputs(self) -> Iterator[list[EngineCoreOutput]]:
        """What the engine of the other replica has sent, as far as it was read there."""
        for output in self._begun.outputs:
            yield [self._output(part) for part in output]

    def _output(self, part: Part) -> EngineCoreOutput:
        request, state = self._choices[part.choice]
        tokens, reason = unpack(part.token_ids), part.finish_reason
        # A stop string ends the choice again where it is read again.
        ends = reason is not None and not isinstance(part.stop_reason, str)
        return EngineCoreOutput(
            request_id=request.request_id,
            new_token_ids=tokens,
            new_logprobs=_unknown(tokens, state.logprobs_processor),
            finish_reason=FinishReason(FINISH_REASON_STRINGS.index(reason)) if ends else None,
            stop_reason=part.stop_reason if ends else None,
        )

    def length(self, request: EngineCoreRequest) -> int:
        """How many tokens a choice has."""
        extra: dict[str, Any] = request.sampling_params.extra_args or {}
        return len(extra[BEGUN][0]) if BEGUN in extra else 0


def _unknown(tokens: list[int], processor: Any) -> LogprobsLists | None:
    """Log-probabilities that say nothing of `tokens`; None if the request wants none."""
    if processor.num_logprobs is None:
        return None
    ids = np.repeat(np.asarray(tokens, np.int32)[:, None], 1 + processor.stream_columns.width, 1)
    return LogprobsLists(ids, np.full(ids.shape, np.nan, np.float32), np.zeros(len(tokens), int))
