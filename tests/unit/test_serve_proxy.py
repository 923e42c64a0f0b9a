"""The middleware in front of Serve's proxy, without Serve.

HTTP/1.0 is tested with a real uvicorn on a real socket.
"""

import asyncio
import json
import socket
from collections import deque
from contextlib import suppress

import pytest
import uvicorn

from deployments.config.limits import LimitsArgs
from deployments.proxy.middleware import HELD_BYTES, ConnectionLimits, middlewares
from deployments.proxy.starts import AT_ONCE
from tests.support.uvicorn_server import serving

START = {
    "type": "http.response.start",
    "status": 200,
    "headers": [(b"content-type", b"application/json")],
}
STREAM = {
    "type": "http.response.start",
    "status": 200,
    "headers": [(b"content-type", b"text/event-stream")],
}


def body(text, more=False):
    return {"type": "http.response.body", "body": text, "more_body": more}


def script(*messages):
    async def app(scope, receive, send):
        for message in messages:
            await send(message)

    return app


def scope(path="/v1/completions", method="POST", address="10.0.0.1"):
    fixed = {"type": "http", "headers": [], "http_version": "1.1"}
    return {**fixed, "method": method, "path": path, "client": (address, 1)}


async def ask(porter, **fields):
    sent = []

    async def receive():
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message):
        sent.append(message)

    await porter(scope(**fields), receive, send)
    return sent


def porter(app, **limits):
    return ConnectionLimits(app, LimitsArgs(**limits))


async def until(true):
    async with asyncio.timeout(5):
        while not true():  # noqa: ASYNC110 - what it asks has no event
            await asyncio.sleep(0.01)


class InOrder:
    """An application that begins one request after another, each of which takes it a millisecond.

    answers: whether an answer follows at once, or when this event is set.
    """

    def __init__(self, answers=True):
        self.begun = self.probes = 0
        self.answers = asyncio.Event()
        self._one = asyncio.Lock()
        if answers:
            self.answers.set()

    async def __call__(self, scope, receive, send):
        async with self._one:
            await asyncio.sleep(0.001)
        if scope["path"] == "/health":
            self.probes += 1
        else:
            self.begun += 1
            await self.answers.wait()
        await send(START)
        await send(body(b"{}"))


async def test_answers_pass_as_they_are():
    messages = [STREAM, body(b"data: 1\n\n", True), body(b"data: [DONE]\n\n")]
    assert await ask(porter(script(*messages))) == messages


@pytest.mark.parametrize("status", [404, 408, 429, 500, 503])
async def test_plain_text_errors_of_serve_get_our_error_shape(status):
    headers = [(b"content-type", b"text/plain"), (b"retry-after", b"3")]
    head = {"type": "http.response.start", "status": status, "headers": headers}
    start, told = await ask(porter(script(head, body(b"no ", True), body(b"route"))))
    assert start["status"] == status
    assert dict(start["headers"])[b"retry-after"] == b"3"
    error = json.loads(told["body"])["error"]
    assert (error["message"], error["code"]) == ("no route", status)
    assert int(dict(start["headers"])[b"content-length"]) == len(told["body"])


async def test_without_an_answer_of_serve_the_client_gets_an_error():
    start, told = await ask(porter(script()))
    assert start["status"] == 503
    assert (
        json.loads(told["body"])["error"]["message"]
        == "The server lost this request: send it again."
    )


async def test_a_stream_that_serve_cuts_ends_with_an_error_event():
    *_, last = await ask(porter(script(STREAM, body(b"data: 1\n\n", True))))
    assert last["body"].startswith(b"event: error")


async def test_bounds_for_each_address_and_none_for_health():
    held = asyncio.Event()

    async def app(scope, receive, send):
        if scope["path"] not in ("/health", "/ready"):
            await held.wait()
        await send(START)
        await send(body(b"{}"))

    front = porter(app, max_requests_per_client=2)
    waiting = [asyncio.ensure_future(ask(front)) for _ in range(2)]
    await asyncio.sleep(0.01)
    refused = await ask(front)
    assert refused[0]["status"] == 429
    other = asyncio.ensure_future(ask(front, address="10.0.0.2"))
    assert (await ask(front, path="/ready", method="GET"))[0]["status"] == 200
    held.set()
    assert [(await task)[0]["status"] for task in (*waiting, other)] == [200] * 3
    assert (await ask(front))[0]["status"] == 200


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_requests_of_one_address_take_turns_and_delay_no_other_client(method):
    ingress = InOrder()
    front = porter(ingress)
    flood = [asyncio.ensure_future(ask(front, method=method)) for _ in range(200)]
    await asyncio.sleep(0)
    before = ingress.begun
    await ask(front, method=method, address="10.0.0.2")
    assert ingress.begun - before <= 2 * AT_ONCE
    assert all(sent[0] == START for sent in await asyncio.gather(*flood))
    assert not front._starts._lines


async def test_answers_that_begin_late_do_not_hold_up_other_requests():
    """A probe tells that the ingress has begun what came before it."""
    ingress = InOrder(answers=False)
    front = porter(ingress)
    flood = [asyncio.ensure_future(ask(front)) for _ in range(200)]
    await until(lambda: ingress.begun == 200)
    assert ingress.probes <= 200 / AT_ONCE + 2
    ingress.answers.set()
    assert all(sent[0] == START for sent in await asyncio.gather(*flood))


async def test_a_few_requests_are_passed_on_at_once_and_need_no_probe():
    ingress = InOrder(answers=False)
    front = porter(ingress)
    few = [asyncio.ensure_future(ask(front)) for _ in range(AT_ONCE)]
    await asyncio.sleep(0.1)
    assert (ingress.begun, ingress.probes) == (AT_ONCE, 0)
    ingress.answers.set()
    await asyncio.gather(*few)


async def test_an_ingress_that_answers_no_probe_holds_nobody_up(monkeypatch):
    monkeypatch.setattr("deployments.proxy.starts.PROBE_LIMIT_S", 0.01)
    begun = 0
    over = asyncio.Event()

    async def stuck(scope, receive, send):
        nonlocal begun
        begun += scope["path"] != "/health"
        await over.wait()

    front = porter(stuck)
    flood = [asyncio.ensure_future(ask(front)) for _ in range(40)]
    await until(lambda: begun == 40)
    over.set()
    await asyncio.gather(*flood)


async def test_ready_is_asked_once_for_all():
    asked = []

    async def app(scope, receive, send):
        asked.append(scope)
        await asyncio.sleep(0.02)
        await send(START)
        await send(body(b"{}"))

    front = porter(app)
    told = await asyncio.gather(*(ask(front, path="/ready", method="GET") for _ in range(200)))
    assert len(asked) == 1
    assert all(
        [message["type"] for message in one] == [START["type"], body(b"")["type"]] for one in told
    )
    await asyncio.sleep(0.3)
    await ask(front, path="/ready", method="GET")
    assert len(asked) == 2


async def test_what_a_client_sends_does_not_change_the_shared_answer():
    """The answer goes to others, too, so nothing of the client may reach the application."""
    asked = []

    async def app(scope, receive, send):
        asked.append(scope)
        await send(START)
        await send(body(b"{}"))

    hostile = scope("/ready", "GET") | {
        "headers": [(b"x-request-id", b"\xff"), (b"serve_multiplexed_model_id", b"\xff")],
        "query_string": b"a=\xff",
        "raw_path": b"/%72eady",
    }

    async def nothing():
        raise AssertionError("a GET has no body")

    sent = []

    async def send(message):
        sent.append(message)

    await porter(app)(hostile, nothing, send)
    assert sent[0] == START
    (seen,) = asked
    assert (seen["headers"], seen["query_string"], seen["raw_path"]) == ([], b"", b"/ready")
    assert seen["client"] is None


async def test_an_app_that_fails_is_told_in_our_shape():
    async def fails(scope, receive, send):
        raise ValueError("a bug")

    async def whole():
        return part(b"", more=False)

    shared = await ask(porter(fails), path="/ready", method="GET")
    sent = []

    async def send(message):
        sent.append(message)

    with pytest.raises(ValueError, match="a bug"):
        await porter(fails)(scope(), whole, send)
    for start, told in (shared, sent):
        assert start["status"] == 503
        assert "a bug" not in str(json.loads(told["body"])["error"])


# --- text of headers ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", [b"x-request-id", b"x-session-id", b"serve_multiplexed_model_id", b"traceparent", b"a"]
)
async def test_a_header_that_is_not_utf_8_is_refused_by_its_name(name):
    app = Reader()
    sent = await told_to(porter(app), part(b"", more=False), headers=[(name, b"a\xff")])
    assert (app.got, sent[0]["status"]) == (None, 400)
    error = json.loads(sent[1]["body"])["error"]
    assert error["param"] == name.decode()
    assert name.decode() in error["message"]


@pytest.mark.parametrize(
    "header", [(b"cookie", b"\xff"), (b"user-agent", b"M\xfcller"), (b"x-request-id", b"\xc3\xbc")]
)
async def test_other_headers_may_hold_any_bytes(header):
    sent = await told_to(porter(Reader()), part(b"", more=False), headers=[header])
    assert sent[0] == START


async def test_a_websocket_with_such_a_header_is_closed():
    sent = []

    async def send(message):
        sent.append(message)

    front = porter(Reader())
    await front({"type": "websocket", "headers": [(b"x-request-id", b"\xff")]}, None, send)
    assert [message["type"] for message in sent] == ["websocket.close"]


def test_nobody_is_believed_who_the_client_is(monkeypatch):
    """uvicorn believes X-Forwarded-For from the loopback address unless it is told not to."""
    monkeypatch.delenv("FORWARDED_ALLOW_IPS", raising=False)
    monkeypatch.setattr("deployments.serve_patches.apply", lambda process: None)
    middlewares()
    config = uvicorn.Config(porter(Reader()), lifespan="off")
    config.load()
    assert "127.0.0.1" not in config.loaded_app.trusted_hosts
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", "10.0.0.1")
    middlewares()
    config = uvicorn.Config(porter(Reader()), lifespan="off")
    config.load()
    assert "10.0.0.1" in config.loaded_app.trusted_hosts


# --- bodies ---------------------------------------------------------------------------------------


def part(text, more=True):
    return {"type": "http.request", "body": text, "more_body": more}


class Reader:
    """An app that reads its body. got: its messages; None before it is called."""

    def __init__(self):
        self.got = None

    async def __call__(self, scope, receive, send):
        self.got = []
        while not self.got or self.got[-1].get("more_body"):
            self.got.append(await receive())
        await send(START)
        await send(body(b"{}"))


async def told_to(front, *messages, headers=()):
    """The answer to a client that sends these messages, and nothing after them."""
    sent, coming = [], deque(messages)

    async def receive():
        return coming.popleft() if coming else await asyncio.Event().wait()

    async def send(message):
        sent.append(message)

    with suppress(TimeoutError):
        async with asyncio.timeout(0.1):
            await front(scope() | {"headers": headers}, receive, send)
    return sent


@pytest.mark.parametrize(
    "messages",
    [
        [part(b"", more=False)],
        [part(b"a"), part(b"b"), part(b"", more=False)],
        [part(b"x" * HELD_BYTES), part(b"y", more=False)],
    ],
)
async def test_a_body_is_passed_on_as_it_came(messages):
    app = Reader()
    sent = await told_to(porter(app), *messages)
    assert (app.got, sent[0]) == (messages, START)


async def test_a_long_body_is_passed_on_before_it_is_whole():
    app, large = Reader(), part(b"x" * HELD_BYTES)
    assert await told_to(porter(app), large) == []
    assert app.got == [large]


async def test_a_body_that_is_not_finished_does_not_reach_the_application():
    app = Reader()
    sent = await told_to(porter(app, body_timeout_s=0.02), part(b"a"))
    assert (app.got, sent[0]["status"]) == (None, 408)
    assert await told_to(porter(app), part(b"a"), {"type": "http.disconnect"}) == []
    assert app.got is None


async def test_a_request_that_expects_100_continue_reaches_the_application_at_once():
    app = Reader()
    assert await told_to(porter(app), headers=[(b"expect", b"100-continue")]) == []
    assert app.got == []


# --- HTTP/1.0 -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def port():
    async def app(scope, receive, send):
        await send(STREAM)
        for _ in range(3):
            await send(body(b"data: 1\n\n", True))
            await asyncio.sleep(0.01)
        await send(body(b"data: [DONE]\n\n"))

    with serving(porter(app), http="httptools") as port:
        yield port


def exchange(port, version, headers=""):
    with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
        client.sendall(f"GET /v1/x HTTP/{version}\r\nHost: x\r\n{headers}\r\n".encode())
        raw = b""
        while not raw.endswith(b"0\r\n\r\n") and (part := client.recv(65536)):
            raw += part
    head, _, answer = raw.partition(b"\r\n\r\n")
    return head.lower(), answer


@pytest.mark.parametrize("headers", ["", "Connection: keep-alive\r\n"])
def test_a_stream_in_http_1_0_has_no_chunks_and_ends_with_the_connection(port, headers):
    head, answer = exchange(port, "1.0", headers)
    assert b"transfer-encoding" not in head
    assert b"connection: close" in head
    assert answer == b"data: 1\n\n" * 3 + b"data: [DONE]\n\n"


def test_a_stream_in_http_1_1_has_chunks(port):
    head, answer = exchange(port, "1.1")
    assert b"transfer-encoding: chunked" in head
    assert answer.startswith(b"9\r\ndata: 1")
