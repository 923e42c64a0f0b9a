"""SECURITY.md: each of its claims is played here, or names the test that plays it.

The tests here use the server of this folder, which has no keys.
"""

from __future__ import annotations

import ast
import re
import socket
import time
from pathlib import Path

import httpx
import pytest
import yaml

from cfg_serve.plan import for_file
from cfg_serve.start.environment import environment
from tools.hostile.wire import head
from tools.serving.process import REPOSITORY, ServeProcess, shipped_config

COMPLETION = "/v1/completions"
ASK = {"prompt": "Once", "max_tokens": 2}
ODD = [(b"x-request-id", b"\xff")]
EVIL = "https://evil.example"
PAGES = ("/docs", "/playground", "/playground/encoders")

HERE = "tests/serve/stories/test_security.py"
CLAIMS = {
    "The host.": (f"{HERE}::test_make_serve_listens_on_this_machine",),
    "Keys.": (
        "tests/serve/limited/test_keys.py::test_no_key_is_logged_or_shown",
        "tests/serve/limited/test_playground_key.py"
        "::test_a_key_is_asked_for_and_kept_in_the_session_alone",
    ),
    "Tenants.": (
        "tests/engine/test_vllm_server.py::test_a_tenant_does_not_find_what_another_has_sent",
        "tests/serve/limited/test_faults.py::test_a_key_has_rates_and_a_least_priority",
        "tests/unit/test_http_guard.py::test_pages_need_no_key_and_are_counted_by_address",
    ),
    "The encoders.": (
        "tests/unit/test_encoder_queue.py::test_what_is_too_large_is_refused_by_its_field",
        "tests/unit/test_prefill_scheduler.py::test_more_requests_give_a_tenant_no_more",
        "tests/serve/waits/test_encoder_waits.py"
        "::test_one_client_fills_the_encoder_and_another_does_not_notice",
    ),
    "The engine.": (
        f"{HERE}::test_bodies_and_headers_have_bounds",
        f"{HERE}::test_a_grammar_has_bounds",
        "tests/unit/test_heads.py::test_a_head_that_does_not_end_is_refused_in_time",
        "tests/unit/test_heads.py::test_more_pipelined_requests_than_are_kept_end_the_connection",
        "tests/unit/test_http_guard.py::test_a_body_that_does_not_arrive_in_time_is_refused",
        "tests/engine/test_grammar_sandbox.py"
        "::test_a_killed_fork_refuses_its_grammar_and_a_killed_helper_is_replaced",
    ),
    "Browsers.": (
        f"{HERE}::test_pages_of_strangers_run_nothing",
        f"{HERE}::test_names_of_strangers_are_refused",
        f"{HERE}::test_only_declared_json_is_read",
        f"{HERE}::test_pages_cannot_be_framed_and_load_nothing",
        "tests/serve/stories/test_docs_routes.py::test_the_page_needs_no_other_host",
    ),
    "Addresses.": (
        "tests/unit/test_sites.py::test_only_a_trusted_proxy_tells_the_client",
        "tests/unit/test_serve_proxy.py::test_nobody_is_believed_who_the_client_is",
    ),
    "The network of the server.": (
        "tests/unit/test_media.py::test_private_addresses",
        "tests/unit/test_media.py::test_other_addresses_are_refused",
        "tests/unit/test_media.py::test_parts_of_addresses_that_are_refused",
        "tests/unit/test_media_hosts.py::test_the_socket_is_checked_again",
        "tests/unit/test_media_hosts.py::test_addresses_of_this_machine_are_private",
        "tests/unit/test_media_files.py::test_files_that_name_other_files",
        "tests/unit/test_media.py::test_python_objects_are_refused_over_http",
    ),
    "The memory of the server.": (
        "tests/unit/test_media_memory.py::test_others_may_hold_the_rest",
        "tests/unit/test_media_memory.py::test_one_client_leaves_room_for_others",
        "tests/unit/test_media_files.py::test_much_work_of_few_bytes",
    ),
    "The cluster.": (
        "tests/serve/stories/test_ports.py::test_replicas_run_nothing_that_strangers_send",
        f"{HERE}::test_each_run_of_make_serve_has_a_token_of_its_own",
    ),
}


def test_every_claim_is_played() -> None:
    """A new claim needs a test, and a test that is renamed is found."""
    text = (REPOSITORY / "SECURITY.md").read_text(encoding="utf-8")
    protects = text.partition("## What the server protects")[2].partition("\n## ")[0]
    assert re.findall(r"^- \*\*(.+?)\*\*", protects, re.MULTILINE) == [*CLAIMS]
    for path, name in (test.split("::") for tests in CLAIMS.values() for test in tests):
        tree = ast.parse((REPOSITORY / path).read_text(encoding="utf-8"))
        names = {node.name for node in ast.walk(tree) if hasattr(node, "name")}
        assert name in names, f"{path} has no {name}"


def test_make_serve_listens_on_this_machine(tmp_path: Path) -> None:
    config = {"applications": [{"import_path": "deployments.app:build", "args": {"model": "x/y"}}]}
    path = tmp_path / "own.yaml"
    path.write_text(yaml.safe_dump(config))
    assert for_file(path, None, None, None).host == "127.0.0.1"
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    assert "CONFIG ?= configs/cfg.yaml" in makefile
    assert shipped_config("cfg")["http_options"]["host"] == "127.0.0.1"


def test_each_run_of_make_serve_has_a_token_of_its_own(tmp_path: Path) -> None:
    first, second = environment(tmp_path), environment(tmp_path)
    assert first["RAY_AUTH_MODE"] == "token"
    assert len(first["RAY_AUTH_TOKEN"]) >= 32
    assert first["RAY_AUTH_TOKEN"] != second["RAY_AUTH_TOKEN"]


def test_bodies_and_headers_have_bounds(http: httpx.Client) -> None:
    large = {"prompt": "x" * (8 * 2**20)}
    assert http.post(COMPLETION, json=large).status_code == 413
    assert http.get("/v1/models", headers={"x": "y" * 70_000}).status_code == 431
    many = [("x", "y")] * 300
    assert http.get("/v1/models", headers=many).status_code == 431
    odd = http.get("/v1/models", headers=ODD)
    assert (odd.status_code, odd.json()["error"]["param"]) == (400, "x-request-id")
    assert http.get("/health", headers=ODD).status_code == 200


def test_a_grammar_has_bounds(http: httpx.Client) -> None:
    asked = http.post(COMPLETION, json=ASK | {"structured_outputs": {"regex": "a" * 10**6}})
    assert asked.status_code == 400


@pytest.mark.parametrize("kind", ["application/json", "text/plain"])
@pytest.mark.parametrize("origin", [EVIL, "null"])
def test_pages_of_strangers_run_nothing(http: httpx.Client, origin: str, kind: str) -> None:
    headers = {"origin": origin, "content-type": kind}
    told = http.post(COMPLETION, json=ASK, headers=headers)
    assert told.status_code == 403
    assert "access-control-allow-origin" not in told.headers
    asked = http.options(
        COMPLETION, headers={"origin": origin, "access-control-request-method": "POST"}
    )
    assert asked.status_code == 403
    assert "access-control-allow-origin" not in asked.headers


def test_pages_of_this_machine_and_of_the_server_may_ask(http: httpx.Client) -> None:
    page = "http://localhost:3000"
    preflight = {
        "origin": page,
        "access-control-request-method": "POST",
        "access-control-request-headers": "content-type",
    }
    told = http.options(COMPLETION, headers=preflight)
    assert (told.status_code, told.headers["access-control-allow-origin"]) == (200, page)
    told = http.post(COMPLETION, json=ASK, headers={"origin": page})
    assert (told.status_code, told.headers["access-control-allow-origin"]) == (200, page)
    own = str(http.base_url).rstrip("/")
    assert http.post(COMPLETION, json=ASK, headers={"origin": own}).status_code == 200


def test_names_of_strangers_are_refused(http: httpx.Client) -> None:
    for path in ("/v1/models", "/playground", "/metrics"):
        assert http.get(path, headers={"host": "evil.example"}).status_code == 421
    assert http.post(COMPLETION, json=ASK, headers={"host": "evil.example"}).status_code == 421
    assert http.get("/v1/models", headers={"host": "["}).status_code == 400
    assert http.get("/v1/models", headers={"host": "localhost:1"}).status_code == 200


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", None])
@pytest.mark.parametrize("path", [COMPLETION, "/v1/embeddings", "/tokenize"])
def test_only_declared_json_is_read(http: httpx.Client, path: str, kind: str | None) -> None:
    headers = {} if kind is None else {"content-type": kind}
    told = http.post(path, content=b'{"prompt": "x", "input": "x"}', headers=headers)
    assert told.status_code == 415
    assert "Content-Type: application/json" in told.json()["error"]["message"]


def test_pages_cannot_be_framed_and_load_nothing(http: httpx.Client) -> None:
    for path in (*PAGES, "/", "/v1/models", "/no-such"):
        headers = http.get(path).headers
        assert headers["x-frame-options"] == "DENY", path
        policy = headers["content-security-policy"]
        assert "frame-ancestors 'none'" in policy, path
        assert "http" not in policy, path


# --- faults that were reported --------------------------------------------------------------------


def test_a_client_that_leaves_while_it_sends_is_no_failure(server: ServeProcess) -> None:
    """It is logged without a status, and nothing is logged as an error."""
    if not isinstance(server, ServeProcess):
        pytest.skip("the logs of this server are not known")
    address = httpx.URL(server.url)
    headers = {
        "Host": "localhost",
        "Content-Type": "application/json",
        "Content-Length": "900000",
        "X-Request-Id": "left-while-sending",
    }
    with socket.create_connection((address.host, address.port), timeout=10) as client:
        client.sendall(head("POST", COMPLETION, headers) + b"x" * 300_000)
        time.sleep(0.3)
    time.sleep(1.0)
    lines = [line for lines in server.ray_logs().values() for line in lines]
    about = [line for line in lines if "left-while-sending" in line]
    assert about
    assert [line for line in about if re.search(r" 500 \d|status=500|ERROR", line)] == []
    assert [line for line in lines if "ClientDisconnect" in line] == []


def test_an_error_shows_no_python(http: httpx.Client) -> None:
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    told = http.post(
        "/v1/chat/completions", json=chat | {"chat_template_kwargs": {"conversation": 1}}
    )
    error = told.json()["error"]
    assert (told.status_code, error["param"]) == (400, "chat_template_kwargs.conversation")
    assert "()" not in error["message"]
