"""Let a tiny engine sample one guided token, in a process of its own, with a time limit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from cfg_serve.doctor.checks import Finding
from cfg_serve.start.causes import cause, last_lines

LIMIT_S = 300


def guided_token() -> Finding:
    """Whether the engine samples a guided token, or the first error and what to do."""
    with tempfile.TemporaryDirectory(prefix="cfg-serve-doctor-") as folder:
        command = [sys.executable, "-m", "cfg_serve.doctor.tiny_engine", folder]
        env = os.environ | {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
        log = Path(folder) / "log"
        try:
            with log.open("wb") as sink:
                done = subprocess.run(
                    command,
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=sink,
                    stderr=sink,
                    timeout=LIMIT_S,
                )
        except subprocess.TimeoutExpired:
            said = f"no token after {LIMIT_S} s"
            return Finding("engine", "wrong", said, "The machine is too busy, or vLLM hangs.")
        text = log.read_text(errors="replace")
    if done.returncode:
        return _failed(text)
    told = json.loads(text.splitlines()[-1])
    is_guided = told["tokens"] == told["guided"] == told["joint_steps"] == 1
    said = f"{told['guided']} of {told['tokens']} tokens guided, after {told['seconds']:.0f} s"
    return Finding("engine", "ok" if is_guided else "wrong", said)


def _failed(log: str) -> Finding:
    found = cause(log)
    if found is None:
        return Finding("engine", "wrong", "it did not start", f"Its last lines:\n{last_lines(log)}")
    return Finding("engine", "wrong", found.error, found.advice)
