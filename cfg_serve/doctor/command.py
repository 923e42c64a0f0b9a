"""`cfg-serve doctor`: print what was found, as it is found."""

from __future__ import annotations

from rich.console import Console

from cfg_serve.doctor.checks import Finding, all_checks
from cfg_serve.doctor.engine import guided_token

MARKS = {"ok": ("ok   ", "green"), "note": ("note ", "yellow"), "wrong": ("WRONG", "red")}


def report(port: int, *, with_engine: bool) -> int:
    """Print every finding; returns 1 if anything is wrong."""
    console, found = Console(highlight=False, soft_wrap=True), []
    for check in all_checks(port):
        for finding in check():
            found.append(finding)
            _show(console, finding)
    if with_engine and not any(finding.subject == "vLLM" for finding in found):
        with console.status("starting a tiny engine"):
            found.append(guided_token())
        _show(console, found[-1])
    wrong = sum(finding.verdict == "wrong" for finding in found)
    console.print(f"{wrong} of {len(found)} are wrong." if wrong else "All is well.")
    return 1 if wrong else 0


def _show(console: Console, finding: Finding) -> None:
    mark, colour = MARKS[finding.verdict]
    console.print(mark, style=colour, end=" ")
    console.print(f"{finding.subject}: {finding.said}", markup=False)
    if finding.advice:
        console.print(f"      {finding.advice}", markup=False)
