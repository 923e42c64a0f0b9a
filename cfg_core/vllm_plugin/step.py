"""What the scheduler tells the workers about a step: which rows are blended, and which samples are dropped.

It travels as an extra attribute of vLLM's SchedulerOutput, through pickle, to every worker process.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_ATTRIBUTE = "cfg_serve_guidance"


@dataclass(frozen=True, slots=True)
class JointRow:
    """One group of a joint step. streams: ids, leader first. weights: one per stream, they sum to 1."""

    streams: tuple[str, ...]
    weights: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class StepGuidance:
    """joint: the groups that sample in this step. solo: streams whose sample is dropped (taken back)."""

    joint: tuple[JointRow, ...]
    solo: tuple[str, ...]

    @staticmethod
    def of(scheduler_output: Any) -> StepGuidance | None:
        """The guidance of a step; None if no group samples in it."""
        return getattr(scheduler_output, _ATTRIBUTE, None)


def attach(scheduler_output: Any, guidance: StepGuidance) -> None:
    """Send `guidance` along with `scheduler_output`."""
    setattr(scheduler_output, _ATTRIBUTE, guidance)
