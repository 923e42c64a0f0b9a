"""What every test runs under: no network, no telemetry, quiet logs; cheap folders first."""

from __future__ import annotations

import gc
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.support.quick_starts import quick_starts

ENVIRONMENT = {
    "RAY_AUTH_MODE": "disabled",  # else ray.init() writes a token file into the home directory
    "RAY_USAGE_STATS_ENABLED": "0",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # The models are too small for threads. Two engines that wait for each other's core in a loop
    # take several times as long, and more than vLLM waits for a start.
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
if not Path("/dev/nvidiactl").exists():
    # Else each process compiles C++ with its first log-probabilities, for many seconds.
    ENVIRONMENT["TORCHDYNAMO_DISABLE"] = "1"
# A server is ten processes, which would each compile what they import if none may keep it.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Not in a fixture, because torch, ray and vllm read these when they are imported.
for _name, _value in ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)
quick_starts()

# A busy machine is slow, not wrong: no time limit on single examples, none on making them.
settings.register_profile(
    "cfg-serve", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("cfg-serve")

SERVERS = ("encoders", "limited", "nodes", "speculative", "stories", "tensor_parallel", "waits")
"""Folders of tests/serve, each with a server of its own."""
WITHOUT_ENGINE = ("unit", "simulation", "contract")
FOLDERS = (
    *WITHOUT_ENGINE,
    *("encoders", "digits", "package", "engine", "serve", "chat", "docs", "examples"),
    *("real_size", "gpu"),
)
ONE_SERVER = ("tests/chat", "tests/real_size", *(f"tests/serve/{name}" for name in SERVERS))
ALONE = (
    *("engine/test_paths.py", "engine/test_ranks.py", "gpu/test_equality_gpu.py"),
    *("docs/test_programs.py", "examples/test_programs.py", "package/test_failed_starts.py"),
    "serve/ray_llm/test_ray_data.py",
)
MOST_FILES, SLOW_FILE_S = 50, 20
HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def chat_model() -> Path:
    """The folder of the model of configs/cfg.yaml."""
    folder = HERE.parent / "models" / "SmolLM2-135M-Instruct"
    assert folder.is_dir(), f"{folder} is missing: run `make setup`, which says why."
    return folder


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With several workers (`-n 2`), run the tests of one group in one worker: see `_group`."""
    from xdist.scheduler import LoadScopeScheduling

    scheduler = LoadScopeScheduling(config, log)
    scheduler._split_scope = _group
    return scheduler


def pytest_collection_finish() -> None:
    """Keep the garbage collector from visiting what is collected: it is alive until the end."""
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say which files took longest, with their set-ups: what to look at if CI gets slow."""
    seconds: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if hasattr(report, "duration"):
                seconds[report.nodeid.partition("::")[0]] += report.duration
    slow = [(file, took) for file, took in seconds.most_common(MOST_FILES) if took > SLOW_FILE_S]
    if slow:
        terminalreporter.section(f"files of {sum(seconds.values()):.0f} s")
    for file, took in slow:
        terminalreporter.write_line(f"{took:6.0f} s  {file}")


def _group(nodeid: str) -> str:
    """The group of a test: tests of a group share an engine or a server that should start once.

    It is a file, or a folder that has one server. Tests of ALONE start processes of their own, so
    each is a group.
    """
    file = nodeid.partition("::")[0]
    if file.endswith(ALONE):
        return nodeid
    folder = file.rpartition("/")[0]
    return folder if folder.startswith(ONE_SERVER) else file


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--survey", action="store_true", help="run the tests that are marked survey, and no others"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _refuse_addresses(items)
    _leave_out(config, items)
    longest_first = "PYTEST_XDIST_WORKER" in os.environ
    items.sort(key=lambda item: _order(_rank(item.path), longest_first))
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if on_gpu and not _has_gpu():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


def _refuse_addresses(items: list[pytest.Item]) -> None:
    """With several workers, all must collect the same names, so no name may hold an address."""
    for item in items:
        if " at 0x" in item.nodeid:
            raise pytest.UsageError(f"{item.nodeid}: give its parameters `ids` without addresses.")


def _leave_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests that are marked survey, or with `--survey` all others."""
    wanted = bool(config.getoption("--survey"))
    others = [item for item in items if (item.get_closest_marker("survey") is not None) != wanted]
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if item not in set(others)]


def _order(rank: int, longest_first: bool) -> int:
    """What needs no engine comes first: an engine changes the logging of its process.

    longest_first: with several workers, what takes longest follows, so that they end together.
    """
    return rank if rank < len(WITHOUT_ENGINE) or not longest_first else 2 * len(FOLDERS) - rank


def _rank(path: Path) -> int:
    """Place of a test's folder in FOLDERS; unknown folders come last."""
    folder = path.relative_to(HERE).parts[0]
    return FOLDERS.index(folder) if folder in FOLDERS else len(FOLDERS)


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
