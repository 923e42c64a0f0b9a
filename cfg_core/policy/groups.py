"""Groups: which streams belong together, and with what weights their predictions are blended.

A *stream* is one token sequence with its own KV block table. The *leader* is the conditional
stream, the request that the user made; its *followers* are negative or weighted
streams that receive the leader's tokens. A *group* is a leader with its followers. Classifier-free
guidance uses a group of two streams.

With a *suffix*, a group has one stream: in each joint step, the leader computes the suffix behind
its own tokens, and what it says there is the negative. The suffix is computed again for each token,
and is never a part of the text.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from cfg_core.params import Cuts, Scored, Strength

FOLLOWER_SUFFIX = "#negative"
"""Follower i of request R has the id `R#negative<i>`.

Admission refuses request ids that contain this text.
"""


def follower_id(leader: str, index: int) -> str:
    """Return the id of follower `index` (from 0) of the request `leader`."""
    return f"{leader}{FOLLOWER_SUFFIX}{index}"


class Group(NamedTuple):
    """A leader, its followers, and one weight per stream (leader first).

    Workers get it in each joint step, so it is of the kind that is pickled fastest.

    weights: they sum to 1. With a timeline (core/followers.py) they are those of the first token.
    logprobs: how many tokens that each stream finds most likely come with its log-probability of a
        sampled token. None: the request did not ask for log-probabilities of its streams.
    needs_rows: whether the row of each stream is needed, so that the blend must come after the
        model's head (see `cfg_core.vllm_plugin.worker.head`).
    cuts: None if every token may be sampled.
    strength: None if how strongly a token is guided does not depend on its rows.
    scored: None if no token of the prompt is scored.
    suffix: the tokens behind which the leader is its own negative; there are no followers then.
    """

    leader: str
    followers: tuple[str, ...]
    weights: tuple[float, ...]
    logprobs: int | None = None
    needs_rows: bool = False
    cuts: Cuts | None = None
    strength: Strength | None = None
    scored: Scored | None = None
    suffix: tuple[int, ...] = ()

    @property
    def streams(self) -> tuple[str, ...]:
        """All stream ids, leader first."""
        return (self.leader, *self.followers)

    @property
    def blended(self) -> tuple[str, ...]:
        """What each weight is of: the streams or, with a suffix, the leader and its suffix.

        The suffix has the name that the follower in its place would have.
        """
        return (self.leader, follower_id(self.leader, 0)) if self.suffix else self.streams


def output_of_followers(output: Sequence[int], since: int = 0) -> list[int]:
    """The tokens of the leader's output that each follower has behind its own prompt.

    They are all of them: a follower's tokens are its prompt, and the output. With
    `restart_negative` (cfg_core/params/between.py) they are those after the last start token of
    the output, which is token `since - 1`. The start token itself is not among them: a negative
    that needs it ends with it.
    """
    return list(output[since:])


class GroupTable:
    """All live groups, found by the id of any of their streams.

    Only the scheduler changes it. A group is added at admission, and removed as a whole when its
    leader finishes or is aborted.
    """

    def __init__(self) -> None:
        self._by_stream: dict[str, Group] = {}
        self._leaders: dict[str, None] = {}

    def __len__(self) -> int:
        return len(self._leaders)

    def __iter__(self) -> Iterator[Group]:
        return (self._by_stream[leader] for leader in self._leaders)

    def __contains__(self, stream: str) -> bool:
        return stream in self._by_stream

    def of(self, stream: str) -> Group | None:
        """Return the group that `stream` belongs to, or None for a plain request."""
        return self._by_stream.get(stream)

    def is_follower(self, stream: str) -> bool:
        """Return whether `stream` is a follower of a live group."""
        group = self._by_stream.get(stream)
        return group is not None and group.leader != stream

    def add(self, group: Group) -> None:
        """Add a group, whose streams must not be in the table yet."""
        assert not any(stream in self._by_stream for stream in group.streams), group
        self._leaders[group.leader] = None
        self._by_stream.update(dict.fromkeys(group.streams, group))

    def remove(self, stream: str) -> Group | None:
        """Remove the whole group of `stream` and return it, or return None if there is none."""
        group = self._by_stream.get(stream)
        if group is not None:
            del self._leaders[group.leader]
            for member in group.streams:
                del self._by_stream[member]
        return group

    def check_integrity(self) -> None:
        """Assert what must hold between any two calls, for tests and debugging."""
        assert set(self._leaders) == {g.leader for g in self._by_stream.values()}
        for stream, group in self._by_stream.items():
            assert stream in group.streams
            assert len(group.weights) == len(group.blended) >= 2
            assert not (group.suffix and group.followers)
            assert math.isclose(
                sum(group.weights), 1.0, abs_tol=1e-9 * max(map(abs, group.weights))
            )
        assert set(self._by_stream) == {s for g in self._by_stream.values() for s in g.streams}
