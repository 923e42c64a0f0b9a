"""Whether a group of streams can ever run in the KV pool: the one rule, in blocks.

Admission asks before a request enters the engine, and the scheduler asks when it makes the group.
The scheduler knows the exact blocks of each stream. Admission knows tokens alone, and rounds them
up to blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ELASTIC, EVEN = KV_SPLITS = ("elastic", "even")
"""elastic: a stream of either role may take any free block.
even: each role has half of the pool, as in vLLM RFC #5825. Plain requests count as leaders. The
followers of all groups share their half, and who comes first takes first."""


@dataclass(frozen=True)
class Pool:
    """blocks: those of the empty pool, without vLLM's null block.

    watermark: blocks that vLLM keeps free when it admits a request while others run.
    kv_split: one of KV_SPLITS.
    """

    blocks: int
    watermark: int
    kv_split: str

    @property
    def limit(self) -> int:
        """Most blocks that one role may hold."""
        return self.blocks // 2 if self.kv_split == EVEN else self.blocks

    def fits(self, leader: int, followers: Sequence[int]) -> bool:
        """Whether streams that end up with so many blocks fit the empty pool together.

        With `even`, all followers share one half.
        """
        roles = (leader, sum(followers))
        needed = max(roles) if self.kv_split == EVEN else sum(roles)
        return needed + self.watermark <= self.limit


@dataclass(frozen=True)
class Lengths:
    """The prompts of a group, in tokens.

    end: the output token before which the followers leave. None: they stay to the end of the text.
    suffix: tokens that the leader computes behind its own, instead of followers.
    """

    prompt: int
    followers: tuple[int, ...]
    end: int | None = None
    suffix: int = 0

    def room(self, max_tokens: int, max_model_len: int) -> int:
        """The most output tokens, at most `max_tokens`, with which all streams fit the context.

        A follower that leaves before the text ends must not fill its own context before. A suffix
        is behind the text, so it is always left room for.
        """
        room = min(max_tokens, max_model_len - self.prompt - self.suffix)
        longest = max(self.followers, default=0)
        if self.end is None or self.end >= room or longest + self.end >= max_model_len:
            room = min(room, max_model_len - longest)
        return room

    def totals(self, num_tokens: int) -> tuple[int, tuple[int, ...]]:
        """Tokens that the leader and the followers end with, after `num_tokens` output tokens."""
        guided = num_tokens if self.end is None else min(self.end, num_tokens)
        leader = self.prompt + num_tokens + self.suffix
        return leader, tuple(length + guided for length in self.followers)
