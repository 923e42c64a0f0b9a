"""Bounds on the heads of requests: the counts alone, and a real uvicorn on a real socket."""

import json
import re
import socket
import time
from contextlib import ExitStack, contextmanager, suppress

import pytest

from cfg_core.errors import ConfigError
from cfg_core.patching import stock
from deployments import serve_patches
from deployments.proxy.head_bounds import USUAL_LINES, HeadBounds, HeadCount, HeadTooLargeError
from deployments.proxy.heads import MAX_PIPELINED, bounded
from tests.support.uvicorn_server import serving

(ROW,) = [row for row in serve_patches.PATCHES if row.by == "deployments.proxy.heads:bounded"]

TIMEOUT_S = 0.4
MANY = 2 * 10**6
"""Bytes of what is too large. More would only take longer."""

GET = b"GET /x HTTP/1.1\r\nHost: x\r\n"
CLOSE = b"Connection: close\r\n"
CHUNKED = b"POST /x HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n"


class Sizes:
    """An application that answers with the size of the body.

    most_lines: the most header lines that a request had in memory.
    """

    most_lines = port = 0

    async def __call__(self, scope, receive, send):
        size, more = 0, True
        while more:
            message = await receive()
            size += len(message.get("body", b""))
            more = message.get("more_body", False)
        self.most_lines = max(self.most_lines, len(scope["headers"]))
        body = str(size).encode()
        headers = [(b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


@contextmanager
def bounded_server(app):
    """`app` behind the bounds, with its port."""
    with ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("CFG_SERVE_HEAD_TIMEOUT_S", str(TIMEOUT_S))
            patch.setattr(ROW.target.replace(":", "."), bounded(stock(ROW)))
            app.port = stack.enter_context(serving(app, interface="asgi3"))
        yield app


@pytest.fixture(scope="module")
def server():
    with bounded_server(Sizes()) as app:
        yield app


def talk(server, sent, piece=2**16, pause_s=0.0, limit_s=5.0):
    """Send `sent`, and return all that came back, and the seconds until the end of connection."""
    began, got = time.monotonic(), b""
    with socket.create_connection(("127.0.0.1", server.port), timeout=limit_s) as client:
        with suppress(OSError):
            for at in range(0, len(sent), piece):
                client.sendall(sent[at : at + piece])
                time.sleep(pause_s)
        with suppress(ConnectionError):
            while part := client.recv(65536):
                got += part
    return got, time.monotonic() - began


def statuses(got):
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d+) ", got)]


# --- what is refused ------------------------------------------------------------------------------

TOO_LARGE = {
    "many short lines": GET + b"a:\r\n" * (MANY // 4),
    "a line without an end": GET + b"a: " + b"x" * MANY,
    "a name without an end": GET + b"x" * MANY,
    "a long path": b"GET /" + b"x" * MANY,
    "many short trailers": CHUNKED + b"0\r\n" + b"a:\r\n" * (MANY // 4),
    "a trailer without an end": CHUNKED + b"0\r\na: " + b"x" * MANY,
    "a chunk's extension without an end": CHUNKED + b"1;" + b"x" * MANY,
}


@pytest.mark.parametrize("name", TOO_LARGE)
def test_a_head_that_is_too_large_is_refused(server, name):
    got, took_s = talk(server, TOO_LARGE[name])
    assert statuses(got) == [431]
    head, _, body = got.partition(b"\r\n\r\n")
    error = json.loads(body)["error"]
    assert (error["code"], error["type"]) == (431, "invalid_request_error")
    assert b"connection: close" in head
    assert took_s < 2
    assert server.most_lines <= USUAL_LINES


@pytest.mark.parametrize("sent", [GET, b"GET /x", GET + b"\r\n" + GET], ids=str)
def test_a_head_that_does_not_end_is_refused_in_time(server, sent):
    got, took_s = talk(server, sent)
    assert statuses(got)[-1] == 408
    assert TIMEOUT_S - 0.05 < took_s < TIMEOUT_S + 1  # clocks differ a little


def test_a_head_that_drips_is_refused_in_time(server):
    got, took_s = talk(server, GET + b"a: " + b"x" * 1000, piece=1, pause_s=0.005)
    assert (statuses(got), took_s < TIMEOUT_S + 6) == ([408], True)


@pytest.mark.parametrize("sent", [b"", b"\r\n" * 100])
def test_a_connection_without_a_request_is_closed(server, sent):
    got, took_s = talk(server, sent, piece=2, pause_s=0.001)
    assert (got, took_s < TIMEOUT_S + 1) == (b"", True)


def test_a_body_that_goes_on_after_its_answer_has_a_deadline():
    """An application may answer before it has read the body; uvicorn then waits for its end."""

    class AnswersAtOnce(Sizes):
        async def __call__(self, scope, receive, send):
            headers = [(b"content-length", b"0")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": b""})

    with bounded_server(AnswersAtOnce()) as other:
        got, took_s = talk(other, CHUNKED + b"1\r\nx\r\n" * 100, piece=6, pause_s=0.02)
    assert (statuses(got), took_s < 4) == ([200], True)


def test_more_pipelined_requests_than_are_kept_end_the_connection(server):
    got, _ = talk(server, (GET + b"\r\n") * 5000)
    assert len(statuses(got)) <= MAX_PIPELINED
    assert 431 not in statuses(got)


@pytest.mark.parametrize(
    "sent", [b"FROB / HTTP/1.1\r\n\r\n", b"GET /\xff HTTP/1.1\r\n\r\n", CHUNKED + b"zz\r\n"]
)
def test_what_is_no_http_is_refused_in_our_shape(server, sent):
    got, _ = talk(server, sent)
    assert statuses(got)[0] == 400
    assert json.loads(got.partition(b"\r\n\r\n")[2])["error"]["code"] == 400


# --- what passes ----------------------------------------------------------------------------------

CHUNKS = b"POST /x HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n" + CLOSE + b"\r\n"
PASSES = {
    "a request": (GET + CLOSE + b"\r\n", [200]),
    "200 headers": (GET + CLOSE + b"a: b\r\n" * 200 + b"\r\n", [200]),
    "a header of 60,000 bytes": (GET + CLOSE + b"a: " + b"x" * 60_000 + b"\r\n\r\n", [200]),
    "trailers": (CHUNKS + b"1\r\nx\r\n0\r\na: b\r\n\r\n", [200]),
    "20,000 chunks": (CHUNKS + b"20\r\n%s\r\n" % (b"x" * 32) * 20_000 + b"0\r\n\r\n", [200]),
    "pipelined": ((GET + b"\r\n") * 49 + GET + CLOSE + b"\r\n", [200] * 50),
}


@pytest.mark.parametrize("name", PASSES)
def test_what_honest_clients_send_passes(server, name):
    sent, wanted = PASSES[name]
    got, _ = talk(server, sent)
    assert statuses(got) == wanted


@pytest.mark.parametrize("protocol", [b"websocket", b"h2c"])
@pytest.mark.parametrize("piece", [2**16, 40])
def test_a_request_for_another_protocol_is_answered_in_this_one(server, protocol, piece):
    asked = b"Connection: close, upgrade\r\nUpgrade: " + protocol + b"\r\nContent-Length: 5\r\n\r\n"
    sent = b"POST /x HTTP/1.1\r\nHost: x\r\n" + asked + b"hello"
    got, _ = talk(server, sent, piece=piece, pause_s=0.05)  # so that pieces are read one by one
    assert statuses(got) == [200]
    # httptools drops the body of a head that arrives in pieces
    assert got.endswith(b"5" if piece > 40 else b"0")


def test_a_slow_client_gets_its_answer(server):
    sent = GET + CLOSE + b"\r\n"
    got, _ = talk(server, sent, piece=4, pause_s=0.5 * TIMEOUT_S * 4 / len(sent))
    assert statuses(got) == [200]


def test_lengths_of_chunks_may_come_by_themselves(server):
    sent = CHUNKS + b"1\r\nx\r\n" * 300 + b"0\r\n\r\n"
    got, _ = talk(server, sent, piece=3, pause_s=0.0002)
    assert (statuses(got), got[-3:]) == ([200], b"300")


# --- the counts -----------------------------------------------------------------------------------


def test_a_body_adds_its_size_to_what_reads_without_body_may_have():
    count = HeadCount(HeadBounds(max_bytes=100))
    count.read(100)
    with pytest.raises(HeadTooLargeError):
        count.read(1)
    count.body(50)
    count.read(49)
    with pytest.raises(HeadTooLargeError):
        count.read(1)


def test_the_environment_sets_the_bounds():
    assert HeadBounds.of({}) == HeadBounds()
    given = {"CFG_SERVE_MAX_HEAD_LINES": "9", "CFG_SERVE_HEAD_TIMEOUT_S": "0.5"}
    assert HeadBounds.of(given) == HeadBounds(max_lines=9, timeout_s=0.5)


@pytest.mark.parametrize("value", ["0", "-1", "x", "inf", "nan"])
def test_a_bound_that_is_no_number_is_an_error(value):
    with pytest.raises(ConfigError, match="CFG_SERVE_MAX_HEAD_BYTES"):
        HeadBounds.of({"CFG_SERVE_MAX_HEAD_BYTES": value})


def test_another_parser_of_uvicorn_is_an_error():
    with pytest.raises(ConfigError, match="httptools"):
        bounded(object)
