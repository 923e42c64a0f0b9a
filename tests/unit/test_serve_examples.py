"""What `cfg-serve serve` prints when it is ready, without a server of ours."""

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from cfg_serve.start.examples import example, missing_models

KEYS = {"applications": [{"args": {"access": {"keys": [{"name": "a", "env": "A_KEY"}]}}}]}
OPEN = {"applications": [{"args": {"model": "x"}}]}


@pytest.fixture
def serve():
    """Start a server that answers every GET with a status and a body; returns its address."""
    servers = []

    def start(status, body):
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self.send_response(status)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_):
                pass

        server = HTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_an_example_for_an_open_server(serve):
    url = serve(200, json.dumps({"data": [{"id": "stories"}]}).encode())
    assert example(url, OPEN).startswith(f"curl -s {url}/v1/completions")


@pytest.mark.parametrize(
    "files",
    [{"chat_template.jinja": "{{ messages }}"}, {"tokenizer_config.json": '{"chat_template": ""}'}],
)
def test_an_example_for_a_model_that_chats(serve, tmp_path, files):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    url = serve(200, json.dumps({"data": [{"id": "chatty"}]}).encode())
    line = example(url, {"applications": [{"args": {"model": str(tmp_path)}}]})
    assert line.startswith(f"curl -s {url}/v1/chat/completions")
    assert '"guidance_scale": 1.5, "negative_prompt": "You are a helpful assistant."' in line


def test_a_missing_model_is_told(tmp_path):
    args = {"model": str(tmp_path / "none"), "fallback": {"model": "models/stories"}}
    (told,) = missing_models(
        {"applications": [{"args": args}, {"args": {"model": "x", "nosuch": 1}}]}
    )
    assert f"`{tmp_path / 'none'}` does not exist, so `models/stories`" in told
    args["model"] = str(tmp_path)
    assert missing_models({"applications": [{"args": args}, {}]}) == []


def test_where_a_key_is_needed_the_example_has_one(serve):
    url = serve(401, b"{}")
    assert 'Authorization: Bearer $KEY"' in example(url, KEYS)


@pytest.mark.parametrize(
    ("status", "body"), [(401, b"{}"), (500, b""), (200, b"no json"), (200, b'{"data": []}')]
)
def test_a_bad_answer_gives_a_simple_example(serve, status, body):
    assert "/v1/models" in example(serve(status, body), OPEN)


def test_no_answer_gives_a_simple_example():
    assert "/v1/models" in example("http://127.0.0.1:1", OPEN)
