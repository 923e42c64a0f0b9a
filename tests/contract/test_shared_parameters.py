"""vLLM's choices of a request share its parameters, so long lists are not copied in the frontend.

What is left is the message to the engine for each choice. Its size has bounds
(deployments/requests/shape.py).
"""

import copy
import itertools

import pytest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.parallel_sampling import ParentRequest

LONG = {"allowed_token_ids": [5] * 1000, "vllm_xargs": {"x": [1] * 1000}}
USER = {"role": "user", "content": "a"}


def params_of(**fields):
    request = CompletionRequest(model="m", prompt="a", n=3, **LONG, **fields)
    return request.to_sampling_params(4, {})


@pytest.mark.parametrize("fields", [{}, {"seed": 1}])
def test_choices_share_what_is_long(fields):
    params = params_of(**fields).clone()
    request = EngineCoreRequest("i", [1], None, params, None, 0.0, None, None, None)
    request.external_req_id = "i"
    parent = ParentRequest(copy.copy(request))
    children = [parent.get_child_info(number)[1] for number in range(3)]
    for one, other in itertools.pairwise([params, *children]):
        assert one.allowed_token_ids is other.allowed_token_ids
        assert one.extra_args is other.extra_args


@pytest.mark.parametrize(
    "request_of",
    [
        CompletionRequest(model="m", prompt="a"),
        ChatCompletionRequest(model="m", messages=[USER]),
        ResponsesRequest(model="m", input="a"),
    ],
    ids=["completion", "chat", "responses"],
)
def test_the_parameters_of_http_requests_are_not_cloned_deeply(request_of):
    assert request_of.to_sampling_params(4, {}).skip_clone
