"""vLLM 0.33: what differs from 0.32."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from typing_extensions import override
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from cfg_core.errors import REQUEST_FAULT
from cfg_core.vllm_plugin.versions.v0_32 import V032, ReadyOutput

if TYPE_CHECKING:
    from vllm.outputs import RequestError
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine import EngineCoreOutput


class ReadyOutputV033(ReadyOutput):
    """It also has what a KV connector reports, which vLLM asks for if `get_output` fails."""

    @override
    def get_kv_connector_output(self) -> Any:
        return self._inner.get_kv_connector_output()


class V033(V032):
    """An output of the engine core can carry an error, which vLLM's frontend raises."""

    @classmethod
    @override
    def is_installed(cls) -> bool:
        from vllm.v1.engine import EngineCoreOutput

        return "error" in EngineCoreOutput.__struct_fields__

    @override
    def fail_requests(self, scheduler: Scheduler, request_ids: Iterable[str]) -> None:
        unknown = _error("The request failed in the engine.")
        scheduler.grammar_compile_error_reqs.update(dict.fromkeys(request_ids, unknown))

    @override
    def tell_reason(self, output: EngineCoreOutput, reason: str) -> None:
        """As in 0.32. The client of vLLM's own server is told the reason, too."""
        super().tell_reason(output, reason)
        output.error = _error(reason)

    @override
    def when_ready(
        self, output: AsyncModelRunnerOutput, change: Callable[[ModelRunnerOutput], None]
    ) -> AsyncModelRunnerOutput:
        return ReadyOutputV033(output, change)

    @override
    def frontend_args(self, fields: dict[str, Any]) -> Any:
        from vllm.entrypoints.common.cli_args import FrontendArgs

        return FrontendArgs(**fields)


def _error(reason: str) -> RequestError:
    """vLLM's error: 400 if the request failed because of what it asked for, else 500."""
    from vllm.outputs import RequestError

    is_client_fault = reason.startswith(REQUEST_FAULT)
    return RequestError("validation_error" if is_client_fault else "internal_error", reason)
