"""Statistics of the engine core about its groups and its KV pool: `guidance_stats`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cfg_core.policy.groups import GroupTable
from cfg_core.vllm_plugin.core.kv_roles import KVRoles

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore


def utility_method(_stock: None) -> Any:
    """The method of vLLM's EngineCore that frontends call for the statistics (vllm_patches.py)."""

    def guidance_stats(core: EngineCore) -> dict[str, int]:
        scheduler: Any = core.scheduler  # a GuidedScheduler
        stats: dict[str, int] = scheduler.guidance_stats()
        return stats

    return guidance_stats


def queues(scheduler: Scheduler) -> dict[str, int]:
    """Numbers of running and waiting requests, and of prompt tokens that are not computed yet."""
    num_running, num_waiting = scheduler.get_request_counts()
    return {
        "running": num_running,
        "waiting": num_waiting,
        "queued_prefill_tokens": sum(
            max(0, r.num_tokens - r.num_computed_tokens - 1) for r in scheduler.requests.values()
        ),
        "max_num_seqs": scheduler.max_num_running_reqs,
        "max_model_len": scheduler.max_model_len,
    }


def blocks(scheduler: Scheduler, groups: GroupTable, roles: KVRoles) -> dict[str, int]:
    """Numbers of physical KV blocks. A block that both roles share counts in each.

    block_size: tokens for each block that a stream takes.
    """
    leaders = roles.held(s for s in scheduler.requests if not groups.is_follower(s))
    followers = roles.held(follower for group in groups for follower in group.followers)
    return {
        "free_blocks": roles.free,
        "total_blocks": roles.total,
        "block_size": roles.tokens_per_block,
        "leader_blocks": len(leaders),
        "follower_blocks": len(followers),
    }
