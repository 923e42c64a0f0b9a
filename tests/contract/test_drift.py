"""drift.py finds what another vLLM changed, and names the module of ours that uses it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import vllm

ROOT = Path(__file__).parents[2]
SCHEDULER = "v1/core/sched/scheduler.py"
PLANTED = {
    "_reserve_prefill_lookahead": "_reserve_lookahead",  # a removed name
    "def _handle_blocked_waiting_request(self, request: Request)": (
        "def _handle_blocked_waiting_request(self, request: Request, now: float = 0.0)"
    ),  # a new parameter
    "self.grammar_compile_error_reqs: ": "self.grammar_compile_error_reqs: list[str] = []\n"
    "        self.unused: ",  # another type
}


@pytest.fixture
def changed_vllm(tmp_path):
    """A folder with a package `vllm`: the installed one with PLANTED changes in its scheduler."""
    stock, copy = Path(vllm.__file__).parent, tmp_path / "vllm"
    folder = Path()
    for part in (*Path(SCHEDULER).parts, None):
        (copy / folder).mkdir()
        for entry in (stock / folder).iterdir():
            if entry.name not in (part, "__pycache__"):
                (copy / folder / entry.name).symlink_to(entry)
        if part is None or part.endswith(".py"):
            break
        folder /= part
    text = (stock / SCHEDULER).read_text(encoding="utf-8")
    for old, new in PLANTED.items():
        assert old in text
        text = text.replace(old, new)
    (copy / SCHEDULER).write_text(text, encoding="utf-8")
    return tmp_path


@pytest.mark.survey  # a minute, for a tool that only a change of vLLM's version needs
def test_planted_changes_are_found_and_named_with_our_module(changed_vllm):
    command = [sys.executable, "scripts/versions/drift.py", str(changed_vllm), "--tests"]
    done = subprocess.run(
        command, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 1, done.stderr
    wrong, _, changed = done.stdout.partition("## Is something else")
    ours = "`cfg_core.vllm_plugin.core.scheduler`"
    scheduler = "vllm.v1.core.sched.scheduler:"
    rows = [line for line in wrong.splitlines() if line.startswith("|")]
    lost = next(row for row in rows if "_reserve_prefill_lookahead`" in row)
    assert ours in lost
    assert "overrides nothing" in lost
    (parameter,) = (row for row in rows if "_handle_blocked_waiting_request" in row)
    assert ours in parameter
    assert "has a parameter now" in parameter
    target = f"`{scheduler}Scheduler.grammar_compile_error_reqs`"
    before = next(
        line.split(" | ")[2]
        for line in changed.splitlines()
        if "versions.v0_" in line and target in line
    )
    assert before in ("`attribute: set[str]`", "`attribute: dict[str, RequestError]`")
    assert f"{target} | {before} | `attribute: list[str]`" in changed
