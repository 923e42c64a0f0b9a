"""Logits processors per sequence on vLLM's model runners: what V1 and V2 share.

The processors run after everything else that vLLM does to the logits before temperature, for guided
and plain requests. In each step, tokens and drafts are read from vLLM's own records, so preemption,
resumption and rejected drafts need no special handling. The step's output names the requests whose
processor failed, and the scheduler ends them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.outputs import AsyncModelRunnerOutput

from cfg_core.logits_processors.base import SequenceInfo
from cfg_core.logits_processors.config import FIELD
from cfg_core.logits_processors.registry import Registry
from cfg_core.logits_processors.sequences import ProcessorTable
from cfg_core.vllm_plugin import versions
from cfg_core.vllm_plugin.wire import attach_failures

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.worker.worker_base import WorkerBase


def asked_of(params: SamplingParams | None) -> Sequence[Any]:
    """The entries of a request's `logits_processors`; empty if there are none."""
    extra = None if params is None else params.extra_args
    return (extra or {}).get(FIELD) or ()


class StepProcessors:
    """The processors of this worker's sequences, and what each request asked for."""

    def __init__(self, registry: Registry) -> None:
        self.table = ProcessorTable(registry.make)
        self.asking: dict[str, tuple[SequenceInfo, Sequence[Any]]] = {}

    def begin(self, scheduler_output: SchedulerOutput) -> None:
        """Note which requests end and begin with this step.

        vLLM may send a resumed request as a new one. It keeps the processors that it has.
        """
        finished = scheduler_output.finished_req_ids
        self.table.forget(finished)
        for request_id in finished:
            self.asking.pop(request_id, None)
        for new in scheduler_output.scheduled_new_reqs:
            sequence = SequenceInfo(new.req_id, tuple(new.prompt_token_ids or ()))
            self._note(new.req_id, sequence, asked_of(new.sampling_params))

    def _note(self, request_id: str, sequence: SequenceInfo, asked: Sequence[Any]) -> None:
        before = self.asking.pop(request_id, None)
        if asked:
            self.asking[request_id] = (sequence, asked)
        if before is not None and before != (sequence, asked):
            # A streaming-input session continues with another prompt or other processors.
            self.table.forget([request_id])

    def process(
        self, request_id: str, output: Sequence[int], rows: Sequence[torch.Tensor], **drafts: Any
    ) -> None:
        """Call `ProcessorTable.process` for a request that asked for processors."""
        sequence, asked = self.asking[request_id]
        self.table.process(sequence, asked, output, rows, **drafts)

    def report(self, output: Any) -> Any:
        """Return a step's `output` with the failures attached to it."""
        failures = self.table.take_failures()
        if not failures:
            return output
        if isinstance(output, AsyncModelRunnerOutput):
            attach = partial(attach_failures, failures=failures)
            return versions.chosen().when_ready(output, attach)
        attach_failures(output, failures)
        return output


def close_processors(worker: WorkerBase) -> None:
    """Close all processors of a worker that ends, if its runner has any."""
    processors = getattr(getattr(worker, "model_runner", None), "processors", None)
    if processors is not None:
        processors.table.close()
