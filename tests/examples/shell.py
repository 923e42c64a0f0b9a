"""The commands of examples/README.md, and how tests run them."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
README = (EXAMPLES / "README.md").read_text(encoding="utf-8")
COMMANDS = dict(re.findall(r"^\| \[(\S+)\]\(\1\) \|.*\| `([^`|]+)` \|$", README, re.MULTILINE))
# In-process engines of tests/conftest.py set these; a user's shell does not.
UNSET = ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_LOGGING_LEVEL")


def run(command: str, folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=ROOT,
        env=environment(folder, **env),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr[-4000:]}"
    return done


def environment(folder: Path, **env: str) -> dict[str, str]:
    """The shell's, with places for what Jupyter writes, and settings for a machine without GPU."""
    kept = {name: value for name, value in os.environ.items() if name not in UNSET}
    places = dict.fromkeys(("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "MPLCONFIGDIR"), str(folder))
    on_cpu = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    return kept | places | on_cpu | {"TORCHDYNAMO_DISABLE": "1"} | env
