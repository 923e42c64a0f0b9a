"""What a replica tells of a stream while it runs, so that another one can go on with it.

See deployments/requests/progress.py. Only streams with one prompt are told of: of several prompts,
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

MOVABLE: tuple[Endpoint, ...] = ("completion", "chat", "messages")
"""The endpoints whose streams can go on elsewhere. The Responses API has random ids in each
event."""


class Recorder:
    """The outputs of one stream that vLLM's serving class has read since the last chunk.

    meter: of the stream's request.
    """

    def __init__(self, meter: Meter, endpoint: Endpoint) -> None:
        self._meter = meter
        self._can_tell = endpoint in MOVABLE
        self._outputs: list[Output] = []
        self._generations = 0

    def begin(self, params: object) -> None:
        """Note that the engine is asked for an answer to a prompt."""
        self._generations += 1
        is_known = (
            isinstance(params, SamplingParams)
            and params.prompt_logprobs is None
            and params.logprobs != -1
        )
        self._can_tell &= self._generations == 1 and is_known

    def note(self, output: RequestOutput) -> None:
        """Note an output that the serving class reads now."""
        if self._can_tell:
            self._outputs.append(
                tuple(
                    Part(one.index, pack(list(one.token_ids)), one.finish_reason, one.stop_reason)
                    for one in output.outputs
                )
            )

    def take(self) -> Progress | None:
        """What has come since the last call; None if nobody can go on with this stream."""
        if not self._can_tell or not self._generations:
            return None
        outputs, self._outputs = tuple(self._outputs), []
        return Progress(outputs, self._meter.counts)
