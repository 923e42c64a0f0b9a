"""The terminal chat: what its commands change, and what it sends, to a small server of the test."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from cfg_serve.chat.session import HELP, Session, step
from cfg_serve.chat.terminal import run
from cfg_serve.errors import CommandError

CHAT = Session(model="m", system="You are a pirate.", negative="You are dull.")
USER, PIRATE = {"role": "user", "content": "Hi"}, {"role": "system", "content": CHAT.system}


def test_what_is_sent() -> None:
    (body,) = CHAT.bodies("Hi")
    assert body["messages"] == [PIRATE, USER]
    assert (body["guidance_scale"], body["negative_prompt"]) == (1.5, "You are dull.")
    later = CHAT.answered("A", "B").bodies("Hi")[0]["messages"]
    assert [message["role"] for message in later] == ["system", "user", "assistant", "user"]


def test_scale_1_sends_no_guidance() -> None:
    session = step(CHAT, "/scale 1 2").session
    plain, guided = session.bodies("Hi")
    assert "guidance_scale" not in plain
    assert "negative_prompt" not in plain
    assert guided["guidance_scale"] == 2.0


def test_commands() -> None:
    assert step(CHAT, "/scale 1, 1.5 2").session.scales == (1.0, 1.5, 2.0)
    assert step(CHAT, "/scale").say == CHAT.shown()
    assert step(CHAT, "/negative").session.negative == ""
    talked = CHAT.answered("A", "B")
    assert step(talked, "/system You are a cat.").session.turns == ()
    assert step(talked, "/reset").session.turns == ()
    again = step(talked, "/again")
    assert (again.question, again.session.turns) == ("A", ())
    assert step(CHAT, "/quit").ends
    assert step(CHAT, "/help").say == HELP
    assert step(CHAT, "  a question ").question == "a question"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("/scael 2", "there is no command /scael: did you mean `/scale`?"),
        ("/scale two", "'two' is no list of numbers"),
        ("/again", "there is no question yet"),
    ],
)
def test_wrong_commands(line: str, words: str) -> None:
    with pytest.raises(CommandError, match=words):
        step(CHAT, line)


@pytest.fixture
def server() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server that answers with the scale, in two pieces; its address, and what it was sent."""
    sent: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send(200, json.dumps({"data": [{"id": "m"}]}))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            sent.append(body)
            if body["messages"][-1]["content"] == "fail":
                self._send(400, json.dumps({"error": {"message": "no such thing"}}))
                return
            pieces = ["scale ", str(body.get("guidance_scale", 1))]
            lines = [{"choices": [{"delta": {"content": piece}}]} for piece in pieces]
            events = [*map(json.dumps, lines), "[DONE]"]
            self._send(200, "".join(f"data: {event}\n\n" for event in events))

        def _send(self, status: int, text: str) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None:
            pass

    httpd = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=httpd.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{httpd.server_port}", sent
    httpd.shutdown()
    httpd.server_close()


def test_a_conversation(
    server: tuple[str, list[dict[str, Any]]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    url, sent = server
    lines = "Hi\n/scale 1 2\nAnd now?\n/scale 2\nfail\n/sclae\n/quit\nnot read\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    assert run(url, Session(model=""), None) == 0
    told = capsys.readouterr().out
    assert told.startswith("scale 1.5\n")
    assert "scale 1:\nscale 1\n\nscale 2:\nscale 2.0\n" in told
    assert "the server answers 400: no such thing" in told
    assert "there is no command /sclae" in told
    assert sent[0]["model"] == "m"
    second = sent[1]["messages"]
    assert [message["content"] for message in second] == ["Hi", "scale 1.5", "And now?"]
    assert len(sent) == 4
