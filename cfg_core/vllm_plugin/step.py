"""What the scheduler tells the workers about a step, and they tell it.

There: which rows are blended, and which samples are dropped. Back: whose logits processors failed. Both travel as an
extra attribute, of vLLM's SchedulerOutput and of its ModelRunnerOutput, through pickle, between processes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cfg_core.logits_processors import Failure

_ATTRIBUTE = "cfg_serve_guidance"
_FAILURES = "cfg_serve_failures"


@dataclass(frozen=True, slots=True)
class JointRow:
    """One group of a joint step. streams: ids, leader first. weights: one per stream, they sum to 1.

    logprobs: whether the streams' own log-probabilities of the sampled token are wanted.
    """

    streams: tuple[str, ...]
    weights: tuple[float, ...]
    logprobs: bool = False


@dataclass(frozen=True, slots=True)
class StepGuidance:
    """joint: the groups that sample in this step. solo: streams whose sample is dropped (taken back).

    drafter_rests: the drafter need not even read this step's tokens.
    """

    joint: tuple[JointRow, ...]
    solo: tuple[str, ...]
    drafter_rests: bool = False

    @staticmethod
    def of(scheduler_output: Any) -> StepGuidance | None:
        """The guidance of a step; None if no group samples in it."""
        return getattr(scheduler_output, _ATTRIBUTE, None)


def attach(scheduler_output: Any, guidance: StepGuidance) -> None:
    """Send `guidance` along with `scheduler_output`."""
    setattr(scheduler_output, _ATTRIBUTE, guidance)


def attach_failures(model_runner_output: Any, failures: dict[str, Failure]) -> None:
    """Send `failures`, by request id, along with the outcome of a step."""
    setattr(model_runner_output, _FAILURES, failures)


def failures_of(model_runner_output: Any) -> dict[str, str]:
    """The requests that failed in a step, and why: a token was sampled from the row that could not be processed."""
    failures: dict[str, Failure] = getattr(model_runner_output, _FAILURES, {})
    place_of, sampled = model_runner_output.req_id_to_index, model_runner_output.sampled_token_ids
    return {name: failure.reason for name, failure in failures.items() if len(sampled[place_of[name]]) > failure.row}
