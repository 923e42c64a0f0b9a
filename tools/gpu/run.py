"""One command for the day a GPU machine is at hand.

    python -m tools.gpu.run list                what would run, in which order, with which limits
    python -m tools.gpu.run pack                fetch what a bare machine lacks, cut for transfers
    python -m tools.gpu.run install FOLDER      on that machine: unpack the parts in FOLDER
    python -m tools.gpu.run run                 run what has no figures yet
        [--only NAME ...]    these, also if they have figures
        [--budget-s 560]     seconds for all of them
        [--rehearse]         on a CPU, with tiny sizes
        [--bundle FOLDER]    copy all figures there, as one archive and one table
    python -m tools.gpu.run summary             the table of all figures

docs/gpu.md says how to use it.
"""

from __future__ import annotations

import argparse
import os
import sys
import tarfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from . import gpu_pack, needs
from .slice_runner import ROOT, Runner, table
from .slices import SLICES, Slice

BUDGET_S = 560
"""What one command on a lent machine may take, less its own start and end."""


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    if args.command == "pack":
        return gpu_pack.pack(args.vllm, args.into, args.room_mib)
    if args.command == "install":
        return gpu_pack.install(args.parts)
    out = args.out or ROOT / ".gpu" / ("rehearsal" if args.rehearse else "figures")
    beside = gpu_pack.sites()
    runner = Runner(
        out,
        partial(needs.missing, rehearse=args.rehearse, beside=beside),
        partial(environment, beside=beside),
        args.rehearse,
    )
    if args.command == "list":
        print(listed(runner))
        return 0
    if args.command == "run":
        chosen = [one for one in SLICES if not args.only or one.name in args.only]
        for made in runner.run(chosen, args.budget_s, again=bool(args.only)):
            print(f"{made.name}: {made.status}, {made.seconds:.0f} s. {made.why}", flush=True)
    summary = table([runner.result(one) for one in SLICES], SLICES)
    print(summary)
    if args.bundle:
        bundle(out, args.bundle, summary)
    return 0


def environment(one: Slice, beside: dict[str, Path]) -> dict[str, str]:
    """Variables of a slice's process: this repository, then the slice's vLLM, come first."""
    site = beside.get(one.beside or gpu_pack.USUAL)
    found = os.environ if site is None else gpu_pack.environment(site)
    places = [str(ROOT), found.get("PYTHONPATH", "")]
    return found | {
        "PYTHONPATH": os.pathsep.join(filter(None, places)),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "RAY_AUTH_MODE": "disabled",
        "VLLM_NO_USAGE_STATS": "1",
    }


def listed(runner: Runner) -> str:
    rows = ["| slice | limit, s | needs | state | what |", "|---|---|---|---|---|"]
    for one in SLICES:
        found = runner.result(one)
        state = "to run" if found is None else found.status
        rows.append(
            f"| {one.name} | {one.limit_s} | {', '.join(one.needs)} | {state} | {one.what} |"
        )
    return "\n".join(rows)


def bundle(out: Path, folder: Path, summary: str) -> None:
    """Copy all figures to a folder, as two files."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "summary.txt").write_text(summary + "\n", "utf-8")
    with tarfile.open(folder / "figures.tar.gz", "w:gz") as archive:
        archive.add(out, arcname=out.name)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.set_defaults(out=None, rehearse=False, bundle=None)
    commands = parser.add_subparsers(dest="command", required=True)
    pack = commands.add_parser("pack")
    pack.add_argument("--vllm", choices=gpu_pack.VERSIONS, default=gpu_pack.VERSIONS[0])
    pack.add_argument("--into", type=Path, default=ROOT / ".gpu")
    pack.add_argument("--room-mib", type=int, default=64, help="of one transfer, with this tree")
    install = commands.add_parser("install")
    install.add_argument("parts", type=Path)
    for name in ("list", "run", "summary"):
        command = commands.add_parser(name)
        command.add_argument("--out", type=Path, help="folder of the figures")
        command.add_argument("--rehearse", action="store_true", help="on a CPU, with tiny sizes")
        command.add_argument("--bundle", type=Path, help="folder for a copy of all figures")
        if name == "run":
            names = [one.name for one in SLICES]
            command.add_argument("--only", nargs="+", choices=names, metavar="NAME")
            command.add_argument("--budget-s", type=float, default=BUDGET_S)
    return parser


if __name__ == "__main__":
    sys.exit(main())
