"""`cfg-serve serve` on a start that fails: the first error of the engine, and what to do.

The processes are real. What the command knows before Ray starts: tests/unit/test_preflight.py.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from cfg_serve.generate.choices import Wanted, configuration
from cfg_serve.generate.model_facts import facts_of
from cfg_serve.machine import this_machine
from cfg_serve.start.environment import free_port

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 400

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def stories(**engine: Any) -> dict[str, Any]:
    """What is chosen for the stories model, with other options of the engine; None removes one."""
    wanted = Wanted(port=free_port())
    facts = facts_of(str(ROOT / "models" / "stories"))
    config = configuration(wanted, facts, (), this_machine())
    options = config["applications"][0]["args"]["engine"] | engine
    kept = {name: value for name, value in options.items() if value is not None}
    config["applications"][0]["args"]["engine"] = kept
    return config


def start(config: dict[str, Any], folder: Path) -> subprocess.Popen[str]:
    path = folder / "own.yaml"
    path.write_text(yaml.safe_dump(config))
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return subprocess.Popen(
        [sys.executable, "-m", "cfg_serve", "serve", str(path)],
        cwd=ROOT,
        env=env | {"CFG_SERVE_LOGS": str(folder / "logs")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


def told(config: dict[str, Any], folder: Path) -> str:
    """What the command prints until it gives up. Its log is named, and is there."""
    with start(config, folder) as process:
        try:
            text, _ = process.communicate(timeout=LIMIT_S)
        finally:
            process.kill()
    assert process.returncode == 1, text
    (log,) = (folder / "logs").iterdir()
    assert f"The whole log: {log}" in text
    assert "Traceback" not in text
    return text


def test_memory_that_the_engines_process_lacks(tmp_path: Path) -> None:
    """The engine runs in a process of its own, whose error is not the last one in the log."""
    config = stories(
        kv_cache_memory_bytes=None, distributed_executor_backend=None, gpu_memory_utilization=1.0
    )
    (replica,) = (
        part for part in config["applications"][0]["deployments"] if part["name"] == "ModelReplica"
    )
    variables = replica["ray_actor_options"]["runtime_env"]["env_vars"]
    del variables["VLLM_ENABLE_V1_MULTIPROCESSING"]
    variables["VLLM_CPU_KVCACHE_SPACE"] = ""  # vLLM reads it as unset, the check beforehand as set
    text = told(config, tmp_path)
    assert "less than desired CPU memory utilization" in text
    assert "What to do: set `engine: {kv_cache_memory_bytes: " in text


@pytest.mark.survey  # the same start as the test above fails; causes are in tests/unit
def test_a_type_that_does_not_exist(tmp_path: Path) -> None:
    text = told(stories(dtype="float7"), tmp_path)
    assert "float7" in text
    assert "What to do: set `engine: {dtype: auto}`" in text


def test_a_stop_while_it_loads(tmp_path: Path) -> None:
    process = start(stories(), tmp_path)
    assert process.stdout is not None
    with process:
        try:
            while "starting Ray" not in process.stdout.readline():
                assert process.poll() is None
            time.sleep(5)
            process.send_signal(signal.SIGINT)
            pressed = time.monotonic()
            while "SIGINT: stopping all processes" not in process.stdout.readline():
                assert process.poll() is None
            assert time.monotonic() - pressed < 2
            assert process.wait(60) == 0
        finally:
            process.kill()
