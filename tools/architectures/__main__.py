"""Check all architectures, or those that are named, each in a process of its own.

    python -m tools.architectures [--all] [--limit SECONDS] [--results FILE] [NAME ...]

Results are appended to FILE, one JSON object a line. A row that has a result is left out, unless it
is named or `--all` is given. At the end, the last line of each row is kept.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.architectures import results
from tools.architectures.results import Result

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 300
LONGEST_ERROR = 400


def prepare() -> None:
    """Set the environment of engines, and import what all children need, once.

    So what is edited while this runs changes no row.
    """
    from tests.engine.engines import ENVIRONMENT

    os.environ |= {**ENVIRONMENT, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    import torch

    from tools.architectures import checks, loader, stock_oracle, table  # noqa: F401

    torch.set_num_threads(1)


def run(row: Any, limit: float) -> Result:
    """The result of a row, from a child process that may die or hang."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        child = os.fork()
        if child == 0:
            work(row, folder)
        status = wait(child, limit)
        result = read_report(folder, status)
    return {"row": row.label, **result, "seconds": round(time.monotonic() - started)}


def work(row: Any, folder: Path) -> None:
    """The child process. It never returns."""
    os.setpgid(0, 0)
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT)
    if not os.environ.get("CFG_SERVE_SHOW"):
        os.dup2(log, 1)
        os.dup2(log, 2)
    model = folder / "model"
    model.mkdir()
    stage = folder / "stage"
    stage.write_text("start")
    try:
        from tests.engine.tiny_vision import use_stand_in
        from tools.architectures.checks import measure

        use_stand_in()
        report = measure(row, model, lambda what: (stage.write_text(what), None)[1])
        outcome = "unequal" if report["problems"] else "equal"
        result = {"outcome": outcome, **report}
    except BaseException as error:
        traceback.print_exc()
        result = {"outcome": "failed", "stage": stage.read_text(), "error": sentence(error)}
    (folder / "report.json").write_text(json.dumps(result), encoding="utf-8")
    os._exit(0)


def sentence(error: BaseException) -> str:
    """The error that was raised first, without paths of this machine."""
    while error.__cause__ is not None or (error.__context__ and not error.__suppress_context__):
        error = error.__cause__ or error.__context__  # type: ignore[assignment]
    text = " ".join(f"{type(error).__name__}: {error}".split())
    for path in (str(ROOT), tempfile.gettempdir(), sys.prefix):
        text = text.replace(path, "...")
    return re.sub(r"https?://\S+", "...", text)[:LONGEST_ERROR]


def wait(child: int, limit: float) -> int | None:
    """Wait for the child, and kill it after `limit` seconds. Its status, None if it was killed."""
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return status
        time.sleep(0.1)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def read_report(folder: Path, status: int | None) -> Result:
    path = folder / "report.json"
    if path.exists():
        result: Result = json.loads(path.read_text(encoding="utf-8"))
        if result["outcome"] == "failed" and (keep := os.environ.get("CFG_SERVE_LOGS")):
            Path(keep).write_text((folder / "log").read_text(errors="replace"))
        return result
    stage = (folder / "stage").read_text()
    how = "took too long" if status is None else f"died with status {status}"
    return {"outcome": "failed", "stage": stage, "error": f"the process {how}"}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--limit", type=float, default=LIMIT_S)
    parser.add_argument("--results", type=Path, default=results.RESULTS)
    given = parser.parse_args(arguments)
    prepare()
    import vllm

    from tools.architectures.table import ROWS

    known = results.load(given.results)
    for row in ROWS:
        if given.names and row.label not in given.names:
            continue
        if not given.names and not given.all and row.label in known:
            continue
        today = time.strftime("%Y-%m-%d", time.gmtime())
        result = {**run(row, given.limit), "vllm": vllm.__version__, "date": today}
        results.append(result, given.results)
        print(summary(result), flush=True)
    results.tidy([row.label for row in ROWS], given.results)


def summary(result: Result) -> str:
    more = result.get("error") or result.get("problems") or result.get("stock_differs") or ""
    return f"{result['seconds']:4d} s  {result['outcome']:8} {result['row']}  {more}"


if __name__ == "__main__":
    main()
