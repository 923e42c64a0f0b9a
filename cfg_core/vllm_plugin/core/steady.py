"""Steady steps: steps in which every running stream decodes, so that the plan can be skipped.

The plan would change nothing in them, and costs almost half as much as vLLM's own step (LOG.md).
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cfg_core.vllm_plugin.wire import StepGuidance

if TYPE_CHECKING:
    from vllm.v1.request import Request


@dataclass(frozen=True)
class SteadyStep:
    """A step in which every running stream decoded, and all groups were joint.

    While `running` does not change, the next step can be like it, with the same guidance.
    """

    running: list[Request]
    streams: frozenset[str]
    guidance: StepGuidance

    @classmethod
    def of(
        cls, running: list[Request], scheduled: Set[str], guidance: StepGuidance
    ) -> SteadyStep | None:
        """The step that was just scheduled, if it was steady."""
        if guidance.solo or len(scheduled) != len(running):
            return None
        return cls(list(running), frozenset(scheduled), guidance)
