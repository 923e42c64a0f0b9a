"""Which probes of a step have found their gate open: their samples are dropped (core/gates.py)."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import torch

from cfg_core.vllm_plugin.wire import StepGuidance
from cfg_core.vllm_plugin.worker.staging import to_device


def probe_places(step: StepGuidance, names: Sequence[str]) -> list[int]:
    """The places of a step's probes in its batch. names: the stream at each place."""
    probed = {row.streams[0] for row in step.joint if row.probe}
    return [place for place, name in enumerate(names) if name in probed] if probed else []


class ProbesV1:
    """Which samples of probes V1 drops: of those whose gate is open, and of blind ones.

    With async scheduling the step behind an open probe is scheduled as if that had given a token.
    Such a probe is *blind*: it has no token to begin with, and its row means nothing. It counts as
    open. A leader is blind until its next joint step.
    """

    def __init__(self) -> None:
        self._blind: set[str] = set()

    def forget(self, finished: Collection[str]) -> None:
        """Note that requests have ended."""
        self._blind.difference_update(finished)

    def blind_places(self, step: StepGuidance, names: Sequence[str]) -> list[int]:
        """The places of a step's blind probes. names: the stream at each place of the batch."""
        if not self._blind:
            return []
        return [place for place in probe_places(step, names) if names[place] in self._blind]

    def dropped(
        self, step: StepGuidance, names: Sequence[str], strengths: torch.Tensor
    ) -> list[int]:
        """The places of the probes whose samples are dropped. This waits for the device.

        strengths: [2, rows], see `rows.blended`; those of blind probes become 1. Each place has one
            row there: engines with suffixes have no drafts.
        """
        blind = self.blind_places(step, names)
        self._blind.difference_update(row.streams[0] for row in step.joint if not row.probe)
        places = probe_places(step, names)
        if not places:
            return []
        if blind:
            strengths[:, to_device(blind, np.int64, strengths.device)] = 1.0
        is_open = strengths[0, to_device(places, np.int64, strengths.device)] > 0
        found = [place for place, opened in zip(places, is_open.tolist(), strict=True) if opened]
        self._blind.update(names[place] for place in found)
        return found


def drop_open(
    step: StepGuidance,
    names: Sequence[str],
    strengths: torch.Tensor | None,
    num_sampled: torch.Tensor,
    num_rejected: torch.Tensor,
) -> None:
    """Count the samples of open probes as rejected, on the device, in place.

    strengths: [2, rows], see `rows.blended`; it is there if a step has a probe.
    num_sampled, num_rejected: [batch].
    """
    places = probe_places(step, names)
    if not places:
        return
    assert strengths is not None
    at = to_device(places, np.int64, num_sampled.device)
    dropped = torch.where(strengths[0, at] > 0, num_sampled[at], 0)
    num_sampled[at] -= dropped
    num_rejected[at] += dropped
