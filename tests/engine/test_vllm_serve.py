"""vLLM's own server with the flags of `python -m cfg_core.vllm_plugin`, in its own processes.

It is started as a module, which `vllm serve` runs too: see README.md, "vLLM's own server".
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cfg_core.errors import REQUEST_FAULT
from tests.engine.oracle import PROMPTS, Case, Oracle
from tests.engine.tiny_models import make_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]

START_S = 400
ENGINE_FLAGS = (
    *("--dtype", "float32", "--block-size", "32", "--max-model-len", "256", "--enforce-eager"),
    *(
        "--kv-cache-memory-bytes",
        str(64 << 20),
        "--max-num-batched-tokens",
        "64",
        "--served-model-name",
        "tiny",
    ),
)


@pytest.fixture(scope="module")
def server(
    model_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """The base URL of a running server."""
    command = ["vllm.entrypoints.openai.api_server", "--model", str(model_folder("llama"))]
    with running(command, tmp_path_factory.mktemp("serve") / "log.txt") as url:
        yield url


@contextmanager
def running(program: Sequence[str], log: Path) -> Iterator[str]:
    """The base URL of a server, with the flags that the plugin prints.

    program: a module, and its arguments.
    """
    flags = subprocess.run(
        [sys.executable, "-m", "cfg_core.vllm_plugin"], check=True, capture_output=True, text=True
    ).stdout.split()
    port = free_port()
    command = [sys.executable, "-m", *program, *flags, *ENGINE_FLAGS]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    with log.open("w") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=out, env=server_environment(), start_new_session=True
        )
    try:
        wait_until_healthy(process, f"http://127.0.0.1:{port}", log)
        yield f"http://127.0.0.1:{port}"
    finally:
        stop(process)


def server_environment() -> dict[str, str]:
    """This process's environment, without its settings for in-process engines."""
    in_process = ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_DIST_IDENT")
    return {name: value for name, value in os.environ.items() if name not in in_process}


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


def wait_until_healthy(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            urllib.request.urlopen(f"{url}/health", timeout=5).close()
            return
        except OSError:
            time.sleep(0.5)
    pytest.fail(f"the server did not start:\n{log.read_text()[-4000:]}")


def stop(process: subprocess.Popen[bytes]) -> None:
    """The server and all processes that it started. It leads their process group."""
    process.send_signal(signal.SIGINT)
    try:
        process.wait(timeout=30)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def complete(url: str, **body: Any) -> tuple[int, dict[str, Any]]:
    """POST /v1/completions: status and parsed answer."""
    body = {
        "model": "tiny",
        "temperature": 0,
        "max_tokens": 12,
        "ignore_eos": True,
        "return_token_ids": True,
        **body,
    }
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_guided_completion(server: str, llama: Oracle) -> None:
    """A negative prompt of text in vllm_xargs.

    The completion equals the reference, and differs from the plain one.
    """
    negative = "A rainy day in the city."
    ids = make_tokenizer().encode(negative)
    xargs = {"guidance_scale": 2.0, "negative_prompt": negative}
    status, body = complete(server, prompt=list(PROMPTS[0]), vllm_xargs=xargs)
    assert status == 200, body
    want = llama.reference(Case(PROMPTS[0], tuple(ids), 2.0), max_new_tokens=12).token_ids
    assert body["choices"][0]["token_ids"] == want
    assert body["usage"]["completion_tokens"] == 12
    assert body["usage"]["prompt_tokens"] == len(PROMPTS[0])
    status, body = complete(server, prompt=list(PROMPTS[0]))
    assert body["choices"][0]["token_ids"] == llama.plain[0][:12] != want


def test_negative_of_token_ids(server: str, llama: Oracle) -> None:
    """The negative is longer than the prompt, and than the server's budget of 64 tokens a step."""
    case = Case(PROMPTS[8], PROMPTS[9][:100], 3.0)
    xargs = {"guidance_scale": case.scale, "negative_prompt_token_ids": list(case.negative)}
    status, body = complete(server, prompt=list(case.prompt), vllm_xargs=xargs)
    assert status == 200, body
    assert body["choices"][0]["token_ids"] == llama.reference(case, max_new_tokens=12).token_ids


@pytest.mark.parametrize(
    "xargs",
    [
        {"guidance_scale": "much"},
        {"guidance_scale": 2.0, "negative_prompt_token_ids": []},
        {"guidance_sclae": 2.0},
    ],
    ids=["no-number", "empty-negative", "typo"],
)
def test_bad_guidance_gets_a_400_and_the_server_still_works(
    server: str, llama: Oracle, xargs: dict[str, Any]
) -> None:
    status, body = complete(server, prompt=list(PROMPTS[0]), vllm_xargs=xargs)
    assert status == 400, body
    assert (
        next(iter(xargs)) in body["error"]["message"]
        or "negative_prompt" in body["error"]["message"]
    )
    status, body = complete(server, prompt=list(PROMPTS[0]))
    assert (status, body["choices"][0]["token_ids"]) == (200, llama.plain[0][:12])


def test_a_guided_beam_search_is_refused(server: str) -> None:
    """vLLM would search without guidance. A plain beam search goes on as in stock vLLM."""
    fields: dict[str, Any] = {"prompt": list(PROMPTS[0]), "use_beam_search": True, "n": 2}
    xargs = {"guidance_scale": 2.0, "negative_prompt": "A rainy day."}
    status, body = complete(server, **fields, vllm_xargs=xargs)
    assert status == 400, body
    assert "Beam search cannot be guided" in body["error"]["message"]
    status, body = complete(server, **fields)
    assert status == 200, body
    assert len(body["choices"]) == 2


def test_a_request_that_fails_in_the_engine_fails_alone(server: str, llama: Oracle) -> None:
    """Its grammar allows no permitted token after two. vLLM 0.33 tells the client the reason."""
    from cfg_core.vllm_plugin import versions
    from cfg_core.vllm_plugin.versions.v0_33 import V033

    status, body = complete(
        server,
        prompt=list(PROMPTS[0]),
        structured_outputs={"regex": "[0-9]{2}[x-z]"},
        allowed_token_ids=make_tokenizer().encode("0123456789", add_special_tokens=False),
        vllm_xargs={"guidance_scale": 2.0, "negative_prompt": "A rainy day."},
    )
    if isinstance(versions.chosen(), V033):
        assert status == 400, body
        assert body["error"]["message"].startswith(REQUEST_FAULT)
    else:
        assert status == 500, body
    status, body = complete(server, prompt=list(PROMPTS[0]))
    assert (status, body["choices"][0]["token_ids"]) == (200, llama.plain[0][:12])
