"""Compare a published vLLM with the pinned one: what changed of what we use, and which tests pass.

    make drift VERSION=0.33.0          or: python scripts/versions/drift.py 0.33.0
    python scripts/versions/drift.py FOLDER     a folder that holds a package `vllm`
    python scripts/versions/drift.py 0.33.0 --tests tests/contract tests/engine
    python scripts/versions/drift.py 0.33.0 --tests               names and signatures only

It installs that vLLM beside the pinned one (beside.py), reads from our source which names of vLLM,
Ray and transformers we use (cfg_core/compat), describes each of them in both versions, runs tests
in the new one, and prints the differences by module of ours as Markdown. The exit status is 1 if a
name is missing, a signature does not fit, or a test fails. docs/versions.md says what to do with
the result.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import beside

ROOT = beside.ROOT
TESTS = ("tests/contract", "tests/unit", "tests/simulation")
LIMIT_S = 3600
_FAILED = re.compile(r"^(?:FAILED|ERROR) .*", re.MULTILINE)
_SUMMARY = re.compile(
    r"^(?:\d+ \w+|no tests ran).* in [\d.]+s.*", re.MULTILINE
)  # pytest's last line


# ---- names ---------------------------------------------------------------------------------------


def names_in_both(env: dict[str, str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What foreign_names.py finds with the pinned vLLM, and in the environment `env`."""
    with tempfile.TemporaryDirectory(prefix="cfg-serve-names-") as folder:
        old, new = Path(folder) / "old.json", Path(folder) / "new.json"
        return names(dict(os.environ), old), names(env, new, old)


def names(env: dict[str, str], *files: Path) -> dict[str, Any]:
    """The output of foreign_names.py in `env`. files: its arguments.

    Raises BesideError if the script fails.
    """
    command = [sys.executable, str(Path(__file__).with_name("foreign_names.py")), *map(str, files)]
    env = env | {"VLLM_LOGGING_LEVEL": "ERROR", "RAY_AUTH_MODE": "disabled"}
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise beside.BesideError(f"The names could not be read:\n{done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(files[0].read_text(encoding="utf-8"))
    return found


def problems(new: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Uses that the new version does not allow: module of ours, what is used, why."""
    for module, uses in new["uses"].items():
        for target, problem in {(use["target"], use["problem"]) for use in uses}:
            if problem:
                yield module, target, problem


def changes(old: dict[str, Any], new: dict[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    """Used names that are something else now: module of ours, what is used, before, after."""
    for module, target in _used(old):
        before, after = old["what"][target], new["what"][target]
        if before["shape"] != after["shape"]:
            yield module, target, before["shape"], after["shape"]


def bodies(old: dict[str, Any], new: dict[str, Any]) -> Iterator[tuple[str, str, bool]]:
    """Used functions with other statements: module of ours, function, whether we replace it."""
    replaced = {(m, u["target"]) for m, us in old["uses"].items() for u in us if u["overrides"]}
    for module, target in _used(old):
        before, after = old["what"][target], new["what"][target]
        if before["body"] != after["body"] and before["shape"] == after["shape"]:
            yield module, target, (module, target) in replaced


def _used(found: dict[str, Any]) -> list[tuple[str, str]]:
    return sorted({(m, use["target"]) for m, uses in found["uses"].items() for use in uses})


def report(old: dict[str, Any], new: dict[str, Any]) -> str:
    """The differences as Markdown tables, by module of ours."""
    a, b = old["vllm"], new["vllm"]
    used = {target for _, target in _used(old)}
    lines = [f"# vLLM {a} -> {b}: {len(used)} names in use\n"]
    wrong = sorted(problems(new))
    lines += _table(f"Does not fit {b} ({len(wrong)})", ("our module", "uses", "problem"), wrong)
    known = {(module, target) for module, target, _ in wrong}
    moved = [row for row in changes(old, new) if row[:2] not in known]
    lines += _table(f"Is something else ({len(moved)})", ("our module", "uses", a, b), moved)
    read = [row[:2] for row in bodies(old, new) if row[2]]
    lines += _table(
        f"Was rewritten, and we override or replace it: read it ({len(read)})",
        ("our module", "what"),
        read,
    )
    others = sorted({row[1] for row in bodies(old, new) if not row[2]})
    lines += [f"\n{len(others)} other functions that we use were rewritten: {', '.join(others)}"]
    return "\n".join(lines)


def _table(title: str, head: tuple[str, ...], rows: list[Any]) -> list[str]:
    if not rows:
        return [f"\n## {title}"]
    lines = [f"\n## {title}", f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    return [*lines, *(f"| {' | '.join(_cell(text) for text in row)} |" for row in rows)]


def _cell(text: str) -> str:
    return f"`{text.replace('|', chr(92) + '|')}`"


# ---- tests ---------------------------------------------------------------------------------------


def run_tests(env: dict[str, str], folder: str) -> tuple[bool, str]:
    """Whether the tests in `folder` pass, and a Markdown section that says which did not."""
    start = time.monotonic()
    command = [sys.executable, "-m", "pytest", "-n", "2", "--no-loadscope-reorder", folder]
    done = subprocess.run(
        command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S
    )
    summary = _SUMMARY.findall(done.stdout)
    failed = _FAILED.findall(done.stdout)
    if not summary:  # pytest did not come to its end
        failed.append(done.stdout[-2000:] + done.stderr[-2000:])
    told = summary[-1] if summary else f"pytest ended with exit status {done.returncode}"
    lines = [f"\n## {folder}: {told} ({time.monotonic() - start:.0f} s)"]
    return done.returncode == 0, "\n".join([*lines, *(f"- {line}" for line in failed)])


# ---- the command ---------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("version", help="a published version, or a folder with a package `vllm`")
    parser.add_argument("--tests", nargs="*", default=TESTS, help="folders of tests to run")
    given = parser.parse_args()
    try:
        return compare(given.version, given.tests)
    except (beside.BesideError, subprocess.TimeoutExpired) as error:
        print(f"drift: {error}", file=sys.stderr)
        return 1


def compare(version: str, tests: list[str]) -> int:
    folder = Path(version)
    if not (folder / "vllm" / "__init__.py").is_file():
        if folder.is_dir():
            raise beside.BesideError(f"The folder {version} holds no package vllm.")
        with timed("install it beside"):
            folder = beside.install(version)
    env = beside.environment(folder.resolve())
    with timed("read the names"):
        old, new = names_in_both(env)
    print(report(old, new), flush=True)
    good = not any(problems(new))
    for each in tests:
        passed, section = run_tests(env, each)
        print(section, flush=True)
        good = good and passed
    return 0 if good else 1


class timed:
    """A step, with the seconds that it took on stderr."""

    def __init__(self, what: str) -> None:
        self._what, self._start = what, time.monotonic()

    def __enter__(self) -> None:
        print(f"drift: {self._what}", file=sys.stderr, flush=True)

    def __exit__(self, *_: object) -> None:
        print(f"drift: {time.monotonic() - self._start:.0f} s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
