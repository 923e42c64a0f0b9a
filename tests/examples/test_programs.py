"""Programs of examples/ are run with the commands that examples/README.md gives for them.

Those that ask the server of configs/cfg.yaml: tests/chat/test_examples.py.
"""

from __future__ import annotations

import fcntl
import json
import re
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.examples.shell import COMMANDS, EXAMPLES, README, ROOT, environment, run
from tools.serving.process import free_port

pytestmark = pytest.mark.slow

STORIES = {"max_model_len": 512, "enforce_eager": True, "dtype": "float32"}
STORIES |= {"kv_cache_memory_bytes": 64 << 20, "max_num_seqs": 8}


def test_the_page_names_every_example() -> None:
    files = {path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".sh", ".ipynb")}
    assert files - {"__init__.py"} == set(COMMANDS)


# ---- batches -------------------------------------------------------------------------------------


def story(name: str, max_tokens: int, **fields: Any) -> str:
    body = {"prompt": "Once upon a time", "temperature": 0, "max_tokens": max_tokens, **fields}
    return json.dumps({"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body})


GUIDED = {"guidance_scale": 2.0, "negative_prompt": "A dog ran home."}
BAD = {
    "line-3": "{not JSON",
    "line-4": story("plain", 5),
    "misspelt": story("misspelt", 5, guidance_scael=2),
    "unknown": story("unknown", 5, no_such_field=1),
}
LINES = [story("plain", 30), story("guided", 30, ignore_eos=True, **GUIDED), *BAD.values()]
LINES += [story(f"story-{i}", 30 + 2 * i, ignore_eos=True, **GUIDED) for i in range(30)]
NAMES = ["plain", "guided", *BAD, *(f"story-{i}" for i in range(30))]


@pytest.mark.survey
def test_a_batch_goes_on_after_a_kill(tmp_path: Path) -> None:
    requests, answers = tmp_path / "requests.jsonl", tmp_path / "answers.jsonl"
    requests.write_text("\n".join(LINES) + "\n")
    command = COMMANDS["batch.py"].replace("examples/batch_requests.jsonl", str(requests))
    command = command.replace(" answers.jsonl", f" {answers}")
    command += f" --model models/stories --engine '{json.dumps(STORIES)}'"

    process = subprocess.Popen(
        ["bash", "-c", f"exec {command}"],
        cwd=ROOT,
        env=environment(tmp_path),
        stderr=(tmp_path / "log").open("w"),
        start_new_session=True,
    )
    while process.poll() is None and count(answers) < 12:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, (tmp_path / "log").read_text()
    assert not others_of(process.pid), "the engine runs on"
    before = answers.read_bytes()
    assert 12 <= count(answers) < len(NAMES)

    with answers.open("ab") as file:  # as if the kill had come in the middle of a write
        file.write(b'{"id": "batch_req_1", "custom_id": "story-29", "resp')
    done = run(command, tmp_path)
    assert f"{len(NAMES)}/{len(NAMES)}" in done.stderr
    assert f" {before.count(10)}/{len(NAMES)}" in done.stderr, "progress begins where it was"
    after = answers.read_bytes()
    assert after.startswith(before)
    lines = [json.loads(line) for line in after.splitlines()]
    assert sorted(line["custom_id"] for line in lines) == sorted(NAMES)
    found = {line["custom_id"]: line for line in lines}
    for name in NAMES:
        assert (found[name]["error"] is None) == (name not in BAD), found[name]
    assert "of this line alone" in found["line-4"]["error"]["message"]
    assert "Did you mean guidance_scale" in found["misspelt"]["error"]["message"]
    assert "no_such_field" in found["unknown"]["error"]["message"]
    texts = {name: text_of(found[name]) for name in NAMES if name not in BAD}
    assert texts["plain"] != texts["guided"]
    assert texts["story-0"].startswith(texts["guided"])
    assert texts["story-29"].startswith(texts["story-0"])
    assert found["story-29"]["response"]["body"]["usage"]["completion_tokens"] == 30 + 2 * 29

    run(command, tmp_path)
    assert answers.read_bytes() == after, "a run with nothing to do wrote something"
    with answers.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(AssertionError, match="is being written by another run"):
            run(command, tmp_path)


def count(file: Path) -> int:
    return file.read_bytes().count(b"\n") if file.exists() else 0


def others_of(session: int) -> list[str]:
    """Processes of a session that still run, after a moment in which they may end."""
    for _ in range(20):
        found = subprocess.run(["pgrep", "-s", str(session)], capture_output=True, text=True)
        if not (left := found.stdout.split()):
            return []
        time.sleep(0.1)
    return left


def text_of(line: dict[str, Any]) -> str:
    (choice,) = line["response"]["body"]["choices"]
    text: str = choice["text"]
    return text


def test_a_batch_of_chats(chat_model: Path, tmp_path: Path) -> None:
    """The file that comes with the example, and the model that it is for."""
    answers = tmp_path / "answers.jsonl"
    run(COMMANDS["batch.py"].replace(" answers.jsonl", f" {answers}"), tmp_path)
    found = {line["custom_id"]: line for line in map(json.loads, answers.open())}
    assert list(found).count("misspelt") == 1
    assert found["misspelt"]["error"]
    plain, guided = (found[n]["response"]["body"]["choices"][0] for n in ("plain", "guided"))
    assert plain["message"]["content"] != guided["message"]["content"]
    assert "pirate" in guided["message"]["content"]
    assert found["story"]["response"]["body"]["choices"][0]["text"]


# ---- vLLM's own server and batch runner ----------------------------------------------------------


@pytest.mark.survey
def test_vllm_serve(tmp_path: Path) -> None:
    """CI starts the same server in tests/engine/test_vllm_serve.py."""
    port = str(free_port())
    out = run(COMMANDS["vllm_serve.sh"], tmp_path, MODEL="models/stories", PORT=port).stdout
    plain, guided = (json.loads(line)["choices"][0]["text"] for line in out.splitlines() if line)
    assert plain
    assert guided
    assert plain != guided
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", int(port))), "the server runs on"


@pytest.mark.survey
def test_vllms_batch_runner(chat_model: Path, tmp_path: Path) -> None:
    """The command of the page, with what `vllm_serve.sh` tells vLLM on a CPU."""
    (command,) = re.findall(r"^\.venv.*run_batch[^`]*", README, re.MULTILINE)
    messages = [
        {"role": "system", "content": "You are a pirate."},
        {"role": "user", "content": "How do I make tea?"},
    ]
    body = {"model": "model", "messages": messages, "max_tokens": 20, "temperature": 0}
    xargs = {"guidance_scale": 2.0, "negative_prompt": "How do I make tea?"}
    for_line = {"method": "POST", "url": "/v1/chat/completions"}
    lines = [
        {"custom_id": "plain", "body": body, **for_line},
        {"custom_id": "guided", "body": body | {"vllm_xargs": xargs}, **for_line},
    ]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(map(json.dumps, lines)))
    command = command.replace("IN.jsonl", str(source)).replace("OUT.jsonl", str(target))
    command = command.replace("MODEL", f"{chat_model} --served-model-name model --enforce-eager")
    command += " --max-model-len 512 --kv-cache-memory-bytes 100000000"
    run(command.replace("\\\n", " ").replace("\n", " "), tmp_path)
    found = {line["custom_id"]: line for line in map(json.loads, target.open())}
    texts = [found[n]["response"]["body"]["choices"][0]["message"] for n in ("plain", "guided")]
    assert texts[0]["content"] != texts[1]["content"]
