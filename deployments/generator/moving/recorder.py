"""What a replica tells of an answer while it computes it, so that another one can go on with it.

See deployments/requests/progress.py. Only answers to one prompt are told of: of several prompts,
vLLM joins the outputs in the order in which they happen to come.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.sampling_params import SamplingParams

from deployments.requests.endpoints import Endpoint
from deployments.requests.progress import Output, Part, Progress, pack
from deployments.requests.usage import Meter

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput
    from vllm.v1.engine import EngineCoreOutput

MOVABLE: tuple[Endpoint, ...] = ("completion", "chat", "messages", "responses")
"""The endpoints whose answers can go on elsewhere."""

FAILED = ("abort", "error")
"""Ends of a choice that nobody goes on with."""


class Recorder:
    """The outputs of one answer since they were told last.

    Of a stream, they are those that vLLM's serving class has read. Of an answer in one piece, which
    that class reads at the end, they are those of the engine. Log-probabilities are not kept, so an
    answer in one piece that has some is not told of: it starts over. Nor is such a stream of the
    Responses API: it ends if its replica is lost.

    meter: of the answer's request.
    model: the fingerprint of what this replica computes with.
    is_whole: whether the answer comes in one piece.
    """

    def __init__(
        self, meter: Meter, endpoint: Endpoint, model: str = "", is_whole: bool = False
    ) -> None:
        self._meter = meter
        self._model = model  # until it was told
        self.is_whole = is_whole
        self._can_tell = endpoint in MOVABLE
        # The last events of the Responses API have the whole answer, with its log-probabilities.
        self._needs_all = is_whole or endpoint == "responses"
        self._outputs: list[Output] = []
        self._generations = 0

    def begin(self, params: object) -> None:
        """Note that the engine is asked for an answer to a prompt."""
        self._generations += 1
        is_known = (
            isinstance(params, SamplingParams)
            and params.prompt_logprobs is None
            and (params.logprobs is None if self._needs_all else params.logprobs != -1)
        )
        self._can_tell &= self._generations == 1 and is_known

    def note(self, output: RequestOutput) -> None:
        """Note an output that the serving class reads now."""
        if self._can_tell and not self.is_whole:
            self._outputs.append(
                tuple(
                    Part(one.index, pack(list(one.token_ids)), one.finish_reason, one.stop_reason)
                    for one in output.outputs
                )
            )

    def note_of_engine(self, choice: int, output: EngineCoreOutput) -> None:
        """Note what the engine has sent of a choice, without tokens behind a stop string."""
        if not self._can_tell or not self.is_whole:
            return
        reason = None if output.finish_reason is None else str(output.finish_reason)
        self._can_tell = reason not in FAILED
        tokens = pack(list(output.new_token_ids))
        self._outputs.append((Part(choice, tokens, reason, output.stop_reason),))

    def take(self) -> Progress | None:
        """What has come since the last call; None if nobody can go on with this answer."""
        if not self._can_tell or (self.is_whole and not self._generations):
            return None  # a stream may have events before the engine is asked
        outputs, self._outputs = tuple(self._outputs), []
        model, self._model = self._model, ""
        return Progress(outputs, self._meter.counts, model)

    def take_whole(self) -> Progress | None:
        """The same of an answer in one piece; None of a stream, whose chunks tell it."""
        return self.take() if self.is_whole else None
