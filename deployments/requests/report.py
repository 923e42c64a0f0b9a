"""The `guidance` object of an answer: what was guided, and how."""

from __future__ import annotations

from typing import Any

from cfg_core.params import GuidanceParams
from deployments.requests.guidance import Guidance


def guidance_report(
    guidance: Guidance, negative_prompt_tokens: int, output_tokens: int, note: str | None = None
) -> dict[str, Any]:
    """The `guidance` object of an answer, beside `usage`.

    A request with scale 1 gets the object, too, and it says that nothing was guided. If tokens of
    the prompt were scored, it says how many.

    negative_prompt_tokens: of all followers' own prompts.
    output_tokens: output tokens that came from joint steps, as the engine core counted them.
    note: which field had no effect, and why.
    """
    report = {
        **_formula(guidance.params),
        "streams": guidance.streams,
        "negative_prompt_tokens": negative_prompt_tokens if guidance.enabled else 0,
        "guided_tokens": output_tokens if guidance.enabled else 0,
    }
    if guidance.params.score_tokens is not None:
        report["scored_tokens"] = guidance.params.score_tokens
    return report if note is None else {**report, "note": note}


def _formula(params: GuidanceParams) -> dict[str, Any]:
    """What says how the streams are blended: the scale, the schedule, or all weights."""
    if params.streams is not None:
        return {"weights": list(params.weights)}
    if params.schedule is not None:
        return {"schedule": [list(entry) for entry in params.schedule]}
    return {"scale": params.scale}
