"""What happens to the followers of traced engines, told to the frontend with the leaders' outputs.

vLLM notes events of each request (queued, scheduled, preempted), and sends them with the request's
next output. Followers' outputs are hidden from clients, so their events travel with the output that
their leader has in the same joint step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from cfg_core.groups import Group
from cfg_core.vllm_plugin import wire
from cfg_core.vllm_plugin.core import outcome
from cfg_core.vllm_plugin.wire import FollowerEvent

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs


def collect(
    groups: Iterable[Group], outputs: Mapping[int, EngineCoreOutputs]
) -> dict[str, list[FollowerEvent]]:
    """What the followers' outputs say, by the leader's id. Call it before they are hidden."""
    places = {
        follower: (group.leader, i)
        for group in groups
        for i, follower in enumerate(group.followers)
    }
    told: dict[str, list[FollowerEvent]] = {}
    for output in outcome.each(outputs):
        if output.request_id in places:
            leader, i = places[output.request_id]
            if events := _events(i, output):
                told.setdefault(leader, []).extend(events)
    return told


def _events(follower: int, output: EngineCoreOutput) -> list[FollowerEvent]:
    events: list[FollowerEvent] = [
        (follower, event.type.name.lower(), event.timestamp) for event in output.events or ()
    ]
    stats = output.prefill_stats
    if stats is not None:
        events.append((follower, "prompt_tokens", stats.num_prompt_tokens))
        events.append((follower, "cached_tokens", stats.num_cached_tokens))
    return events


def attach(told: Mapping[str, list[FollowerEvent]], outputs: Iterable[EngineCoreOutput]) -> None:
    """Send the events along with the leaders' outputs. Call it after the outputs were marked."""
    for output in outputs if told else ():
        if output.request_id in told:
            wire.mark_follower_events(output, told[output.request_id])
