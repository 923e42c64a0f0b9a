"""Whether a group of streams can ever run in the KV pool: the one rule, in blocks.

Admission asks before a request enters the engine, and the scheduler asks when it makes the group.
The scheduler knows the exact blocks of each stream. Admission knows tokens alone, and rounds them
up to blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

ELASTIC, EVEN = KV_SPLITS = ("elastic", "even")
"""elastic: a stream of either role may take any free block.
even: each role has half of the pool, as in vLLM RFC #5825; plain requests count as leaders."""


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

    def fits(self, leader: int, follower: int) -> bool:
        """Whether two streams that end up with so many blocks fit the empty pool together."""
        needed = max(leader, follower) if self.kv_split == EVEN else leader + follower
        return needed + self.watermark <= self.limit
