"""RunnerGuidance: what the parts of one guided model runner know about the current step.

The runner sets it. The runner's drafter and its logits processors read it. A model runner computes
one step at a time, so there is one such object for each runner.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cfg_core.vllm_plugin.wire import StepGuidance
from cfg_core.vllm_plugin.worker.gates import Kept
from cfg_core.vllm_plugin.worker.rows import Rows, StreamLogits
from cfg_core.vllm_plugin.worker.suffixes import SuffixRows


@dataclass
class RunnerGuidance:
    """Guidance of the current step. Model Runner V2 clears it when the next step begins.

    step: what the scheduler sent about this step; None if no stream of a group samples in it.
    suffixes: where the suffixes of this step are; None if it has none.
    suffix_rows: [suffixes.names] int64, the rows of hidden states behind these suffixes, on the
        device (V2 only).
    rows: where the joint groups' rows are; None if no group is joint.
    compact: whether the step's logits have no rows of followers (V1 only).
    stream_logits: of the groups that asked for their streams' log-probabilities; None if no group
        did.
    strengths: how strongly the rows of this step were guided, on the device (see `rows.blended`);
        None if no group has limits or a rule.
    kept: how much is kept of the step's probes (V1 only); None if no group has limits.
    blind: the places of probes that have no token to begin with (V1 only).
    """

    step: StepGuidance | None = None
    suffixes: SuffixRows | None = None
    suffix_rows: torch.Tensor | None = None
    rows: Rows | None = None
    compact: bool = False
    stream_logits: StreamLogits | None = None
    strengths: torch.Tensor | None = None
    kept: Kept | None = None
    blind: Sequence[int] = ()

    @property
    def solo(self) -> tuple[str, ...]:
        """Streams whose sample is dropped in this step."""
        return self.step.solo if self.step is not None else ()

    @property
    def may_keep_none(self) -> bool:
        """Whether a stream may have no token of this step left."""
        return bool(self.solo) or (
            self.step is not None and any(row.probe for row in self.step.joint)
        )

    @property
    def drafter_rests(self) -> bool:
        """Whether the drafter need not read this step's tokens."""
        return self.step is not None and self.step.drafter_rests

    def clear(self) -> None:
        """Forget the step, at its end."""
        self.step = self.rows = self.stream_logits = self.strengths = self.kept = None
        self.suffixes = self.suffix_rows = None
        self.compact, self.blind = False, ()
