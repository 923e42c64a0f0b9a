"""The tables of patches: each row is correct, and every replacement has a row."""

import ast
import dataclasses
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import cfg_core.prefill_only.patches
import deployments.patches
from cfg_core.foreign.check import patch_uses
from cfg_core.patches import load
from cfg_core.vllm_plugin import SCHEDULER, asks_for_guidance, patches

ROOT = Path(__file__).parents[2]
ROWS = [
    *patches.PATCHES,
    *deployments.patches.PATCHES,
    *cfg_core.prefill_only.patches.PATCHES,
]


@pytest.mark.parametrize("patch", ROWS, ids=lambda patch: patch.target)
def test_everything_that_a_row_names_exists(patch):
    """And a replacement can be called as its original."""
    assert [use.problem for use in patch_uses([patch])] == [None]
    assert load(patch.by) is not None
    assert not patch.fault or callable(load(patch.fault))
    assert (ROOT / patch.test).is_file()
    assert patch.reason.endswith(".")


@pytest.mark.parametrize(
    ("target", "problem"),
    [
        ("vllm.no_such_module:x", "does not exist"),
        ("vllm.v1.core.sched.scheduler:NoSuchClass.schedule", "does not exist"),
        ("vllm.v1.core.sched.scheduler:Scheduler.no_such_method", "does not exist"),
        ("vllm.v1.core.sched.scheduler:Scheduler.schedule", "has no parameter"),
    ],
)
def test_a_row_that_does_not_fit_is_found(target, problem):
    row = dataclasses.replace(patches.PATCHES[0], target=target)
    assert problem in patch_uses([row])[0].problem


def test_the_page_shows_the_tables():
    page = importlib.import_module("patches")
    assert page.PAGE.read_text(encoding="utf-8") == page.page(), "run python scripts/patches.py"


# --- nothing is replaced that is not in a table ---------------------------------------------------

REPLACING = {row.by.partition(":")[0] for row in ROWS}


def replacements(path):
    """Lines of a file that set `__class__`, or an attribute of an object that is not `self`'s own,
    to a function or class of ours."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    functions = {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Attribute):
                    is_ours = isinstance(node.value, ast.Name) and node.value.id in functions
                    is_method = (
                        isinstance(node.value, ast.Attribute) and node.value.attr in functions
                    )
                    own = isinstance(target.value, ast.Name) and target.value.id == "self"
                    if target.attr == "__class__" or ((is_ours or is_method) and not own):
                        yield f"{path.name}:{node.lineno}"


@pytest.mark.parametrize("package", ["cfg_core", "deployments"])
def test_every_replacement_is_a_row(package):
    for path in (ROOT / package).rglob("*.py"):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        if module not in REPLACING:
            assert [*replacements(path)] == [], f"a replacement in {module} that no row names"


# --- an unguided vLLM -----------------------------------------------------------------------------

UNTOUCHED = """
import importlib, inspect, sys
sys.argv = {argv!r}
from cfg_core.patches import applied
from cfg_core.vllm_plugin.patches import PATCHES
rows = [p for p in PATCHES if not p.per_object and p.process == "frontend"]
before = [inspect.getattr_static(p.owner, p.attribute, None) for p in rows]
from vllm.plugins import load_general_plugins
load_general_plugins()
after = [inspect.getattr_static(p.owner, p.attribute, None) for p in rows]
print(len(rows), sum(a is not b for a, b in zip(after, before)), len(applied()))
"""


@pytest.mark.parametrize(
    ("argv", "touched"),
    [
        (["vllm", "serve", "model"], False),
        (["vllm", "serve", "model", f"--scheduler-cls={SCHEDULER}"], True),
    ],
)
def test_the_plugin_patches_a_process_only_if_its_engine_is_guided(argv, touched):
    """The plugin is installed in this environment, so every vLLM here loads it."""
    program = UNTOUCHED.format(argv=argv)
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    rows, replaced, applied = map(int, run.stdout.split()[-3:])
    assert rows == 7
    assert (replaced, applied) == ((rows, rows) if touched else (0, 0))


def test_the_scheduler_may_be_named_in_a_file(tmp_path):
    file = tmp_path / "serve.yaml"
    file.write_text(f"model: m\nscheduler-cls: {SCHEDULER}\n")
    assert asks_for_guidance(["vllm", "serve", "--config", str(file)])
    assert asks_for_guidance(["vllm", "serve", f"--config={file}"])
    file.write_text("model: m\n")
    assert not asks_for_guidance(["vllm", "serve", "--config", str(file)])
    assert not asks_for_guidance(["vllm", "serve", "--config"])
