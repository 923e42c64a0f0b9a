"""VllmServer without Ray and HTTP.

Tested are usage, the share of the engine that one request gets, and who is at fault for an error.
One server runs the shipped model, with its engine in a process of its own, as in a replica.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cfg_core.errors import RequestError
from deployments.requests.usage import Meter
from tests.engine.in_process_server import Server, events

MODEL = Path(__file__).parents[2] / "models" / "stories"
MAX_NUM_SEQS = 8
STORY = "Once upon a time there was a little dog who"
GUIDED = {"guidance_scale": 1.5, "negative_prompt": "The king of the hill had a"}


@pytest.fixture(scope="module")
def module_server() -> Iterator[Server]:
    server = Server(MODEL, {"enable_prompt_tokens_details": True}, max_num_seqs=MAX_NUM_SEQS)
    yield server
    server.close()


@pytest.fixture
def server(module_server: Server) -> Iterator[Server]:
    yield module_server
    module_server.assert_idle()


# --- usage


SHARED = {"max_tokens": 9, "temperature": 1.0, "seed": 5}
BODIES = {
    "plain": {"prompt": STORY},
    "choices": {"prompt": STORY, "n": 7},
    "prompts": {"prompt": [STORY, "The king", "A boat"], "n": 3},
    "guided": {"prompt": STORY, **GUIDED},
    "guided choices": {"prompt": [STORY, "The king"], "n": 5, **GUIDED},
    "own negative": {
        "prompt": STORY,
        "n": 2,
        "guidance_scale": 2.0,
        "negative_prompt_token_ids": [7, 8, 9],
    },
    "no negative": {"prompt": STORY, "n": 2, "guidance_scale": 2.0},
    "scale 1": {"prompt": STORY, "guidance_scale": 1.0, "n": 2},
    "stop": {"prompt": STORY, "n": 3, "stop": ["e", "a"], "max_tokens": 30, **GUIDED},
    "chat": {"messages": [{"role": "user", "content": STORY}], "n": 2, **GUIDED},
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("name", BODIES)
def test_the_meter_agrees_with_usage(server: Server, name: str, stream: bool) -> None:
    """The meter adds the negative prompts, and counts each guided token once for each stream."""
    body, meter = {**SHARED, **BODIES[name]}, Meter()
    if stream:
        last = events(
            server.ask(
                {**body, "stream": True, "stream_options": {"include_usage": True}}, meter=meter
            )
        )[-1]
    else:
        last = server.answer(body, meter=meter)
    usage, guidance = (
        last["usage"],
        last.get("guidance") or {"streams": 1, "negative_prompt_tokens": 0},
    )
    prompts = len(body["prompt"]) if isinstance(body.get("prompt"), list) else 1
    assert (
        meter.prompt_tokens == usage["prompt_tokens"] + prompts * guidance["negative_prompt_tokens"]
    )
    assert meter.output_tokens == usage["completion_tokens"] * guidance["streams"]
    assert meter.guided_tokens == (usage["completion_tokens"] if guidance["streams"] == 2 else 0)
    assert meter.guided_tokens == guidance.get("guided_tokens", 0)
    assert "kv_transfer_params" not in last or last["kv_transfer_params"] is None, (
        "the engine's count must not be sent to clients"
    )


SHOWN = {"prompt": STORY, "max_tokens": 9, "temperature": 0, "logprobs": 1}


def strengths_of(answer: dict[str, Any]) -> list[float]:
    shown: list[float] = answer["choices"][0]["logprobs"]["guidance_strength"]
    return shown


def test_what_limits_did_is_told(server: Server) -> None:
    limits = {"guidance_scale": 3.0, "guidance_max_kl": 0.3, "guidance_min_entropy": 1.0}
    answer = server.answer({**SHOWN, **GUIDED, **limits, "guidance_logprobs": True})
    strengths, told = strengths_of(answer), answer["guidance"]
    closed = strengths.count(0.0)
    assert 0 < closed < 9
    assert any(0 < strength < 1 for strength in strengths)
    assert told["gate_closed_tokens"] == closed
    assert told["guided_tokens"] == 9 - closed
    assert told["full_strength_tokens"] == strengths.count(1.0)
    assert told["mean_strength"] == pytest.approx(statistics.mean(strengths))


def test_the_scales_of_a_rule_are_told(server: Server) -> None:
    fields = {"negative_prompt": GUIDED["negative_prompt"], "guidance_rule": {"name": "adacad"}}
    answer = server.answer({**SHOWN, **fields, "guidance_logprobs": True})
    scales, told = strengths_of(answer), answer["guidance"]
    assert all(1 < scale <= 1 + math.log(2) for scale in scales)
    assert len(set(scales)) > 3
    assert told["rule"] == {"name": "adacad", "offset": 0.0}
    assert told["mean_strength"] == pytest.approx(statistics.mean(scales))
    assert told["guided_tokens"] == 9
    assert "scale" not in told
    assert "full_strength_tokens" not in told


def test_tokens_outside_of_markers_are_told(server: Server) -> None:
    asked = {**SHOWN, **GUIDED, "return_token_ids": True}
    plain = server.answer({**SHOWN, "return_token_ids": True})["choices"][0]["token_ids"]
    start, end = plain[2], 0
    assert start not in plain[:2]
    markers = {"start_token_id": start, "end_token_id": end}
    answer = server.answer({**asked, "guidance_between": markers, "guidance_logprobs": True})
    assert answer["choices"][0]["token_ids"][:3] == plain[:3]
    assert strengths_of(answer) == [None] * 3 + [1.0] * 6
    assert answer["guidance"]["guided_tokens"] == 6
    assert answer["guidance"]["gate_closed_tokens"] == 3
    never = {"start_token_id": 1, "end_token_id": end}
    told = server.answer({**asked, "guidance_between": never})["guidance"]
    assert told["guided_tokens"] == 0
    assert "between its markers" in told["note"]


def test_beams_are_counted(server: Server) -> None:
    """Four beams search five tokens: one in the first step, four in each of the others."""
    meter = Meter()
    answer = server.answer(
        {"prompt": STORY, "n": 4, "use_beam_search": True, "max_tokens": 5}, meter=meter
    )
    assert meter.prompt_tokens == answer["usage"]["prompt_tokens"]
    assert meter.output_tokens == 1 + 4 * 4


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_the_meter_counts_while_the_request_runs(server: Server, stream: bool) -> None:
    """If a client leaves, the tokens up to then are counted."""
    body = {
        "prompt": STORY,
        "n": 3,
        "max_tokens": 200,
        "min_tokens": 200,
        "stream": stream,
        **GUIDED,
    }
    meter, seen = Meter(), []

    async def leave() -> None:
        task = asyncio.create_task(server.texts(body, meter=meter))
        while meter.output_tokens < 60:
            seen.append(meter.output_tokens)
            await asyncio.sleep(0.005)
        task.cancel()
        await asyncio.wait([task])
        stats = await server.idle()
        assert stats["running"] == 0

    server.run(leave())
    assert len({count for count in seen if count}) > 3, "the count must grow token by token"
    assert 60 <= meter.output_tokens < 3 * 2 * 200
    assert meter.guided_tokens * 2 == meter.output_tokens
    assert meter.prompt_tokens > 10


def test_a_refused_request_costs_nothing(server: Server) -> None:
    meter = Meter()
    with pytest.raises(RequestError):
        server.ask({"prompt": [5] * 300}, meter=meter)
    assert meter.usage.tokens == 0


# --- one request does not occupy the engine


def choices(answer: dict[str, Any]) -> list[Any]:
    return [
        (choice["index"], choice["text"], choice["finish_reason"]) for choice in answer["choices"]
    ]


def streamed(texts: list[str]) -> dict[int, tuple[str, list[str]]]:
    """The text of each choice, and its finish reasons."""
    found: dict[int, tuple[str, list[str]]] = {}
    for event in events(texts):
        for choice in event["choices"]:
            text, reasons = found.get(choice["index"], ("", []))
            reason = [choice["finish_reason"]] if choice["finish_reason"] else []
            found[choice["index"]] = text + choice["text"], reasons + reason
    return found


MANY = {
    "seeded": {"prompt": STORY, "n": 13, "temperature": 1.0, "seed": 3},
    "greedy": {"prompt": STORY, "n": 5, "temperature": 1.0, "top_k": 1},
    "guided": {"prompt": STORY, "n": 9, "temperature": 1.0, "seed": 3, **GUIDED},
    "prompts": {"prompt": [STORY, *"abcdefgh"], "n": 3, "temperature": 1.0, "seed": 3},
    "logprobs": {
        "prompt": STORY,
        "n": 7,
        "temperature": 1.0,
        "seed": 3,
        "logprobs": 3,
        "stop": ["e"],
    },
}


@pytest.mark.parametrize("name", MANY)
def test_choices_that_wait_give_the_same_answer(server: Server, name: str) -> None:
    """The answer equals that of vLLM when all choices run at once, in the same order."""
    body = {"max_tokens": 10, **MANY[name]}
    with server.share(10_000):
        expected = server.answer(body)
    for share in (1, 2, 5):
        with server.share(share):
            found = server.answer(body)
            assert choices(found) == choices(expected)
            assert found["usage"]["completion_tokens"] == expected["usage"]["completion_tokens"]
            parts = streamed(server.ask({**body, "stream": True}))
        assert parts == {index: (text, [reason]) for index, text, reason in choices(expected)}


def test_the_default_share_is_half_of_the_engine(server: Server) -> None:
    """A request never has more streams, whatever it asks for.

    The rest of the engine is always free for others.
    """
    assert server.vllm._share == MAX_NUM_SEQS // 2
    most = []

    async def watch(task: asyncio.Task[Any]) -> None:
        while not task.done():
            stats = await server.vllm.stats()
            most.append(stats["running"] + stats["waiting"])
            await asyncio.sleep(0.002)

    async def both(body: dict[str, Any]) -> None:
        task = asyncio.create_task(server.texts(body))
        await watch(task)
        await task

    for more in ({"n": 20}, {"prompt": list("abcdefghij"), "n": 2}, {"n": 10, **GUIDED}):
        server.run(both({"prompt": STORY, "max_tokens": 12, "temperature": 1.0, **more}))
    assert 0 < max(most) <= MAX_NUM_SEQS // 2


def test_small_requests_overtake_a_request_of_a_hundred_choices(server: Server) -> None:
    """Each small request runs together with a part of the choices, not after all of them."""
    big = {"prompt": STORY, "n": 100, "max_tokens": 60, "min_tokens": 60, "temperature": 1.0}
    small = {"prompt": "The king", "max_tokens": 10, "min_tokens": 10}

    async def waits() -> tuple[list[float], float]:
        start = time.monotonic()
        task = asyncio.create_task(server.texts(big))
        await asyncio.sleep(0.2)
        times = []
        for _ in range(8):
            begun = time.monotonic()
            await server.texts(small)
            times.append(time.monotonic() - begun)
            assert not task.done()
        await task
        return times, time.monotonic() - start

    times, whole = server.run(waits())
    # The slowest one may have waited for another process of the machine.
    assert statistics.median(times) < whole / 10, (times, whole)
    assert max(times) < whole / 4, (times, whole)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_cancelling_ends_what_runs_and_what_waits(server: Server, stream: bool) -> None:
    body = {
        "prompt": [STORY, "The king"],
        "n": 30,
        "max_tokens": 200,
        "min_tokens": 200,
        "stream": stream,
        **GUIDED,
    }

    async def leave() -> None:
        stats = await server.vllm.stats()
        before, groups = stats["joint_steps"], stats["groups_admitted"]
        meter = Meter()
        task = asyncio.create_task(server.texts(body, meter=meter))
        steps = before
        while steps == before or meter.output_tokens < 20:
            await asyncio.sleep(0.01)
            steps = (await server.vllm.stats())["joint_steps"]
        task.cancel()
        await asyncio.wait([task])
        stats = await server.idle()
        assert stats["running"] == stats["waiting"] == 0
        assert stats["groups_admitted"] - groups < 10, (
            "the choices that waited must never reach the engine"
        )

    server.run(leave())


def test_what_nobody_reads_is_aborted_at_once(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if something holds vLLM's generator, as a traceback may."""
    engine, held = server.vllm._engine, list[Any]()
    generate = engine.generate

    def holding(*args: Any, **kwargs: Any) -> Any:
        held.append(generate(*args, **kwargs))
        return held[-1]

    monkeypatch.setattr(engine, "generate", holding)
    body = {
        "prompt": STORY,
        "n": 3,
        "max_tokens": 200,
        "ignore_eos": True,
        "stream": True,
        **GUIDED,
    }

    def leaves(text: str) -> None:
        raise InterruptedError

    async def leave() -> None:
        with pytest.raises(InterruptedError):
            await server.texts(body, on_text=leaves)
        assert held
        assert not engine.calls._entries

    server.run(leave())


# --- long texts


def test_long_texts_do_not_delay_others(server: Server) -> None:
    """Six texts of two megabytes run at once. Other requests and the event loop are not blocked.

    A text that blocked either would take a sixth of the time or more. Bounds are shares of it,
    because other tests run at the same time.
    """
    long = "the little dog " * 130_000
    waits: list[float] = []
    late: list[float] = []

    async def tick() -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(0.01)
            late.append(time.monotonic() - before - 0.01)

    async def play() -> None:
        ticker = asyncio.create_task(tick())
        heavy = [
            asyncio.create_task(server.vllm.small.tokenize({"prompt": long}, {})) for _ in range(6)
        ]
        while not heavy[0].done():
            begun = time.monotonic()
            await server.texts({"prompt": STORY, "max_tokens": 2})
            await server.vllm.small.tokenize({"prompt": STORY}, {})
            waits.append(time.monotonic() - begun)
        counts = [json.loads(text)["count"] for text in await asyncio.gather(*heavy)]
        ticker.cancel()
        assert len(set(counts)) == 1
        assert counts[0] > 300_000

    begun = time.monotonic()
    server.run(play())
    took = time.monotonic() - begun
    assert len(waits) > 6
    assert max(waits) < took / 4, (took, sorted(waits)[-5:])
    assert max(late) < took / 10, (took, sorted(late)[-5:])


def test_texts_beyond_the_bound_are_refused(server: Server) -> None:
    for body in (
        {"prompt": "a" * 4_000_001},
        {"messages": [{"role": "user", "content": "a" * 4_000_001}]},
    ):
        with pytest.raises(RequestError, match="this server takes 4000000"):
            server.run(server.vllm.small.tokenize(body, {}))
    with pytest.raises(RequestError, match="this server takes 4000000"):
        server.run(server.vllm.small.detokenize({"tokens": [5] * 1_000_001}, {}))


@pytest.mark.parametrize(
    "body", [{"prompt": 5}, {}, {"messages": 5}, {"messages": [[]]}, {"messages": [{"role": []}]}]
)
def test_bodies_of_tokenize_of_wrong_shapes(server: Server, body: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        server.run(server.vllm.small.tokenize(body, {}))


@pytest.mark.parametrize("tokens", [None, "x", [2**40], [-1], [[1]], ["x"], {}, [2**70]])
def test_bodies_of_detokenize_of_wrong_shapes(server: Server, tokens: Any) -> None:
    with pytest.raises(RequestError):
        server.run(server.vllm.small.detokenize({"tokens": tokens}, {}))


# --- tenants


LONG = " ".join([STORY] * 12)


def cached(server: Server, tenant: str | None, **more: Any) -> int:
    answer = server.answer({"prompt": LONG, "max_tokens": 1, **more}, tenant=tenant)
    return (answer["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0


def test_a_tenant_does_not_find_what_another_has_sent(server: Server) -> None:
    server.run(server.vllm._engine.reset_prefix_cache())
    assert cached(server, "alice") == 0
    assert cached(server, "alice") >= 32
    assert cached(server, "bob") == 0
    assert cached(server, None) == 0
    assert cached(server, None) >= 32, "requests without a tenant share their cache"
    assert cached(server, "bob", cache_salt="mine") == 0
    assert cached(server, "bob", cache_salt="mine") >= 32
    assert cached(server, "alice", cache_salt="mine") == 0


def test_no_path_is_shown(server: Server) -> None:
    models = json.loads(server.run(server.vllm.small.models()))
    assert [card["root"] for card in models["data"]] == ["stories"]
    assert str(MODEL) not in json.dumps(models)


# --- who is at fault


WRONG = [
    {"vllm_xargs": {"kv_transfer_params": "x"}},
    {"vllm_xargs": {"ec_transfer_params": "x"}},
    {"vllm_xargs": {"ec_transfer_params": ["x", 1]}},
    {"vllm_xargs": {"kv_cache_report_mode": 7}},
    {"vllm_xargs": {"kv_transfer_params": ["do_remote_prefill"]}},
    {"logit_bias": {"x": 1}},
    {"logit_bias": {"99999999": 1}},
    {"logprobs": 10_000},
    {"prompt_logprobs": -7},
    {"allowed_token_ids": [10**12]},
    {"stop_token_ids": [2**40]},
    {"stop": [""]},
    {"bad_words": [""]},
    {"prompt": [[]]},
    {"prompt": []},
    {"prompt": ""},
    {"prompt": [2**31]},
    {"min_tokens": 50, "max_tokens": 2},
    {"repetition_detection": {"max_pattern_size": -1}},
    {"session_id": 5},
    {"truncate_prompt_tokens": -7},
]


@pytest.mark.parametrize("fields", WRONG, ids=lambda fields: json.dumps(fields)[:60])
def test_errors_that_the_client_caused_are_client_errors(
    server: Server, fields: dict[str, Any]
) -> None:
    for stream in (False, True):
        with pytest.raises(RequestError):
            server.ask({"prompt": STORY, "max_tokens": 2, "stream": stream, **fields})


VALUES = [
    None,
    True,
    0,
    -1,
    3,
    2**62,
    1.5,
    -0.5,
    "",
    "x",
    "1",
    [],
    ["x"],
    [1],
    [[1]],
    {},
    {"a": 1},
    {"type": "x"},
]
CONTENT = {"prompt", "messages", "model", "stream"}


@pytest.mark.slow
@pytest.mark.parametrize("endpoint", ["completion", "chat"])
def test_fields_of_wrong_types_are_answered_or_refused(server: Server, endpoint: str) -> None:
    """Each field of vLLM's requests is sent with each kind of value.

    The result is an answer or a client error.
    """
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    chat = endpoint == "chat"
    cls = ChatCompletionRequest if chat else CompletionRequest
    base: dict[str, Any] = (
        {"messages": [{"role": "user", "content": "The"}]} if chat else {"prompt": "The"}
    )
    rng, faults = random.Random(4), []

    async def play() -> None:
        for name in sorted(set(cls.model_fields) - CONTENT):
            for value in VALUES:
                body = {"max_tokens": 2, **base, name: value, "stream": rng.random() < 0.3}
                try:
                    await asyncio.wait_for(server.texts(body), 30)
                except RequestError:
                    pass
                except Exception as error:
                    faults.append(
                        (name, value, body["stream"], f"{type(error).__name__}: {error}"[:200])
                    )

    server.run(play(), 500)
    assert not faults, "\n".join(map(str, faults))


def test_an_error_of_the_engine_stays_one(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of the same class that is raised inside the engine was not caused by the client."""
    from cfg_core.errors import EngineError

    serving = server.vllm._state.openai_serving_completion

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise KeyError("a bug")

    monkeypatch.setattr(serving, "request_output_to_completion_response", broken)
    with pytest.raises(EngineError):
        server.ask({"prompt": STORY, "max_tokens": 2})
