"""vLLM 0.32: the base of all later versions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from typing_extensions import override
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine import EngineCoreOutput


class ReadyOutput(AsyncModelRunnerOutput):
    """An asynchronous output of a step. `change` is called with the result when it is ready."""

    def __init__(
        self, inner: AsyncModelRunnerOutput, change: Callable[[ModelRunnerOutput], None]
    ) -> None:
        self._inner, self._change = inner, change

    @override
    def get_output(self) -> ModelRunnerOutput:
        output = self._inner.get_output()
        self._change(output)
        return output


class V032:
    """The operations that are written differently for other versions."""

    @classmethod
    def is_installed(cls) -> bool:
        return True

    def fail_requests(self, scheduler: Scheduler, request_ids: Iterable[str]) -> None:
        """Make vLLM finish requests with an error in the next `update_from_output`."""
        scheduler.grammar_compile_error_reqs.update(request_ids)

    def tell_reason(self, output: EngineCoreOutput, reason: str) -> None:
        """Put the reason why a request failed into its last output.

        The client of vLLM's own server is told only that there was an error. Our replica reads the
        reason (deployments/generator/engine/calls.py).
        """
        output.stop_reason = reason

    def when_ready(
        self, output: AsyncModelRunnerOutput, change: Callable[[ModelRunnerOutput], None]
    ) -> AsyncModelRunnerOutput:
        """`output`, but `change` is called with its result when that is ready."""
        return ReadyOutput(output, change)

    def frontend_args(self, fields: dict[str, Any]) -> Any:
        """vLLM's FrontendArgs: the options of its OpenAI server."""
        from vllm.entrypoints.launchers.cli_args import FrontendArgs

        return FrontendArgs(**fields)
