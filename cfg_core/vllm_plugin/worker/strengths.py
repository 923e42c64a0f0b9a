"""How strongly the tokens of a step were guided, on their way from the device to the scheduler."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from cfg_core.vllm_plugin import versions
from cfg_core.vllm_plugin.wire import Strengths, attach_strengths
from cfg_core.vllm_plugin.worker.runner_guidance import RunnerGuidance


def with_strengths(output: Any, guidance: RunnerGuidance) -> Any:
    """Return a step's `output` with the strengths of groups with limits or a rule attached to it.

    Call it when vLLM has made the output, and before `guidance` is cleared.
    """
    step, rows, strengths = guidance.step, guidance.rows, guidance.strengths
    if step is None or rows is None or strengths is None:
        return output
    ends = np.cumsum(rows.counts).tolist()
    limited = {
        row.streams[0]: slice(end - count, end)
        for row, count, end in zip(step.joint, rows.counts, ends, strict=True)
        if row.group.strength is not None
    }
    attach = partial(_attach, read=_to_host(strengths[:, rows.of_logits[0]]), rows=limited)
    if isinstance(output, AsyncModelRunnerOutput):
        return versions.chosen().when_ready(output, attach)
    attach(output)
    return output


def _attach(
    output: ModelRunnerOutput, read: Callable[[], np.ndarray], rows: dict[str, slice]
) -> None:
    attach_strengths(output, Strengths(read(), rows))


def _to_host(values: torch.Tensor) -> Callable[[], np.ndarray]:
    """Begin to copy `values`, and return what waits for the copy and returns it."""
    if values.device.type != "cuda":
        return values.cpu().numpy
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    host.copy_(values, non_blocking=True)
    copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
    copied.record()

    def read() -> np.ndarray:
        copied.synchronize()
        found: np.ndarray = host.numpy()
        return found

    return read
