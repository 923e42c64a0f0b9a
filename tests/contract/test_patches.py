"""The tables of changes: each row is correct, and every replacement has a row."""

import dataclasses
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from benchmarks.oracle import oracle_packages
from cfg_core.compat.check import modules, row_uses
from cfg_core.patching import Patch, load
from cfg_core.vllm_plugin import SCHEDULER, asks_for_guidance, vllm_patches
from tests.contract.left_out import is_left_out
from tests.contract.replacements import COMPUTED, ROWS, replaced

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.target}-{row.by.rpartition(':')[2]}")
def test_everything_that_a_row_names_exists(row):
    """And a patch can be called as its original."""
    assert [use.problem for use in row_uses([row])] == [None]
    assert load(row.by) is not None
    if isinstance(row, Patch) and row.fault:
        assert callable(load(row.fault))
    assert (ROOT / row.test).is_file()
    assert row.reason.endswith(".")


SCHEDULING = "vllm.v1.core.sched.scheduler"


@pytest.mark.parametrize(
    ("target", "adds", "problem"),
    [
        ("vllm.no_such_module:x", False, "does not exist"),
        (f"{SCHEDULING}:NoSuchClass.schedule", False, "does not exist"),
        (f"{SCHEDULING}:Scheduler.no_such_method", False, "does not exist"),
        (f"{SCHEDULING}:Scheduler.schedule", False, "has no parameter"),
        (f"{SCHEDULING}:Scheduler.schedule", True, "exists, and ours would replace it"),
    ],
)
def test_a_row_that_does_not_fit_is_found(target, adds, problem):
    row = dataclasses.replace(vllm_patches.PATCHES[0], target=target, adds=adds)
    assert problem in row_uses([row])[0].problem


# --- nothing is replaced that is not in a table ---------------------------------------------------

COMPUTE_NAMES = {
    "cfg_core.patching",  # `apply`
    "cfg_core.vllm_plugin.frontend.grammar_sandbox",  # fields of StructuredOutputsParams
    "cfg_core.vllm_plugin.grammar_helper.trial",  # the same
    "deployments.generator.engine.trace_spans",  # fields of our own objects
}
"""The modules without rows that may give computed names to setattr, and what they set."""


@pytest.mark.parametrize("package", ["cfg_core", "deployments"])
def test_every_replacement_is_a_row(package):
    rows = {(row.by.partition(":")[0], row.attribute) for row in ROWS}
    may_compute = COMPUTE_NAMES | {module for module, _ in rows}
    for module, path in modules(package):
        if is_left_out(path):
            continue
        with oracle_packages() if module == "cfg_core.harness" else nullcontext():
            found = replaced(path, module)
        for attribute in found:
            known = module in may_compute if attribute == COMPUTED else (module, attribute) in rows
            assert known, f"{module} replaces {attribute}, and no row names it"


SAMPLE = """
import vllm.envs as envs
import vllm.v1.engine.core
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.request import Request

NAME = "allocate_slots"

class Ours(Request):
    def hook(self): ...
    def set(self):
        self.hook = self.hook

def take(manager: KVCacheManager, request: Request, other, values):
    def allocate(*args): ...
    {line}
"""


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("KVCacheManager.num_kv_cache_groups = 3", "num_kv_cache_groups"),
        ("envs.VLLM_USE_V1 = values", "VLLM_USE_V1"),
        ("vllm.v1.engine.core.EngineCore = values", "EngineCore"),
        ("manager.allocate_slots = values", "allocate_slots"),
        ("stock, manager.allocate_slots = manager.allocate_slots, values", "allocate_slots"),
        ("other.step = allocate", "step"),
        ("other.step = other.first = allocate", "first"),
        ("other.step = request.hook", "step"),
        ("other.step = lambda: 3", "step"),
        ("other.step: object = Ours", "step"),
        ("request.__class__ = values", "__class__"),
        ("setattr(manager, NAME, allocate)", "allocate_slots"),
        ("setattr(other, 'step', allocate)", "step"),
        ("setattr(other, values[0], values)", COMPUTED),
        ("request.spec_token_ids = []", None),
        ("request.priority += 1", None),
        ("other.step = values", None),
        ("setattr(other, '_cfg', values)", None),
    ],
)
def test_a_planted_replacement_is_found(line, found, tmp_path, monkeypatch):
    (tmp_path / "planted.py").write_text(SAMPLE.format(line=line))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "planted", raising=False)
    attributes = replaced(tmp_path / "planted.py", "planted")
    monkeypatch.delitem(sys.modules, "planted")
    assert attributes >= {found} if found else attributes == set()


# --- an unguided vLLM -----------------------------------------------------------------------------

UNTOUCHED = """
import inspect, sys
sys.argv = {argv!r}
from cfg_core.patching import applied
from cfg_core.vllm_plugin.vllm_patches import PATCHES
rows = [p for p in PATCHES if p.process == "frontend"]
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
def test_the_plugin_patches_a_process_only_if_its_engine_is_guided(warm_process, argv, touched):
    """The plugin is installed in this environment, so every vLLM here loads it."""
    printed = warm_process.run(UNTOUCHED.format(argv=argv))
    rows, replaced, applied = map(int, printed.split()[-3:])
    assert rows == 8
    assert (replaced, applied) == ((rows, rows) if touched else (0, 0))


def test_the_scheduler_may_be_named_in_a_file(tmp_path):
    file = tmp_path / "serve.yaml"
    file.write_text(f"model: m\nscheduler-cls: {SCHEDULER}\n")
    assert asks_for_guidance(["vllm", "serve", "--config", str(file)])
    assert asks_for_guidance(["vllm", "serve", f"--config={file}"])
    file.write_text("model: m\n")
    assert not asks_for_guidance(["vllm", "serve", "--config", str(file)])
    assert not asks_for_guidance(["vllm", "serve", "--config"])
