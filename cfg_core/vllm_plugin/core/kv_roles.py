"""The KV pool by role: the blocks that leaders and followers need, hold and may still take.

With `elastic`, the boundary between the roles moves with demand. With `even`, each role has half of
the pool, as in vLLM RFC #5825. Plain requests count as leaders there.
"""

from __future__ import annotations

import bisect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from typing_extensions import override
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager, MambaManager

from cfg_core.errors import CompatibilityError
from cfg_core.policy.lockstep import Headroom
from cfg_core.policy.pool import EVEN, Pool

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.request import Request


class KVRoles:
    """Block arithmetic over vLLM's KV cache manager. It only reads the manager."""

    def __init__(
        self,
        manager: KVCacheManager,
        requests: dict[str, Request],
        max_model_len: int,
        lookahead: int = 0,
    ) -> None:
        """lookahead: tokens beyond a stream's own for which vLLM reserves blocks, for a drafter."""
        self._manager = manager
        self._requests = requests
        self._max_model_len = max_model_len
        self._lookahead = lookahead
        managers = manager.coordinator.single_type_managers
        self._sizes: list[int] = [m.block_size for m in managers]
        states = [m for m in managers if isinstance(m, MambaManager)]
        self._has_states = bool(states)
        self._first_states: int = sum(map(_first_states, states))
        self.moving_states: int = sum(m.mamba_cache_mode == "align" for m in states)

    # -- cfg_core.policy.lockstep.BlockNeeds -------------------------------------------------------

    def at_most(self, num_tokens: int) -> int:
        """Upper bound of the blocks that any stream needs for `num_tokens` more tokens.

        Compared with `at_most_running`, one more block may be begun in each KV group, and a new
        stream takes blocks for states that drafts need.
        """
        return self.at_most_running(num_tokens) + len(self._sizes) + self._first_states

    def exactly(self, stream: str, num_tokens: int) -> int:
        """Blocks that the running `stream` needs for `num_tokens` more, as vLLM counts them."""
        request = self._requests[stream]
        return self.needed(request, request.num_computed_tokens + num_tokens)

    def at_most_running(self, num_tokens: int) -> int:
        """Upper bound as in `at_most`, for a running stream with blocks for all its tokens."""
        return sum(-(-(num_tokens + self._lookahead) // size) for size in self._sizes)

    # -- the pool ----------------------------------------------------------------------------------

    @property
    def total(self) -> int:
        """Blocks of the pool, without vLLM's null block."""
        return int(self._manager.block_pool.num_gpu_blocks) - 1

    def empty(self, kv_split: str) -> Pool:
        """The pool as it is when no stream holds a block."""
        return Pool(self.total, int(self._manager.watermark_blocks), kv_split)

    @property
    def free(self) -> int:
        """Blocks that can be handed out now. Cached blocks that nobody uses are included."""
        return int(self._manager.block_pool.get_num_free_blocks())

    def whole(self, num_tokens: int) -> int:
        """Blocks of a new stream of `num_tokens`.

        Sliding windows are taken into account. Prefix-cache hits are not. A recurrent state that
        is cached at each block is copied into the next block, so a stream holds two for a while.
        """
        return self.needed(None, num_tokens) + self.moving_states

    @property
    def tokens_per_block(self) -> int:
        """Tokens for each block that a stream takes, if it fills the context.

        With one KV group this is the block size. With several, a stream takes blocks of each.
        """
        if len(self._sizes) == 1 and not self._has_states:
            return self._sizes[0]
        return max(1, self._max_model_len // self.whole(self._max_model_len))

    def likely_hits(self, request: Request) -> int:
        """Tokens of a stream that are believed to be in the prefix cache, found in a few looks.

        vLLM looks for each block of a prompt, in Python. Here it is believed that all blocks before
        a cached one are cached, too. 0 if that says nothing about hits (several KV groups, windows,
        states).
        """
        managers = self._manager.coordinator.single_type_managers
        if len(managers) != 1 or type(managers[0]) is not FullAttentionManager:
            return 0
        if not self._manager.enable_caching or request.skip_reading_prefix_cache:
            return 0
        size, pool, hashes = self._sizes[0], self._manager.block_pool, request.block_hashes
        blocks = range(min(len(hashes), (request.num_tokens - 1) // size))
        missed = bisect.bisect_left(
            blocks, True, key=lambda i: pool.get_cached_block(hashes[i], [0]) is None
        )
        return size * (missed - 1 if missed and self._manager.use_eagle else missed)

    def entries(self, is_follower: Callable[[str], bool]) -> list[int]:
        """Number of block-table entries: of leaders and plain requests, and of followers.

        A shared block counts once for each entry. Entries for tokens that are not needed any more
        (windows, states) have no block, and do not count.
        """
        held = [0, 0]
        for manager in self._manager.coordinator.single_type_managers:
            for stream, blocks in manager.req_to_blocks.items():
                held[is_follower(stream)] += sum(not block.is_null for block in blocks)
        return held

    def held(self, streams: Iterable[str]) -> set[tuple[int, int]]:
        """Every block in the block tables of `streams`, as (KV group, block id).

        A shared block counts once.
        """
        managers = self._manager.coordinator.single_type_managers
        return {
            (i, block.block_id)
            for stream in streams
            for i, manager in enumerate(managers)
            for block in manager.req_to_blocks.get(stream, ())
            if not block.is_null
        }

    def needed(self, request: Request | None, num_tokens: int) -> int:
        """New blocks with which a stream reaches `num_tokens` tokens.

        request: the stream's request; None for a new stream.
        """
        computed, prefill_end = 0, num_tokens
        if request is not None:
            computed = request.num_computed_tokens
            prefill_end = max(request.num_prompt_tokens, request.num_tokens - 1)
        needed: int = self._manager.coordinator.get_num_blocks_to_allocate(
            request_id="" if request is None else request.request_id,
            num_tokens=min(num_tokens + self._lookahead, self._max_model_len),
            new_computed_blocks=self._manager.empty_kv_cache_blocks.blocks,
            num_encoder_tokens=0,
            total_computed_tokens=computed,
            num_local_computed_tokens=computed,
            num_tokens_main_model=num_tokens,
            apply_admission_cap=request is None,
            prefill_end=prefill_end,
        )
        return needed


def _first_states(manager: MambaManager) -> int:
    """Most blocks, besides the first, that a stream takes for its states when it begins.

    One for each draft, one to keep a state that other streams share, and one to cache a state
    inside of a chunk.
    """
    drafts = int(manager.num_speculative_blocks)
    return drafts + (2 if manager.mamba_cache_mode == "align" else 0)


class Split(ABC):
    """How the roles share the pool."""

    def __init__(self, roles: KVRoles, pool: Pool) -> None:
        self._roles, self.pool = roles, pool

    @abstractmethod
    def headroom(self) -> Headroom:
        """Blocks that may still be taken: in all, by leaders and plain requests, by followers."""

    def fits(self, leader_tokens: int, follower_tokens: Sequence[int]) -> bool:
        """Whether a group whose streams end at these lengths fits the empty pool."""
        followers = [self._roles.whole(tokens) for tokens in follower_tokens]
        return self.pool.fits(self._roles.whole(leader_tokens), followers)


class ElasticSplit(Split):
    """One pool for both roles. A stream of either role may take any free block."""

    @override
    def headroom(self) -> Headroom:
        free = self._roles.free
        return Headroom(free, free, free)


class EvenSplit(Split):
    """Two equal halves: leaders and plain requests in one, followers in the other.

    A stream whose role is at its limit gets None ("no blocks"), as if the pool were full.
    """

    def __init__(
        self, roles: KVRoles, pool: Pool, is_follower: Callable[[str], bool], max_model_len: int
    ) -> None:
        super().__init__(roles, pool)
        self._is_follower = is_follower
        # Between refreshes this is an upper bound: blocks that were freed since are still counted.
        self._held = [0, 0]
        if roles.whole(max_model_len) > pool.limit:
            raise CompatibilityError(
                f"kv_split: even gives each role {pool.limit} KV blocks, but one sequence of"
                f" max_model_len {max_model_len} needs {roles.whole(max_model_len)}: lower"
                " max_model_len, give the engine more KV memory, or use kv_split: elastic."
            )

    @override
    def headroom(self) -> Headroom:
        self._held = self._roles.entries(self._is_follower)
        leaders, followers = (self.pool.limit - held for held in self._held)
        return Headroom(self._roles.free, leaders, followers)

    def enforce(self, manager: KVCacheManager) -> None:
        """Enforce the split where blocks are handed out, in `manager.allocate_slots`."""
        allocate = manager.allocate_slots

        def allocate_slots(request: Request, num_new_tokens: int, *args: Any, **kwargs: Any) -> Any:
            role = self._is_follower(request.request_id)
            needed = self._entries_needed(request, num_new_tokens, kwargs)
            if needed > self.pool.limit - self._held[role]:
                self.headroom()
                if needed > self.pool.limit - self._held[role]:
                    return None
            blocks = allocate(request, num_new_tokens, *args, **kwargs)
            if blocks is not None:
                self._held[role] += needed
            return blocks

        manager.allocate_slots = allocate_slots

    def _entries_needed(self, request: Request, num_new_tokens: int, kwargs: dict[str, Any]) -> int:
        """Block-table entries that this allocation may add.

        Prefix-cache hits are entries too, and so is a cached state.
        """
        hits = kwargs.get("num_new_computed_tokens", 0)
        end = request.num_computed_tokens + hits + num_new_tokens
        if kwargs.get("full_sequence_must_fit"):
            end = max(end, request.num_tokens)
        return self._roles.needed(request, end) + (self._roles.moving_states if hits else 0)


def split_pool(
    kv_split: str,
    manager: KVCacheManager,
    roles: KVRoles,
    is_follower: Callable[[str], bool],
    max_model_len: int,
) -> Split:
    """Make the split named `kv_split` (one of KV_SPLITS), and enforce it on `manager`."""
    pool = roles.empty(kv_split)
    if kv_split != EVEN:
        return ElasticSplit(roles, pool)
    split = EvenSplit(roles, pool, is_follower, max_model_len)
    split.enforce(manager)
    return split
