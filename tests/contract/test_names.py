"""Every name of another package that our source uses exists.

Methods that we override have the expected signature, and what we call takes our arguments. If a
module was moved, a test fails here: none is skipped. cfg_core/compat/reader.py says what is read.
"""

import importlib
import inspect
import sys
from contextlib import nullcontext

import pytest

from benchmarks.oracle import oracle_packages
from cfg_core.compat import classes
from cfg_core.compat.check import modules, problems
from cfg_core.compat.inventory import MISSING, describe
from cfg_core.compat.reader import read
from cfg_core.compat.uses import mismatch
from cfg_core.vllm_plugin import versions
from tests.contract.left_out import is_left_out

FILES = {name: path for package in ("cfg_core", "deployments") for name, path in modules(package)}


WITH_ORACLE = ("cfg_core.harness",)
"""Modules that use packages of `.venv/oracle`."""


@pytest.mark.parametrize("module", FILES)
def test_all_foreign_names_exist(module):
    if is_left_out(FILES[module]):
        return
    with oracle_packages() if module in WITH_ORACLE else nullcontext():
        assert problems(FILES[module], module) == []


def test_every_version_is_read_where_it_is_installed():
    """Of the modules in versions/, only those for other versions are left out."""
    left_out = {name for name, path in FILES.items() if versions.is_for_another(path)}
    all_versions = {cls.__module__ for cls in versions.NEWEST_FIRST}
    assert left_out == all_versions - {type(versions.chosen()).__module__}


# --- planted changes of another package -----------------------------------------------------------

FOREIGN = """
class Pool:
    def __init__(self) -> None:
        self.num_free = 3

class Scheduler:
    def __init__(self) -> None:
        self.pool = Pool()
        self.running: list[str] = []
        self.failed: set[str] = set()

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
    return pool.num_free + len(scheduler.running) + scheduler.schedule(throttle=True)

def fail(scheduler: Scheduler) -> None:
    scheduler.failed.add("a")
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
    monkeypatch.setattr(classes, "PACKAGES", ["foreign"])
    yield make
    for name in [name for name in sys.modules if name.partition(".")[0] in ("foreign", "ours")]:
        del sys.modules[name]


@pytest.mark.parametrize(("old", "new", "told"), PLANTED.values(), ids=PLANTED.keys())
def test_a_planted_change_is_caught(plant, old, new, told):
    found = problems(plant(FOREIGN.replace(old, new) if old else FOREIGN), "ours")
    assert bool(found) == (told is not None), found
    assert told is None or any(told in problem for problem in found), found


def test_a_moved_module_is_caught(plant):
    path = plant(FOREIGN, module="moved")
    assert "there is no module foreign.sched" in problems(path, "ours")[0]


def test_a_new_parameter_that_a_call_does_not_give_is_caught(plant):
    changed = FOREIGN.replace("throttle: bool = False", "now: int")
    ours = OURS.replace("throttle: bool = False", "now: int")
    found = problems(plant(changed, ours), "ours")
    assert any("missing a required argument: 'now'" in problem for problem in found)
    ours = ours.replace("throttle=True", "1").replace("schedule(throttle)", "schedule(now, 2)")
    (problem,) = problems(plant(changed, ours), "ours")
    assert "too many positional arguments" in problem
    assert problems(plant(changed, ours.replace("now, 2", "now")), "ours") == []


def test_a_new_abstract_method_is_caught(plant):
    """A class of ours could not be made any more. vLLM 0.33 did so to AsyncModelRunnerOutput."""
    base = "from abc import ABC, abstractmethod\n" + FOREIGN.replace(
        "class Scheduler:", "class Scheduler(ABC):"
    )
    assert problems(plant(base), "ours") == []
    new = "\n    @abstractmethod\n    def drain(self): ...\n"
    (problem,) = problems(plant(base + new), "ours")
    assert "Guided.drain" in problem
    assert "is abstract: implement it" in problem


@pytest.mark.parametrize(
    ("foreign", "told"),
    [
        ("def broken(:", "foreign.sched cannot be imported: SyntaxError"),
        ("import no_such_package\n" + FOREIGN, "No module named 'no_such_package'"),
        (
            "raise ValueError('no device')",
            "foreign.sched cannot be imported: ValueError: no device",
        ),
    ],
)
def test_a_module_that_cannot_be_imported_says_why(plant, foreign, told):
    found = problems(plant(foreign), "ours")
    assert any(told in problem for problem in found)


def test_our_module_fails_at_its_import(plant):
    ours = OURS + "\nSTATES = Scheduler.STATES + 1\n"
    (problem,) = problems(plant(FOREIGN + "\n    STATES = 'a'\n", ours), "ours")
    assert "ours: cannot be imported: TypeError" in problem


# --- kinds of names, and of changes ---------------------------------------------------------------

KINDS = """
import enum

LIMIT = 3

class State(enum.Enum):
    RUNNING = 1
    DONE = 2

class Runner:
    def __init__(self, size: int) -> None:
        self.state = State.RUNNING

    @classmethod
    def make(cls) -> "Runner":
        return cls(1)

    @property
    def busy(self) -> bool:
        return True

    def run(self, steps: int = 1, *, fast: bool = False) -> None: ...

    async def wait(self) -> None: ...

def step(runner: Runner) -> None: ...
"""

USES = """
import foreign.kinds as kinds
import foreign.kinds
from foreign import kinds as same
from foreign.kinds import Runner, State
from typing_extensions import override

class Guided(Runner):
    def __init__(self) -> None:
        super().__init__(2)

    @property
    @override
    def busy(self) -> bool:
        return False

    @override
    def run(self, steps: int = 1, **options: bool) -> None: ...

    @override
    async def wait(self) -> None: ...

def use(runner: Runner) -> None:
    runner.state = State.DONE
    same.step(Runner.make())
    made = Runner(1)
    made.run(kinds.LIMIT)
    foreign.kinds.step(made)
"""

CHANGED_KINDS = {
    "nothing": ("", "", None),
    "a member of an Enum": ("DONE", "ENDED", "State has no DONE"),
    "a class method": ("def make", "def build", "Runner has no make"),
    "a constant of a module": ("LIMIT", "BOUND", "foreign.kinds has no LIMIT"),
    "a function of a module": ("def step", "def advance", "foreign.kinds has no step"),
    "arguments of a module's function": ("step(runner: Runner)", "step()", "too many positional"),
    "arguments of an object made here": (
        "run(self, steps: int = 1, ",
        "run(self, ",
        "too many positional",
    ),
    "an attribute that we set": ("self.state", "self.status", "Runner has no state"),
    "a property that we override": ("def busy", "def is_busy", "overrides nothing"),
    "a property is a method now": (
        "@property\n    def busy",
        "def busy",
        "is a property, and the overridden one a method",
    ),
    "a method is a property now": (
        "def run(self, steps: int = 1, *, fast: bool = False)",
        "@property\n    def run(self)",
        "is a method, and the overridden one a property",
    ),
    "a keyword that **options takes": ("fast: bool", "slow: bool = True, fast: bool", None),
    "a parameter that may be left out": ("size: int", "size: int, seed: int", "'seed'"),
    "a coroutine is a generator now": (
        "async def wait(self) -> None: ...",
        "async def wait(self):\n        yield 1",
        "is an asynchronous generator",
    ),
}


@pytest.mark.parametrize(("old", "new", "told"), CHANGED_KINDS.values(), ids=CHANGED_KINDS.keys())
def test_a_change_of_each_kind_of_name_is_caught(plant, old, new, told):
    found = problems(plant(KINDS.replace(old, new) if old else KINDS, USES, "kinds"), "ours")
    assert bool(found) == (told is not None), found
    assert told is None or any(told in problem for problem in found), found


# --- descriptions, which scripts/versions/drift.py compares ---------------------------------------

CHANGES = {
    "nothing": ("", "", None),
    "a comment": ("return len(self.running)", "return len(self.running)  # new", None),
    "a docstring": ("        return len", "        'New.'\n        return len", None),
    "a set turned dict": (
        "self.failed: set[str] = set()",
        "self.failed: dict[str, str] = {}",
        ("foreign.sched:Scheduler.failed", "attribute: set[str]", "attribute: dict[str, str]"),
    ),
    "another class": (
        "self.pool = Pool()",
        "self.pool = list()",
        ("foreign.sched:Scheduler.pool", "attribute: Pool(...)", "attribute: list(...)"),
    ),
    "a new parameter with a default": (
        "throttle: bool = False",
        "throttle: bool = False, now: int = 0",
        (
            "foreign.sched:Scheduler.schedule",
            "def (self, throttle=...)",
            "def (self, throttle=..., now=...)",
        ),
    ),
    "a coroutine": (
        "def schedule",
        "async def schedule",
        (
            "foreign.sched:Scheduler.schedule",
            "def (self, throttle=...)",
            "async def (self, throttle=...)",
        ),
    ),
    "a static method": (
        "    def schedule(self, throttle",
        "    @staticmethod\n    def schedule(throttle",
        (
            "foreign.sched:Scheduler.schedule",
            "def (self, throttle=...)",
            "static method: def (throttle=...)",
        ),
    ),
}


@pytest.mark.parametrize(("old", "new", "change"), CHANGES.values(), ids=CHANGES.keys())
def test_what_a_used_name_is_can_be_compared(plant, old, new, change):
    targets = {use.target for use in read(plant(FOREIGN), "ours")}
    before = {target: describe(target) for target in targets}
    assert MISSING not in before.values()
    plant(FOREIGN.replace(old, new) if old else FOREIGN)
    changed = [
        (target, before[target].shape, describe(target).shape)
        for target in targets
        if before[target] != describe(target)
    ]
    assert changed == ([] if change is None else [change])


def test_another_body_is_another_description(plant):
    before = (plant(FOREIGN), describe("foreign.sched:Scheduler.schedule"))[1]
    plant(FOREIGN.replace("return len(self.running)", "return 0"))
    after = describe("foreign.sched:Scheduler.schedule")
    assert before.shape == after.shape
    assert before.body != after.body


def test_an_override_must_be_marked(plant):
    path = plant(FOREIGN, OURS.replace("    @override\n", ""))
    assert "mark it with @override" in problems(path, "ours")[0]


def test_overrides_with_variable_arguments_match():
    def ours(first, *args, **kwargs): ...
    def stock(first, second, *, third=None): ...

    ours, stock = inspect.signature(ours), inspect.signature(stock)
    assert mismatch(ours, stock) is None
    assert mismatch(stock, ours) == "the overridden method has no parameter second"
