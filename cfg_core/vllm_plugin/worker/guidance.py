"""RunnerGuidance: what the parts of one guided model runner know about the current step.

The runner sets it. The runner's drafter and its logits processors read it. A model runner computes
one step at a time, so there is one such object for each runner.
"""

from __future__ import annotations

from dataclasses import dataclass

from cfg_core.vllm_plugin.wire import StepGuidance
from cfg_core.vllm_plugin.worker.rows import Kept, Rows


@dataclass
class RunnerGuidance:
    """Guidance of the current step. Model Runner V2 clears it when the next step begins.

    step: what the scheduler sent about this step; None if no stream of a group samples in it.
    rows: where the joint groups' rows are; None if no group is joint.
    compact: whether the step's logits have no rows of followers (V1 only).
    kept: what the groups that asked for their streams' log-probabilities will see of them; None if
        no group asked.
    """

    step: StepGuidance | None = None
    rows: Rows | None = None
    compact: bool = False
    kept: Kept | None = None

    @property
    def solo(self) -> tuple[str, ...]:
        """Streams whose sample is dropped in this step."""
        return self.step.solo if self.step is not None else ()

    @property
    def drafter_rests(self) -> bool:
        """Whether the drafter need not read this step's tokens."""
        return self.step is not None and self.step.drafter_rests

    def clear(self) -> None:
        """Forget the step, at its end."""
        self.step = self.rows = self.kept = None
        self.compact = False
