"""The `guidance` object of an answer: what was guided, and which field had no effect, and why.

NOTES is the list of all causes of the latter. docs/guidance.md shows it.

Pure. Imports neither vllm nor ray.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from cfg_core.params import GuidanceParams, Strength
from cfg_core.params.fields import SCALE, SCHEDULE, STREAMS
from cfg_core.params.timeline import Timeline
from deployments.requests.endpoints import Endpoint, has_system
from deployments.requests.guidance_fields import Guidance
from deployments.requests.usage import StrengthCounts

NOTES: dict[str, str] = {
    "off": "{field} is 1 (off), so {negative} had no effect.",
    "no system message": "negative_prompt is empty and the conversation has no system message, so"
    " both streams were the same and guidance had no effect.",
    "no tokens": "negative_prompt is empty and has no tokens for this model, so the negative stream"
    " began at the prompt's last token.",
    "the prompt itself": "{field} has the tokens of the prompt itself, so it had no effect.",
    "one token": "The prompt has one token and no negative is given, so both streams were the same"
    " and guidance had no effect.",
    "no weight": "{field}.weight is 0, so this stream had no effect.",
    "not begun": "guidance_start is {start}, and the longest answer has {longest} tokens, so no"
    " token was guided.",
    "not ended": "guidance_end is {end}, and the longest answer has {longest} tokens, so it had no"
    " effect.",
    "no marker": "No token of the answer was between its markers, so no token was guided.",
    "scales not reached": "guidance_schedule goes on from token {first}, and the guided tokens end"
    " before it, so what follows there had no effect.",
    "scales of 1": "guidance_schedule is 1 for all tokens that were guided, so guidance had no"
    " effect.",
    "all tokens kept": "{field} is {value}, and the model has {vocabulary} tokens, so it had no"
    " effect.",
    "all tokens found": "guidance_filter_top_k is {value}, and the model has {vocabulary} tokens,"
    " so the conditional stream was sampled and guidance had no effect.",
    "one token kept": "{field} is {value}, which keeps the conditional stream's most likely token"
    " alone, so the negative had no effect.",
}
"""The sentence for each cause."""


def guidance_report(
    guidance: Guidance,
    negative_prompt_tokens: int,
    output_tokens: int,
    note: str | None = None,
    strengths: StrengthCounts | None = None,
    plain_tokens: int = 0,
) -> dict[str, Any]:
    """The `guidance` object of an answer, beside `usage`.

    A request with scale 1 gets the object, too, and it says that nothing was guided. If tokens of
    the prompt were scored, it says how many.

    negative_prompt_tokens: of all followers' own prompts, or of the suffix.
    output_tokens: output tokens that came from joint steps, as the engine core counted them.
    note: which field had no effect, and why.
    strengths: of the tokens of joint steps. With limits, those that had none are not guided.
    plain_tokens: the other output tokens. With markers, these are outside of them.
    """
    report = {
        **_formula(guidance.params),
        "streams": guidance.streams,
        "negative_prompt_tokens": negative_prompt_tokens if guidance.enabled else 0,
        "guided_tokens": output_tokens if guidance.enabled else 0,
    }
    if guidance.params.strength is not None and strengths is not None:
        report |= _strengths(guidance.params.strength, output_tokens, strengths)
    if has_markers(guidance.params):
        report["gate_closed_tokens"] = plain_tokens + report.get("gate_closed_tokens", 0)
    if guidance.params.score_tokens is not None:
        report["scored_tokens"] = guidance.params.score_tokens
    return report if note is None else {**report, "note": note}


def has_markers(params: GuidanceParams) -> bool:
    """Whether only tokens between markers are guided."""
    return params.between is not None or params.part is not None


def _strengths(limits: Strength, joint: int, counts: StrengthCounts) -> dict[str, Any]:
    """What limits did: a gate is closed where the strength is 0.

    joint: output tokens that came from joint steps.
    """
    found = {"mean_strength": counts.total / counts.tokens if counts.tokens else None}
    if limits.min_entropy is not None:
        closed = min(counts.none, joint)
        found |= {"guided_tokens": joint - closed, "gate_closed_tokens": closed}
    if limits.limits:
        found["full_strength_tokens"] = min(counts.full, joint)
    return found


def _formula(params: GuidanceParams) -> dict[str, Any]:
    """What says how the streams are blended: the scale, the schedule, all weights, or a rule."""
    if params.streams is not None:
        return {"weights": list(params.weights)}
    if params.schedule is not None:
        rule = {} if params.rule is None else {"rule": params.rule.to_entry()}
        return {**rule, "schedule": [list(entry) for entry in params.schedule]}
    if params.rule is not None:
        own = {"scale": params.scale} if params.rule.kind.reads_scale else {}
        return {"rule": params.rule.to_entry(), **own}
    return {"scale": params.scale}


# --- notes ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What is known of a request at its end.

    longest: output tokens of its longest choice.
    guided: output tokens that came from joint steps.
    vocabulary: tokens that the model can sample.
    same: the followers, counted from 0, whose prompt has the tokens of the request's own prompt,
        for each prompt of the request.
    has_no_tokens: whether the negative is an empty text of which the tokenizer makes no token.
    """

    longest: int = 0
    guided: int = 0
    vocabulary: int = 0
    same: frozenset[int] = frozenset()
    has_no_tokens: bool = False


def note_of(
    endpoint: Endpoint, body: Mapping[str, Any], guidance: Guidance, outcome: Outcome
) -> str | None:
    """The sentences for all causes that a request has; None if it has none."""
    if not guidance.enabled:
        found = _of_scale_1(guidance)
    else:
        found = _of_guided(endpoint, body, guidance, outcome)
    return " ".join(found) or None


def _of_scale_1(guidance: Guidance) -> Iterator[str]:
    if guidance.negative_field is not None:
        off = SCALE if guidance.params.schedule is None else SCHEDULE
        yield NOTES["off"].format(field=off, negative=guidance.negative_field)


def _of_guided(
    endpoint: Endpoint, body: Mapping[str, Any], guidance: Guidance, outcome: Outcome
) -> Iterator[str]:
    if is_empty_without_system(endpoint, body, guidance):
        yield NOTES["no system message"]
    elif outcome.has_no_tokens:
        yield NOTES["no tokens"]
    else:
        yield from _of_prompts(guidance, outcome.same)
    if has_markers(guidance.params) and outcome.longest and not outcome.guided:
        yield NOTES["no marker"]
    elif outcome.longest:
        yield from _of_window(guidance.params, outcome.longest)
    yield from _of_cuts(guidance.params, outcome.vocabulary)


def is_empty_without_system(
    endpoint: Endpoint, body: Mapping[str, Any], guidance: Guidance
) -> bool:
    """Whether an empty negative takes the place of a system message that is not there."""
    is_chat = endpoint != "completion"
    is_empty = guidance.params.negative_prompt == ""
    return is_chat and is_empty and not has_system(endpoint, body)


def _of_prompts(guidance: Guidance, same: frozenset[int]) -> Iterator[str]:
    streams = guidance.params.streams
    if streams is None:
        field = guidance.negative_field
        if same:
            cause = "one token" if field is None else "the prompt itself"
            yield NOTES[cause].format(field=field)
        return
    for place, follower in enumerate(streams):
        field = f"{STREAMS}[{place}]"
        if follower.weight == 0:
            yield NOTES["no weight"].format(field=field)
        elif place in same:
            yield NOTES["the prompt itself"].format(field=field)


def _of_window(params: GuidanceParams, longest: int) -> Iterator[str]:
    if params.start >= longest:
        yield NOTES["not begun"].format(start=params.start, longest=longest)
        return
    if params.end is not None and params.end >= longest:
        yield NOTES["not ended"].format(end=params.end, longest=longest)
    if params.schedule is not None:
        yield from _of_schedule(params, params.schedule, longest)


def _of_schedule(
    params: GuidanceParams, schedule: tuple[tuple[int, float], ...], longest: int
) -> Iterator[str]:
    end = longest if params.end is None else min(longest, params.end)
    changes = tuple((first, (scale,)) for first, scale in schedule)
    timeline = Timeline(changes)
    reached = [first for first, _ in schedule if params.start < first < end]
    if all(timeline.weights_at(token) == (1.0,) for token in (params.start, *reached)):
        yield NOTES["scales of 1"]
        return
    unreached = [first for first, _ in schedule if first >= end]
    if unreached:
        yield NOTES["scales not reached"].format(first=unreached[0])


def _of_cuts(params: GuidanceParams, vocabulary: int) -> Iterator[str]:
    if not vocabulary:
        return
    if params.top_k is not None and params.top_k >= vocabulary:
        yield NOTES["all tokens kept"].format(
            field="guidance_top_k", value=params.top_k, vocabulary=vocabulary
        )
    if params.filter_top_k is not None and params.filter_top_k >= vocabulary:
        yield NOTES["all tokens found"].format(value=params.filter_top_k, vocabulary=vocabulary)
    named = {"guidance_top_k": params.top_k, "guidance_min_p": params.min_p}
    for field, value in named.items():
        if value == 1:
            yield NOTES["one token kept"].format(field=field, value=f"{value:g}")
