"""A pytest plugin: vLLM's own tests run with our scheduler, and each outcome is written to a file.

scripts/versions/upstream_tests.py runs it. It adds two options:

--scheduler=stock   The tests get vLLM's schedulers.
--scheduler=ours    They get GuidedScheduler and GuidedAsyncScheduler.
--scheduler=planned They get ours, and each step is planned (`lockstep.plan`).
--results=FILE      Write the outcome of each test to FILE, as JSON.

vLLM is imported when pytest is configured, and not when this module is imported.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import logging
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

STOCK, OURS, PLANNED = "stock", "ours", "planned"
RANKS = ("passed", "skipped", "failed")  # of a test's phases, the worst counts


@dataclasses.dataclass
class Result:
    """What became of one test."""

    outcome: str = "passed"
    reason: str = ""
    """Why it failed or was skipped."""
    schedulers: list[str] = dataclasses.field(default_factory=list)
    """The class of each scheduler that the test made, or tried to make."""


@dataclasses.dataclass
class Results:
    """What became of all tests, and the vLLM that they ran with."""

    version: str = ""
    tests: dict[str, Result] = dataclasses.field(default_factory=dict)
    uncollected: dict[str, str] = dataclasses.field(default_factory=dict)
    """Why a file could not be collected."""

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(dataclasses.asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Results:
        found = json.loads(path.read_text(encoding="utf-8"))
        tests = {test: Result(**fields) for test, fields in found.pop("tests").items()}
        return cls(tests=tests, **found)


# ---- which scheduler -----------------------------------------------------------------------------


class Witness:
    """Notes which schedulers are made."""

    def __init__(self) -> None:
        self.schedulers: list[str] = []

    def watch_schedulers(self) -> None:
        from vllm.v1.core.sched.scheduler import Scheduler

        init = Scheduler.__init__

        def noted(scheduler: Any, *args: Any, **kwargs: Any) -> None:
            self.schedulers.append(type(scheduler).__name__)
            init(scheduler, *args, **kwargs)

        Scheduler.__init__ = noted


def use_ours() -> None:
    """Put our schedulers where vLLM and its tests import vLLM's from.

    vLLM's own subclasses (for diffusion models) are imported first, so they keep their base class.
    """
    from vllm.v1.core import sched

    for module in pkgutil.iter_modules(sched.__path__, f"{sched.__name__}."):
        importlib.import_module(module.name)
    from vllm.v1.core.sched import async_scheduler, scheduler

    from cfg_core.vllm_plugin.core.scheduler import GuidedAsyncScheduler, GuidedScheduler

    scheduler.Scheduler = GuidedScheduler
    async_scheduler.AsyncScheduler = GuidedAsyncScheduler
    let_constructor_be_left_out(GuidedScheduler)


def let_constructor_be_left_out(ours: Any) -> None:
    """Give a scheduler that a test makes without `__init__` the state that it has without groups.

    Such a test sets vLLM's attributes itself (`object.__new__(Scheduler)`), but it knows none of
    ours. Each scheduler with an `__init__` has its own attributes, which come before these.
    """
    from cfg_core.policy.groups import GroupTable
    from cfg_core.vllm_plugin.core.timelines import Timelines
    from cfg_core.vllm_plugin.pace import Pace

    ours._groups, ours._pace, ours._refused = GroupTable(), Pace(None), {}
    ours._timelines = Timelines(ours._groups, {}, 0)


def plan_each_step() -> None:
    """Make our scheduler do what it does beside groups, also if it has none."""
    from cfg_core.policy.groups import GroupTable

    GroupTable.__bool__ = lambda groups: True  # type: ignore[attr-defined]


# ---- pytest --------------------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("upstream")
    group.addoption("--scheduler", choices=(STOCK, OURS, PLANNED), default=STOCK)
    group.addoption("--results", type=Path, default=None)


def pytest_configure(config: pytest.Config) -> None:
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        raise pytest.UsageError(f"The platform is {current_platform.device_name}: it must be cpu.")
    scheduler = config.getoption("--scheduler")
    witness = Witness()
    witness.watch_schedulers()
    if scheduler != STOCK:
        use_ours()
    if scheduler == PLANNED:
        plan_each_step()
    config.pluginmanager.register(Notes(witness))
    path = config.getoption("--results")
    if path is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(path))


class Notes:
    """Attaches what the witness saw to each test's reports, in the process that runs the test."""

    def __init__(self, witness: Witness) -> None:
        self._witness = witness

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> None:
        for name, noted in vars(self._witness).items():
            item.user_properties += [(name, each) for each in noted]
            noted.clear()


class Recorder:
    """Collects the reports of all tests, and writes them to a file."""

    def __init__(self, path: Path) -> None:
        import vllm

        self._path, self._results = path, Results(vllm.__version__)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.outcome != "passed":
            self._results.uncollected[report.nodeid] = reason_of(report)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        result = self._results.tests.setdefault(report.nodeid, Result())
        if RANKS.index(report.outcome) > RANKS.index(result.outcome):
            result.outcome, result.reason = report.outcome, reason_of(report)
        noted = report.user_properties  # of this phase and those before
        result.schedulers = [str(value) for name, value in noted if name == "schedulers"]

    def pytest_sessionfinish(self) -> None:
        self._results.write(self._path)


def reason_of(report: pytest.CollectReport | pytest.TestReport) -> str:
    """Some lines of why a test failed or was skipped, or why its file could not be collected."""
    why: Any = report.longrepr
    if isinstance(why, tuple):  # skipped: file, line, reason
        return str(why[2])
    crash = getattr(why, "reprcrash", None)
    lines = str(why if crash is None else crash.message).strip().splitlines()
    return " ".join(line.strip() for line in (lines[-1:] if crash is None else lines[:3]))


@pytest.fixture
def caplog_vllm(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> Iterator[pytest.LogCaptureFixture]:
    """The fixture of this name in vLLM's conftest.py, which is not loaded."""
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    with caplog.at_level(logging.INFO):
        yield caplog
