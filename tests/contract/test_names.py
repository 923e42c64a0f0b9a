"""Every name of another package that our source uses exists.

Methods that we override have the expected signature. If a module was moved, a test fails here: none
is skipped. tests/contract/names.py says what is checked.
"""

import importlib
import sys
from pathlib import Path

import pytest
from names import mismatch, problems

ROOT = Path(__file__).parents[2]
FILES = [path for package in ("cfg_core", "deployments") for path in (ROOT / package).rglob("*.py")]


def dotted(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@pytest.mark.parametrize("path", FILES, ids=dotted)
def test_all_foreign_names_exist(path):
    assert problems(path, dotted(path)) == []


# --- planted changes of another package -----------------------------------------------------------

FOREIGN = """
class Pool:
    def __init__(self) -> None:
        self.num_free = 3

class Scheduler:
    def __init__(self) -> None:
        self.pool = Pool()
        self.running: list[str] = []

    def schedule(self, throttle: bool = False) -> int:
        return len(self.running)
"""

OURS = """
from foreign.sched import Scheduler
from typing_extensions import override

class Guided(Scheduler):
    @override
    def schedule(self, throttle: bool = False) -> int:
        return len(self.running) + super().schedule(throttle)

def free(scheduler: Scheduler) -> int:
    pool = scheduler.pool
    return pool.num_free + len(scheduler.running)
"""

PLANTED = {
    "nothing": ("", "", None),
    "a removed attribute of self": ("self.running: ", "self.active: ", "self.running"),
    "a removed attribute": ("self.num_free = ", "self.num_left = ", "Pool has no num_free"),
    "a removed class": ("class Scheduler", "class Planner", "has no Scheduler"),
    "a removed method": ("def schedule", "def plan", "overrides nothing"),
    "a new parameter": ("throttle: bool = False", "throttle: bool = False, now: int = 0", "now"),
    "a renamed parameter": ("throttle: bool", "limit: bool", "a parameter limit"),
}


@pytest.fixture
def plant(tmp_path, monkeypatch):
    """Make a package `foreign`, and a module `ours` that uses it. Returns the problems found."""

    def make(foreign, ours=OURS, module="sched"):
        for name in [name for name in sys.modules if name.partition(".")[0] in ("foreign", "ours")]:
            del sys.modules[name]
        (tmp_path / "foreign").mkdir(exist_ok=True)
        (tmp_path / "foreign/__init__.py").write_text("")
        (tmp_path / f"foreign/{module}.py").write_text(foreign)
        (tmp_path / "ours.py").write_text(ours)
        importlib.invalidate_caches()
        return tmp_path / "ours.py"

    monkeypatch.syspath_prepend(str(tmp_path))
    yield make
    for name in [name for name in sys.modules if name.partition(".")[0] in ("foreign", "ours")]:
        del sys.modules[name]


@pytest.mark.parametrize(("old", "new", "told"), PLANTED.values(), ids=PLANTED.keys())
def test_a_planted_change_is_caught(plant, old, new, told):
    path = plant(FOREIGN.replace(old, new) if old else FOREIGN)
    try:
        found = problems(path, "ours")
    except ImportError as error:  # our module cannot even be imported
        found = [str(error)]
    assert bool(found) == (told is not None)
    assert told is None or any(
        told in problem or "cannot import name" in problem for problem in found
    )


def test_a_moved_module_is_caught(plant):
    path = plant(FOREIGN, module="moved")
    with pytest.raises(ModuleNotFoundError, match=r"foreign\.sched"):
        problems(path, "ours")


def test_an_override_must_be_marked(plant):
    path = plant(FOREIGN, OURS.replace("    @override\n", ""))
    assert "mark it with @override" in problems(path, "ours")[0]


def test_overrides_with_variable_arguments_match():
    def ours(first, *args, **kwargs): ...
    def stock(first, second, *, third=None): ...

    assert mismatch(ours, stock) is None
    assert mismatch(stock, ours) == "the overridden method has no parameter second" or mismatch(
        stock, ours
    ).endswith("third")
