"""Guard in front of small ASGI apps: API keys, request ids, body sizes, the log and streaming."""

import asyncio
import json
import logging
import pickle
import re
from collections import deque
from types import SimpleNamespace

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from starlette.requests import ClientDisconnect
from starlette.testclient import TestClient

from cfg_core.errors import CfgServeError, EngineError, OverloadedError
from deployments.admission.tenants import ANONYMOUS, Gate
from deployments.config.access import AccessArgs, digest_of
from deployments.config.limits import LimitsArgs
from deployments.config.tracing import TracingArgs
from deployments.http.errors import http_error
from deployments.ingress import exchange_record
from deployments.ingress.guard import Guard, install
from deployments.ingress.metrics import Metrics
from deployments.ingress.policy import Policy, current_policy, enforce
from deployments.observability import spans

KEY = "sk-secret"
AUTHORIZED = {"authorization": f"Bearer {KEY}"}
HEX_ID = re.compile(r"[0-9a-f]{32}")


def policy_of(**fields):
    keys = [{"name": "alice", "sha256": digest_of(KEY).hex()}]
    return Policy.of(AccessArgs.model_validate({"keys": keys, **fields}))


OPEN = Policy.of(AccessArgs())


class Client:
    """A raw ASGI client. `events`: what the app received and what the client saw, in order."""

    def __init__(self, app, policy=OPEN, **guard):
        self.guard = Guard(app, lambda: policy, **guard)
        self.events = []

    async def call(self, path="/v1/x", headers=None, body=(), method="POST", **scope):
        """Send one request. Returns (status, headers, body).

        body: chunks, each sent as one message. After them, the client disconnects.
        """
        self.events.clear()
        chunks = list(body) or [b""]
        messages = [
            {"type": "http.request", "body": chunk, "more_body": at < len(chunks)}
            for at, chunk in enumerate(chunks, 1)
        ]
        messages.append({"type": "http.disconnect"})

        async def receive():
            return messages.pop(0) if len(messages) > 1 else messages[0]

        async def send(message):
            self.events.append(message)

        raw = [
            (name.lower().encode(), value.encode("latin-1"))
            for name, value in (headers or {}).items()
        ]
        scope = {"type": "http", "method": method, "path": path, "headers": raw, **scope}
        await self.guard(scope, receive, send)
        if not self.events:
            return None
        start, *parts = self.events
        return start["status"], start["headers"], b"".join(part["body"] for part in parts)


def header(headers, name):
    """All values of one answer header."""
    return [value.decode() for key, value in headers if key.lower() == name.encode()]


async def answer(send, body=b"ok", headers=(), status=200):
    await send({"type": "http.response.start", "status": status, "headers": list(headers)})
    await send({"type": "http.response.body", "body": body})


async def ok(scope, receive, send):
    await answer(send)


async def read(receive):
    """The whole body, as starlette's Request reads it."""
    body = b""
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return body
        body += message["body"]
        if not message["more_body"]:
            return body


async def echo(scope, receive, send):
    await answer(send, await read(receive))


async def never(scope, receive, send):
    raise AssertionError("a refused request reached the app")


def check_refusal(result, status, kind):
    """Check OpenAI's error shape and the headers of every answer. Returns the error object."""
    assert result[0] == status
    error = json.loads(result[2])["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert (error["type"], error["code"]) == (kind, status)
    assert header(result[1], "content-type") == ["application/json"]
    assert header(result[1], "x-content-type-options") == ["nosniff"]
    assert len(header(result[1], "x-request-id")) == 1
    return error


# --- keys -----------------------------------------------------------------------------------------


ELSEWHERE = ("/x", "/health/", "/healthy", "/v1/health", "//health", "/docsx", "/playgrounds")


@pytest.mark.parametrize(
    ("path", "headers"),
    [
        *((path, {}) for path in ("/v1/x", "/ready/../v1/x", *ELSEWHERE)),
        *(("/v1/x", {"authorization": value}) for value in ("Bearer wrong", KEY, "Basic x")),
        ("/v1/x", {"x-api-key": "x"}),
    ],
)
async def test_refused_without_a_key(path, headers):
    """Paths that look like an open one are not open."""
    result = await Client(never, policy_of()).call(path, headers=headers)
    check_refusal(result, 401, "authentication_error")
    assert header(result[1], "www-authenticate") == ["Bearer"]


@pytest.mark.parametrize("headers", [AUTHORIZED, {"x-api-key": KEY}])
async def test_the_app_learns_the_tenant_and_the_id(headers):
    seen = {}

    async def app(scope, receive, send):
        seen.update(scope["state"])
        await answer(send)

    status, _, _ = await Client(app, policy_of()).call(
        headers={**headers, "x-request-id": "id-1"}, state={"of": "server"}
    )
    assert status == 200
    assert seen["tenant"].name == "alice"
    assert (seen["request_id"], seen["of"]) == ("id-1", "server")


@pytest.mark.parametrize(
    "scope", [{}, {"root_path": ""}, {"root_path": "/"}, {"root_path": "/app"}]
)
@pytest.mark.parametrize("path", ["/health", "/ready"])
async def test_open_paths(path, scope):
    async def app(scope, receive, send):
        assert scope["state"]["tenant"] is ANONYMOUS
        await answer(send)

    path = scope.get("root_path", "").rstrip("/") + path
    assert (await Client(app, policy_of()).call(path, method="GET", **scope))[0] == 200


@pytest.mark.parametrize(
    "path", ["/", "/playground", "/playground/main.js", "/docs", "/docs/x.css", "/openapi.json"]
)
async def test_pages_need_no_key_and_are_counted_by_address(path):
    seen = {}

    async def app(scope, receive, send):
        seen.update(scope["state"], open=policy.open_requests.count)
        await answer(send)

    policy = policy_of()
    assert (await Client(app, policy).call(path, method="GET"))[0] == 200
    assert seen["tenant"] is ANONYMOUS
    assert seen["client"] not in {"anonymous", "alice"}
    assert seen["open"] == 1


@pytest.mark.parametrize("path", ["/", "/docs/x"])
async def test_what_is_sent_to_a_page_needs_a_key(path):
    """The clients of TEI send their texts to `/`."""
    assert (await Client(never, policy_of()).call(path, method="POST"))[0] == 401


async def test_websockets_are_refused():
    client = Client(never, OPEN)
    await client.guard(
        {"type": "websocket", "path": "/health", "headers": []}, None, _collect(client.events)
    )
    assert [event["type"] for event in client.events] == ["websocket.close"]


def _collect(events):
    async def send(message):
        events.append(message)

    return send


async def test_the_lifespan_passes():
    seen = []

    async def app(scope, receive, send):
        seen.append((scope, receive, send))

    scope, receive, send = {"type": "lifespan"}, object(), object()
    await Guard(app, current_policy)(scope, receive, send)
    assert seen == [(scope, receive, send)]


# --- request ids ----------------------------------------------------------------------------------


async def ids(given=None, **guard):
    """(the id that the app sees in its state, those in its headers, those on the answer)."""
    seen = []

    async def app(scope, receive, send):
        inside = [value.decode() for name, value in scope["headers"] if name == b"x-request-id"]
        seen.extend([scope["state"]["request_id"], inside])
        await answer(send, headers=[(b"X-Request-Id", b"of the app")])

    _, headers, _ = await Client(app, **guard).call(
        headers={} if given is None else {"x-request-id": given}
    )
    return (*seen, header(headers, "x-request-id"))


@pytest.mark.parametrize("given", ["a", "0c7e-4.f_Z", "x" * 128])
async def test_the_clients_id_is_kept(given):
    assert await ids(given) == (given, [given], [given])


@pytest.mark.parametrize("given", [None, "", "x" * 129, "a b", "a\n", 'a"b', "ä", "a/b"])
async def test_an_id_is_made(given):
    inside, headers, answered = await ids(given)
    assert HEX_ID.fullmatch(inside)
    assert headers == answered == [inside]
    assert (await ids(given))[0] != inside


async def test_of_two_ids_the_first_counts():
    async def app(scope, receive, send):
        assert [value for name, value in scope["headers"] if name == b"x-request-id"] == [b"one"]
        await answer(send)

    client = Client(app)
    headers = [(b"x-request-id", b"one"), (b"x-request-id", b"two")]
    scope = {"type": "http", "method": "GET", "path": "/", "headers": headers}
    await client.guard(scope, None, _collect(client.events))
    assert client.events[0]["status"] == 200
    assert len(headers) == 2, "the server's own scope stays as it was"
    assert "state" not in scope


async def test_behind_serve_the_proxy_sends_the_id():
    assert await ids("given", behind_serve=True) == ("given", ["given"], [])
    inside, _, answered = await ids("ill formed", behind_serve=True)
    assert answered == [inside]


# --- sizes ----------------------------------------------------------------------------------------

LIMIT = 10


@pytest.mark.parametrize(
    "body", [[b"0123456789"], [b"01234", b"56789"], [b"0123456789", b""], [b"x"] * 10, []]
)
@pytest.mark.parametrize("declared", [None, "10", "0", "nonsense", "-1", "+5", "9" * 5000, "²"])
async def test_a_body_is_counted_whatever_length_is_declared(body, declared):
    headers = AUTHORIZED | ({} if declared is None else {"content-length": declared})
    client = Client(echo, policy_of(max_body_bytes=LIMIT))
    status, _, answered = await client.call(headers=headers, body=body)
    assert (status, answered) == (200, b"".join(body))
    longer = await client.call(headers=headers, body=[*body, b"x" * (LIMIT + 1 - len(answered))])
    check_refusal(longer, 413, "invalid_request_error")


@pytest.mark.parametrize("declared", ["11", "0000011", "9" * 19])
async def test_a_declared_length_above_the_limit_is_refused_unread(declared):
    client = Client(never, policy_of(max_body_bytes=LIMIT))
    result = await client.call(headers={**AUTHORIZED, "content-length": declared})
    error = check_refusal(result, 413, "invalid_request_error")
    assert error["message"] == "The body is larger than 10 bytes: send less in one request."


async def test_without_a_key_the_size_limit_is_not_shown():
    result = await Client(never, policy_of(max_body_bytes=LIMIT)).call(
        headers={"content-length": "11"}
    )
    check_refusal(result, 401, "authentication_error")


async def test_a_body_that_exceeds_the_limit_during_the_answer_ends_it():
    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await read(receive)

    client = Client(app, policy_of(max_body_bytes=LIMIT))
    with pytest.raises(CfgServeError, match="larger than 10 bytes"):
        await client.call(headers=AUTHORIZED, body=[b"x" * 11])
    assert [event["type"] for event in client.events] == ["http.response.start"]


# --- streams --------------------------------------------------------------------------------------


async def test_an_answer_passes_chunk_by_chunk():
    """The client has each chunk before the app makes the next."""
    seen = []

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for at in range(3):
            await send({"type": "http.response.body", "body": b"%d" % at, "more_body": True})
            seen.append(client.events[-1]["body"])
        await send({"type": "http.response.body", "body": b""})

    client = Client(app)
    assert (await client.call())[2] == b"012"
    assert seen == [b"0", b"1", b"2"]
    assert [event.get("more_body") for event in client.events[1:]] == [True, True, True, None]


async def test_the_clients_disconnect_arrives():
    async def app(scope, receive, send):
        received.extend([await receive(), await receive(), await receive()])

    received = []
    assert await Client(app).call(body=[b"x"]) is None
    assert [message["type"] for message in received] == [
        "http.request",
        "http.disconnect",
        "http.disconnect",
    ]


# --- failures -------------------------------------------------------------------------------------


async def test_errors_that_the_app_lets_through():
    async def app(scope, receive, send):
        raise OverloadedError("Full.", 2.5)

    result = await Client(app).call()
    check_refusal(result, 429, "overloaded_error")
    assert header(result[1], "retry-after") == ["3"]


async def test_the_text_of_a_bug_is_not_sent_and_the_bug_is_raised():
    async def app(scope, receive, send):
        raise RuntimeError("secret of the server")

    client = Client(app)
    with pytest.raises(RuntimeError, match="secret"):
        await client.call()
    start, body = client.events
    error = check_refusal(
        (start["status"], start["headers"], body["body"]), 500, "InternalServerError"
    )
    assert error["message"] == "Internal error: see the server's log."


@pytest.mark.parametrize("error", [RuntimeError("x"), EngineError("x")])
async def test_a_failure_after_the_first_byte_is_raised(error):
    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise error

    client = Client(app)
    with pytest.raises(type(error)):
        await client.call()
    assert len(client.events) == 1


# --- the log --------------------------------------------------------------------------------------


@pytest.fixture
def lines(caplog, monkeypatch):
    """The log lines, taken from a logger of this test.

    Serve's logger cannot be used. Once another test has imported Ray, it has filters that import
    Ray again.
    """
    assert exchange_record.logger.name == "ray.serve"
    monkeypatch.setattr(exchange_record, "logger", logging.getLogger("test_http_guard"))
    caplog.set_level(logging.INFO, logger="test_http_guard")
    return lambda: [
        record.getMessage() for record in caplog.records if record.name == "test_http_guard"
    ]


async def test_one_line_for_each_request(lines):
    times = iter([0.0, 0.25, 1.5])
    client = Client(echo, policy_of(), now=lambda: next(times))
    await client.call(
        "/v1/chat", {**AUTHORIZED, "x-request-id": "id-1"}, [b"a prompt", b", and more"]
    )
    assert lines() == [
        "request_id=id-1 tenant=alice method=POST path=/v1/chat status=200 first_byte_ms=250.0"
        " end_ms=1500.0 bytes_in=18 bytes_out=18"
    ]


async def test_a_client_that_leaves_while_it_sends_is_no_failure(lines):
    async def reads(scope, receive, send):
        raise ClientDisconnect  # as starlette's Request does

    assert await Client(reads).call() is None
    (line,) = lines()
    assert "status=- " in line


async def test_refusals_and_failures_are_logged_too(lines):
    async def gone(scope, receive, send):
        await receive()

    async def broken(scope, receive, send):
        raise RuntimeError

    await Client(never, policy_of()).call()
    await Client(gone).call()
    with pytest.raises(RuntimeError):
        await Client(broken).call()
    assert [
        re.search(r"tenant=(\S+).* status=(\S+) first_byte_ms=(-|\d)", line).groups()
        for line in lines()
    ] == [
        ("-", "401", "0"),
        ("anonymous", "-", "-"),
        ("anonymous", "500", "0"),
    ]


async def test_clients_cannot_forge_log_lines(lines):
    await Client(ok).call(
        "/x\nrequest_id=forged \u202e\ud800" + "y" * 1000, {"x-request-id": "a\nrequest_id=forged"}
    )
    (line,) = lines()
    assert "\n" not in line
    assert line.isascii()
    assert line.count("request_id=") == 1
    assert len(line) < 500


async def test_neither_keys_nor_prompts_nor_queries_are_logged(lines):
    client = Client(echo, policy_of())
    await client.call(
        "/x", {**AUTHORIZED, "cookie": "crumbs"}, [b"a prompt"], query_string=b"key=hidden"
    )
    await client.call("/x", {"authorization": "Bearer wrong-key"}, [b"a prompt"])
    for word in (KEY, "wrong-key", "prompt", "hidden", "crumbs"):
        assert word not in "".join(lines())


async def test_prompts_are_logged_if_configured(lines):
    client = Client(echo, policy_of(log_prompts=True))
    await client.call(
        headers={**AUTHORIZED, "x-request-id": "i"}, body=["ä€😀\n".encode(), b"y" * 600, b"end"]
    )
    _, line = lines()
    assert line == "request_id=i log_prompts: body begins 'ä€😀\\n" + "y" * 496 + "'"
    await client.call(headers=AUTHORIZED)  # no body, no line
    assert len(lines()) == 3


# --- in an application ----------------------------------------------------------------------------


@pytest.fixture
def http():
    """A FastAPI app with a Guard, made as deployments/ingress/app.py makes it.

    Restores the policy of this process afterwards.
    """
    app = FastAPI()
    install(app)

    @app.exception_handler(CfgServeError)
    async def on_own_error(request: Request, error: CfgServeError) -> JSONResponse:
        answer = http_error(error)
        return JSONResponse(answer.body, answer.status, answer.headers)

    @app.post("/echo")
    async def echo(request: Request) -> JSONResponse:
        state = request.state
        return JSONResponse(
            [
                state.tenant.name,
                state.request_id,
                request.headers["x-request-id"],
                len(await request.body()),
            ]
        )

    @app.get("/stream")
    async def stream() -> StreamingResponse:
        return StreamingResponse(iter([b"a", b"b"]))

    before = current_policy()
    with TestClient(app) as client:
        yield client
    enforce(before)


def test_a_process_is_open_until_a_policy_is_set(http):
    name, given, forwarded, num_bytes = http.post("/echo", content=b"x" * 9).json()
    assert (name, num_bytes) == ("anonymous", 9)
    assert given == forwarded
    assert http.get("/stream").content == b"ab"


def test_enforce_reaches_an_app_that_runs(http):
    assert http.post("/echo").status_code == 200
    enforce(policy_of(max_body_bytes=LIMIT))
    assert http.post("/echo").status_code == 401
    answer = http.post("/echo", headers={**AUTHORIZED, "x-request-id": "i"}, content=b"x" * LIMIT)
    assert answer.json() == ["alice", "i", "i", LIMIT]
    assert http.post("/echo", headers=AUTHORIZED, content=b"x" * (LIMIT + 1)).status_code == 413
    chunked = http.post("/echo", headers=AUTHORIZED, content=iter([b"x" * LIMIT, b"x"]))
    assert "content-length" not in chunked.request.headers
    assert chunked.json()["error"]["type"] == "invalid_request_error"
    assert chunked.status_code == 413
    assert chunked.headers["x-content-type-options"] == "nosniff"


def test_the_policy_is_pickled_by_name():
    """A copy of the app in a replica then uses the policy that is set there."""
    assert pickle.loads(pickle.dumps(current_policy)) is current_policy
    assert isinstance(current_policy().gate, Gate)


# --- bounds ---------------------------------------------------------------------------------------


def bounded(**limits):
    return Policy.of(AccessArgs(max_body_bytes=100), None, LimitsArgs(**limits))


async def slow_exchange(policy, parts, app=echo, headers=(), client=("10.0.0.1", 1)):
    """parts: chunks of a body, and pauses in seconds. The body never ends by itself."""
    rest, sent = list(parts), []

    async def receive():
        while rest and isinstance(rest[0], float):  # noqa: ASYNC110 - each pause comes once
            await asyncio.sleep(rest.pop(0))
        if not rest:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": rest.pop(0), "more_body": True}

    async def send(message):
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/x",
        "headers": list(headers),
        "client": client,
    }
    await Guard(app, lambda: policy)(scope, receive, send)
    return sent[0]["status"], b"".join(part["body"] for part in sent[1:])


async def test_a_body_that_does_not_arrive_in_time_is_refused():
    policy = bounded(body_timeout_s=0.1)
    status, text = await slow_exchange(policy, [b"a", 0.01, b"b", 5.0])
    assert status == 408
    assert "did not arrive within 0.1 s" in json.loads(text)["error"]["message"]
    policy.open_requests.check_integrity()
    assert not policy.open_requests._num_requests


async def test_bodies_that_never_end_do_not_block_other_clients():
    policy = bounded(max_requests_per_client=5, body_timeout_s=0.3)
    slow = [asyncio.ensure_future(slow_exchange(policy, [b"a"])) for _ in range(20)]
    await asyncio.sleep(0.05)
    refused = [task for task in slow if task.done()]
    assert len(refused) == 15
    assert {task.result()[0] for task in refused} == {429}
    other = asyncio.ensure_future(slow_exchange(policy, [b"a"], client=("10.0.0.2", 1)))
    await asyncio.sleep(0.01)
    assert not other.done()
    health = await Client(ok, policy).call("/health", client=("10.0.0.1", 1))
    assert health[0] == 200
    assert [(await task)[0] for task in slow].count(408) == 5
    assert (await other)[0] == 408
    assert not policy.open_requests._num_requests


async def test_a_body_that_is_too_large_is_read_to_its_end_before_the_answer():
    """Otherwise uvicorn closes a connection with unread bytes, and the client gets a reset."""
    client = Client(echo, bounded())
    read_after = []

    async def receive():
        read_after.append(len(client.events))
        return {"type": "http.request", "body": b"x" * 60, "more_body": len(read_after) < 5}

    sent = []

    async def send(message):
        client.events.append(message)
        sent.append(message)

    await client.guard(
        {"type": "http", "method": "POST", "path": "/v1/x", "headers": []}, receive, send
    )
    assert sent[0]["status"] == 413
    assert read_after == [0] * 5


async def test_a_client_that_expects_100_continue_is_refused_before_its_body():
    headers = [(b"content-length", b"1000"), (b"expect", b"100-continue")]
    status, _ = await slow_exchange(bounded(), [], headers=headers)
    assert status == 413


async def test_a_request_whose_client_does_not_read_is_aborted(caplog):
    policy = bounded(stall_timeout_s=0.05)
    ended = []

    async def endless(scope, receive, send):
        try:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            while True:
                await send({"type": "http.response.body", "body": b"x", "more_body": True})
        finally:
            ended.append(True)

    async def send(message):
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    async def receive():
        await asyncio.Event().wait()

    scope = {"type": "http", "method": "POST", "path": "/v1/x", "headers": []}
    async with asyncio.timeout(5):
        await Guard(endless, lambda: policy)(scope, receive, send)
    assert ended == [True]
    assert "has not read its answer" in caplog.text
    assert not policy.open_requests._num_requests


async def test_the_application_waits_while_serve_has_not_taken_its_messages():
    """`send` is made as Serve makes it: a function that closes over an unbounded queue."""
    result_queue = SimpleNamespace(_message_queue=deque())

    async def send(message):
        result_queue._message_queue.append(message)

    async def many(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(1000):
            await send({"type": "http.response.body", "body": b"x", "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def receive():
        await asyncio.Event().wait()

    scope = {"type": "http", "method": "POST", "path": "/v1/x", "headers": []}
    task = asyncio.ensure_future(Guard(many, lambda: bounded())(scope, receive, send))
    taken = most = 0
    async with asyncio.timeout(30):
        while not task.done() or result_queue._message_queue:
            most = max(most, len(result_queue._message_queue))
            taken += len(result_queue._message_queue)
            result_queue._message_queue.clear()
            await asyncio.sleep(0.005)
    assert taken == 1002
    assert most <= 64


# --- scrapes and spans ----------------------------------------------------------------------------


async def test_a_scrape_is_not_counted_and_needs_a_key():
    limits = LimitsArgs(max_requests=1, max_requests_per_client=1)
    keys = [{"name": "alice", "sha256": digest_of(KEY).hex()}]
    policy = Policy.of(AccessArgs.model_validate({"keys": keys}), limits=limits)
    policy.open_requests.begin("alice")
    client = Client(ok, policy)
    assert (await client.call("/v1/x", AUTHORIZED))[0] == 429
    assert (await client.call("/metrics", AUTHORIZED, method="GET"))[0] == 200
    assert (await client.call("/metrics", method="GET"))[0] == 401


SAMPLED = {"traceparent": f"00-{'1' * 32}-{'2' * 16}-01", "tracestate": "vendor=text"}


@pytest.fixture
def traced(monkeypatch):
    """Makes this process trace no request but those whose client asks for it."""
    exporter = InMemorySpanExporter()
    monkeypatch.setattr(spans, "_exporter", lambda _: exporter)
    args = TracingArgs(otlp_traces_endpoint="http://nowhere:4317", sampling_ratio=0.0)
    spans.start(args)

    def found():
        spans.current().flush(5)
        return exporter.get_finished_spans()

    yield found
    spans.start(TracingArgs())


async def test_a_client_asks_for_a_trace_with_its_key_only(traced):
    client = Client(ok, policy_of())
    for path in ("/v1/x", "/docs", "/metrics", "/health"):
        await client.call(path, SAMPLED)
    await client.call("/metrics", {**SAMPLED, **AUTHORIZED})
    assert traced() == ()
    await client.call("/v1/x", {**SAMPLED, **AUTHORIZED})
    (span,) = traced()
    assert span.attributes["cfg_serve.tenant"] == "alice"
    assert f"{span.context.trace_id:x}" == "1" * 32


async def test_names_of_spans_are_few(traced):
    metrics = Metrics("i", ["/v1/x"], dict)
    client = Client(ok, Policy.of(AccessArgs(), metrics))
    for path in ("/v1/x", "/1", "/2"):
        await client.call(path, SAMPLED)
    assert [span.name for span in traced()] == ["POST /v1/x", "POST other", "POST other"]
    assert traced()[1].attributes["url.path"] == "/1"


@pytest.mark.parametrize("given", [{}, SAMPLED])
async def test_the_app_gets_a_span_or_learns_that_there_is_none(traced, given):
    seen = []

    async def app(scope, receive, send):
        seen.append((dict(scope["headers"]), scope["state"]))
        await answer(send)

    await Client(app).call(headers={**given, "x-other": "1"})
    ((headers, state),) = seen
    assert headers[b"x-other"] == b"1"
    if given:
        assert state["span"].headers["traceparent"].split("-")[1] == "1" * 32
    else:
        assert "span" not in state
        assert int(headers[b"traceparent"][-2:], 16) & 1 == 0  # the flag "sampled"
