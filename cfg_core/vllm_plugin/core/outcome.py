"""The outcome of a step: changes to it before vLLM's scheduler reads it and before clients do."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING

from cfg_core.vllm_plugin import versions
from cfg_core.vllm_plugin.wire import StepGuidance, split_logprobs

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
    from vllm.v1.outputs import ModelRunnerOutput

PROMPT_LOGPROBS = ("prompt_logprobs_dict", "prompt_token_id_logprobs_dict")
"""Fields of vLLM's ModelRunnerOutput with prompt logprobs, by request id.

vLLM sends them with the step that ends a prompt.
"""


def drop_output(failures: Iterable[str], model_runner_output: ModelRunnerOutput) -> None:
    """Remove tokens and prompt logprobs of requests whose logits processors failed in a step."""
    for request_id in failures:
        model_runner_output.sampled_token_ids[model_runner_output.req_id_to_index[request_id]] = []
        for field in PROMPT_LOGPROBS:
            getattr(model_runner_output, field).pop(request_id, None)


def tell_reasons(failures: Mapping[str, str], outputs: Mapping[int, EngineCoreOutputs]) -> None:
    """Put the reason of each failure into the output, where the caller finds it.

    The finish reason of these requests is "error".
    """
    for output in each(outputs) if failures else ():
        if output.finished and output.request_id in failures:
            versions.chosen().tell_reason(output, failures[output.request_id])


def hide(followers: Collection[str], outputs: Mapping[int, EngineCoreOutputs]) -> None:
    """Remove the followers' outputs, because no client knows of followers."""
    for per_client in outputs.values():
        per_client.outputs = [o for o in per_client.outputs if o.request_id not in followers]


def narrow_logprobs(
    guidance: StepGuidance | None, outputs: Mapping[int, EngineCoreOutputs]
) -> None:
    """Remove the streams' logprobs from the outputs of requests that did not ask for them.

    The workers add them for the whole batch if one request asks.
    """
    asked = (
        {row.streams[0] for row in guidance.joint if row.logprobs} if guidance is not None else ()
    )
    for output in each(outputs) if asked else ():
        if output.new_logprobs is not None and output.request_id not in asked:
            output.new_logprobs = split_logprobs(output.new_logprobs)[0]


def each(outputs: Mapping[int, EngineCoreOutputs]) -> Iterable[EngineCoreOutput]:
    """The outputs of all clients."""
    return (output for per_client in outputs.values() for output in per_client.outputs)
