"""The outcome of a step: changes to it before vLLM's scheduler reads it and before clients do."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING

from cfg_core.policy.groups import Group
from cfg_core.vllm_plugin import versions
from cfg_core.vllm_plugin.wire import (
    FollowerEvent,
    StepGuidance,
    StreamColumns,
    columns_of,
    narrowed,
    picked,
    widened,
)

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
    from vllm.v1.outputs import ModelRunnerOutput

PROMPT_LOGPROBS = ("prompt_logprobs_dict", "prompt_token_id_logprobs_dict")
"""Fields of vLLM's ModelRunnerOutput with prompt logprobs, by request id.

vLLM sends them with the step that ends a prompt.
"""


def drop_output(failures: Iterable[str], model_runner_output: ModelRunnerOutput) -> None:
    """Remove tokens and prompt logprobs of requests whose logits processors failed in a step."""
    for request_id in failures:
        model_runner_output.sampled_token_ids[model_runner_output.req_id_to_index[request_id]] = []
        for field in PROMPT_LOGPROBS:
            getattr(model_runner_output, field).pop(request_id, None)


def tell_reasons(failures: Mapping[str, str], outputs: Mapping[int, EngineCoreOutputs]) -> None:
    """Put the reason of each failure into the output, where the caller finds it.

    The finish reason of these requests is "error".
    """
    for output in each(outputs) if failures else ():
        if output.finished and output.request_id in failures:
            versions.chosen().tell_reason(output, failures[output.request_id])


def hide(followers: Collection[str], outputs: Mapping[int, EngineCoreOutputs]) -> None:
    """Remove the followers' outputs, because no client knows of followers."""
    for per_client in outputs.values():
        per_client.outputs = [o for o in per_client.outputs if o.request_id not in followers]


def fit_logprobs(
    guidance: StepGuidance | None,
    outputs: Mapping[int, EngineCoreOutputs],
    asked: Mapping[str, StreamColumns],
) -> None:
    """Give each output the columns of streams' logprobs that its request asked for, and no others.

    The workers add the same columns to the whole batch.

    asked: by request. If a request was not guided in this step, its columns say so.
    """
    joint = guidance.joint if guidance is not None else ()
    present = columns_of(joint)
    if not present.streams and not asked:
        return
    guided = {row.streams[0] for row in joint}
    for output in each(outputs):
        lists = output.new_logprobs
        if lists is None:
            continue
        wanted = asked.get(output.request_id, StreamColumns())
        own = lists.logprobs.shape[1] - present.width
        if output.request_id in guided:
            added = [own + column for column in present.places_of(wanted)]
            output.new_logprobs = picked(lists, [*range(own), *added])
        else:
            output.new_logprobs = widened(narrowed(lists, own), wanted.width)


# --- what happened to followers, in traced engines ------------------------------------------------


def follower_events(
    groups: Iterable[Group], outputs: Mapping[int, EngineCoreOutputs]
) -> dict[str, list[FollowerEvent]]:
    """What the followers' outputs say, by the leader's id. Call it before they are hidden.

    vLLM notes events of each request (queued, scheduled, preempted), and sends them with its next
    output. Those of followers travel with the output that their leader has in the same joint step.
    """
    places = {
        follower: (group.leader, i)
        for group in groups
        for i, follower in enumerate(group.followers)
    }
    told: dict[str, list[FollowerEvent]] = {}
    for output in each(outputs):
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


def each(outputs: Mapping[int, EngineCoreOutputs]) -> Iterable[EngineCoreOutput]:
    """The outputs of all clients."""
    return (output for per_client in outputs.values() for output in per_client.outputs)
