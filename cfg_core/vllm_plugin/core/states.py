"""Recurrent states (Mamba, linear attention, short convolutions): what cannot be undone.

Attention writes each token into a slot of its own, so a token can be taken back and computed again.
A recurrent layer adds each token to one state, and the state before it is gone. Two things follow:

- A stream that would have sampled alone is computed again from its start, with its whole group.
  Only a stream that has computed its first token alone is taken back: a stream without computed
  tokens begins with an empty state, whatever its block contains.
- The plan avoids such samples more strictly. With prefix caching of states ("align"), vLLM ends
  chunks where it caches a state, and delays a stream that would read a state of the same step. So a
  group samples only once each of its streams lacks no more than its next token
  (`Snapshot.joint_limit`), and no cached prefix may reach so far that a stream samples in the step
  that admits it.

With drafts, a layer keeps a state for each token of a step, and goes on from the one of the last
token that was accepted. A stream that would have sampled alone is computed again all the same,
because the step has overwritten the state that it began with.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from vllm.v1.request import Request, RequestStatus

from cfg_core.policy.groups import Group

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler


class States:
    """The recurrent states of one engine's streams. Does nothing for a model without any."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.exist: bool = scheduler.has_mamba_layers
        self.are_cached: bool = self.exist and scheduler.cache_config.enable_prefix_caching
        self._spoilt: dict[str, tuple[str, ...]] = {}
        if self.exist:
            _pad_no_prompts(scheduler)

    @property
    def joint_limit(self) -> int:
        """`Snapshot.joint_limit` of this engine."""
        return 1 if self.are_cached else 0

    def most_hits(self, request: Request) -> int | None:
        """Tokens of a group's stream that may come from the prefix cache; None for no limit.

        At least two tokens are left, so that the stream can wait one token short of its end.
        """
        return max(0, request.num_tokens - 2) if self.are_cached else None

    def note_taken_back(self, request: Request, group: Group | None) -> None:
        """Note that a token was taken back from a stream. Its state still contains the token."""
        if self.exist and group is not None and request.num_computed_tokens > 0:
            self._spoilt[group.leader] = group.streams

    def take_spoilt(self, requests: Mapping[str, Request]) -> list[Request]:
        """The running streams of groups with such a state, which must be computed again."""
        spoilt, self._spoilt = self._spoilt, {}
        return [r for streams in spoilt.values() for r in _running(streams, requests)]

    def __bool__(self) -> bool:
        """Whether a stream must be computed again."""
        return bool(self._spoilt)


def _pad_no_prompts(scheduler: Scheduler) -> None:
    """Let vLLM admit a prompt of one token without placeholders for drafts.

    vLLM adds them for the shape of a CUDA graph. With them, the runners take the prompt for a
    decode, which begins with the state that another stream has left in the block, or add the
    placeholders to its state. vLLM adds none where the number of drafts depends on the batch.
    """
    if scheduler.num_spec_tokens and scheduler.dynamic_sd_lookup is None:
        most = scheduler.max_num_active_reqs
        scheduler.dynamic_sd_lookup = [scheduler.num_spec_tokens] * (most + 1)


def _running(streams: Iterable[str], requests: Mapping[str, Request]) -> Iterable[Request]:
    found = (requests.get(stream) for stream in streams)
    return (r for r in found if r is not None and r.status == RequestStatus.RUNNING)
