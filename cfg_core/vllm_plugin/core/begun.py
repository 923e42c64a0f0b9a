"""Requests that have begun elsewhere, in the engine core.

Their tokens become output of vLLM's Request before the scheduler sees it. From there on the request
is as one that was preempted after these tokens, but that its workers do not know it: prompt and
output are computed together, as far as they are not in the prefix cache, and what reads the output
(stop conditions, penalties, seeds, windows, markers) finds it there. Followers are made with it.

Its first output has the begun tokens in front of the new ones, because the frontend knows of a text
only what the engine core sends.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.outputs import LogprobsLists

from cfg_core.params.begun import BEGUN, FIELD, TOLD, begun_of, is_unread

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.request import Request

_BEGUN = "cfg_serve_begun"
_TOLD = "cfg_serve_begun_told"

IGNORED = (
    f"its {FIELD} were not read by the frontend of a guided engine: call guided_engine_args() in"
    " the process of the frontend, before its engine is made."
)
"""Why a request fails that would otherwise begin anew."""


def make_begun(request: Request) -> None:
    """Make the tokens that a request has begun with its output. A second call does nothing.

    They leave the request's sampling parameters, which vLLM sends to each worker, and which other
    choices of the same client may share.
    """
    sampling = request.sampling_params
    tokens = begun_of(None if sampling is None else sampling.extra_args)
    if not tokens:
        return
    request.sampling_params = sampling = copy.copy(sampling)
    extra: dict[str, Any] = sampling.extra_args
    rest = {name: value for name, value in extra.items() if name not in (BEGUN, TOLD)}
    sampling.extra_args = rest or None
    setattr(request, _BEGUN, tokens)
    setattr(request, _TOLD, bool(extra.get(TOLD)))
    request.append_output_token_ids(tokens)
    # vLLM asserts that a first prefill finds no more than the prompt in the prefix cache.
    request.prefill_stats = None


def tokens_of(request: Request) -> list[int]:
    """The tokens that a request has begun with; none if it has not begun elsewhere."""
    begun: list[int] = getattr(request, _BEGUN, [])
    return begun


def refusal(request: Request) -> str | None:
    """Why a request cannot go on, if admission has not noticed; None if it can."""
    sampling = request.sampling_params
    if sampling is not None and is_unread(sampling.extra_args):
        return IGNORED
    if tokens_of(request) and request.num_output_tokens >= request.max_tokens:
        return f"its {FIELD} are as many as its max_tokens: the text is complete."
    return None


class BegunRequests:
    """The requests of one engine that have begun elsewhere, until their first output."""

    def __init__(self) -> None:
        self._silent: dict[str, list[int]] = {}
        self._untold: set[str] = set()

    def __bool__(self) -> bool:
        return bool(self._silent)

    def add(self, request: Request) -> None:
        """Note a request that the scheduler has got, if it has begun."""
        if tokens := tokens_of(request):
            self._silent[request.request_id] = tokens
            if not getattr(request, _TOLD):
                self._untold.add(request.request_id)

    def forget(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids if self._silent else ():
            self._silent.pop(request_id, None)
            self._untold.discard(request_id)

    def complete(self, step: SchedulerOutput, requests: Mapping[str, Request]) -> None:
        """Tell the workers the output of requests that they do not know yet.

        vLLM does so by itself on V2. It also counts what the prefix cache had of the prompt.
        """
        for new in step.scheduled_new_reqs if self._silent else ():
            if new.req_id in self._silent:
                request = requests[new.req_id]
                new.prefill_token_ids = list(request.all_token_ids)
                request.prefill_stats = stats = PrefillStats()
                prompt: int = request.num_prompt_tokens
                stats.set(prompt, min(new.num_computed_tokens, prompt), 0)

    def tell(self, outputs: Iterable[EngineCoreOutput]) -> None:
        """Put the begun tokens of each request in front of the new ones of its first output.

        Not if the frontend has read them. Nobody knows their log-probabilities any more, so these
        are NaN.
        """
        for output in outputs if self._silent else ():
            if output.new_token_ids and output.request_id in self._silent:
                begun = self._silent.pop(output.request_id)
                if output.request_id not in self._untold:
                    continue
                self._untold.discard(output.request_id)
                output.new_token_ids = [*begun, *output.new_token_ids]
                if output.new_logprobs is not None:
                    output.new_logprobs = _after_unknown(begun, output.new_logprobs)


def _after_unknown(tokens: list[int], known: LogprobsLists) -> LogprobsLists:
    """Logprobs with rows in front that say nothing of `tokens`."""
    ids, values, ranks = known.logprob_token_ids, known.logprobs, known.sampled_token_ranks
    shape = (len(tokens), ids.shape[1])
    more = np.broadcast_to(np.asarray(tokens, ids.dtype)[:, None], shape)
    return LogprobsLists(
        np.concatenate([more, ids]),
        np.concatenate([np.full(shape, np.nan, values.dtype), values]),
        np.concatenate([np.zeros(len(tokens), ranks.dtype), ranks]),
    )
