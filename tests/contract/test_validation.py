"""Long bodies are validated up to their first fault, in parts, beside the event loop."""

import asyncio
import threading
import time

import pytest

from cfg_core.errors import RequestError
from deployments.generator.endpoints import SERVED
from deployments.generator.refusals import validation
from deployments.generator.refusals.validation import PART, has_more_values, parse, parsed
from deployments.requests.endpoints import BODY_FIELDS

USER = {"role": "user", "content": "Hello"}
CALLED = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "i", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
}
ITEMS = [USER, {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}]
REST = {"model": "m", "max_tokens": 3}
CONVERSATIONS = {
    "chat": [USER, CALLED, {"role": "tool", "tool_call_id": "i", "content": "x"}],
    "responses": [*ITEMS, {"type": "function_call_output", "call_id": "c", "output": "x"}],
    "messages": [USER, {"role": "assistant", "content": [{"type": "text", "text": "x"}]}],
    "batch": [[USER]],
}


def body_of(endpoint, messages):
    rest = {"model": "m"} if endpoint == "responses" else REST
    return {**rest, BODY_FIELDS[endpoint].messages: messages}


def in_parts(endpoint, body):
    return asyncio.run(parsed(SERVED[endpoint].request, body, BODY_FIELDS[endpoint].messages))


@pytest.mark.parametrize("endpoint", CONVERSATIONS)
def test_a_long_conversation_is_read_as_a_whole_one(endpoint):
    one = CONVERSATIONS[endpoint]
    messages = [*one * (3 * PART // len(one)), one[0]]
    whole = parse(SERVED[endpoint].request, body_of(endpoint, messages))
    found = in_parts(endpoint, body_of(endpoint, messages))
    field = BODY_FIELDS[endpoint].messages
    assert getattr(found, field) == getattr(whole, field)
    assert len(getattr(found, field)) == len(messages) > PART
    ids = {"request_id"}  # each object makes its own
    assert found.model_dump(exclude=ids) == whole.model_dump(exclude=ids)


@pytest.mark.parametrize("endpoint", CONVERSATIONS)
def test_the_first_fault_of_a_long_list_is_found_soon(endpoint):
    began = time.perf_counter()
    with pytest.raises(RequestError) as caught:
        in_parts(endpoint, body_of(endpoint, [{}] * 5000))
    assert time.perf_counter() - began < 2  # all faults of /v1/responses take 20 s
    assert f"{BODY_FIELDS[endpoint].messages}[0]" in str(caught.value)


def test_a_fault_is_told_with_its_place_in_the_whole_list():
    messages = [USER] * 1000 + [{"role": "user", "content": 5}]
    with pytest.raises(RequestError, match=r"messages\[1000\]") as caught:
        in_parts("chat", body_of("chat", messages))
    assert caught.value.param.startswith("messages[1000]")


def test_long_bodies_are_validated_beside_the_event_loop(monkeypatch):
    threads = []

    def told(model, body):
        threads.append(threading.current_thread())
        return parse(model, body)

    monkeypatch.setattr(validation, "parse", told)
    in_parts("chat", body_of("chat", [USER]))
    in_parts("chat", body_of("chat", [USER] * 2000))
    main = threading.main_thread()
    assert threads[0] is main
    assert main not in threads[1:]


@pytest.mark.parametrize(
    ("value", "is_long"),
    [
        ({"a": [1] * 5000}, False),
        ({"a": [{}] * 5000}, True),
        ({"a": {str(i): 1 for i in range(200)}}, True),
        ({"a": [[{"b": i}] for i in range(40)]}, True),
        ({"a": "x" * 5000}, False),
    ],
)
def test_values_are_counted_up_to_a_bound(value, is_long):
    assert has_more_values(value, 100) is is_long
