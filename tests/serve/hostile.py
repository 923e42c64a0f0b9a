"""Attacks on a running server, with watchers beside them that know right answers: one command, one
table.

    python tests/serve/hostile.py                       all, on configs/cfg.yaml, started here
    python tests/serve/hostile.py --list                their names, and what each sends
    python tests/serve/hostile.py --only NAME ...       some of them
    python tests/serve/hostile.py --url URL             on a server that runs; none that need keys
    python tests/serve/hostile.py --only hundred-clients --seconds 300
    python tests/serve/hostile.py --fuzz 10000 [--seed N] [--shot NUMBER]

Attackers say that they are 10.6.6.6, watchers that they are 10.0.0.1 (`X-Forwarded-For`, which
Serve's proxy believes of this machine); where a server has keys each side has its own. Watchers are
a process of their own: guided and plain questions, an embedding, a grammar that is new each time,
and /ready twice a second, each on a new connection.

How to read the table. `came back`: what attackers were told. `right, wrong, 429` and `errors told`:
what watchers got, from the start of the attack until all was calm again. `longest extra wait`:
beyond the slowest request of its class without the attack; who still waits counts. `calm after`:
from the attack's end until each class of watchers was answered right. `memory`: of all the server's
processes, shared pages counted once, before, at the most, and after a rest; where more was left,
also after the same attack a second time. The verdict is `held` if watchers were all answered right,
none waited over 2 s longer, /ready took at most 1 s, nobody was told a 500 or what stands for one,
no process died, memory came back within 10 % (or grew by 5 % at most the second time), all KV
blocks were free again, and each request got what its attack demands. `python tests/serve/hostile.py
--list` says what that is.

Exit status: 0 if all held. A server of our own that did not come back is started again before the
next attack, and a line says so.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent.parent / "benchmarks")]

from attacks import bodies, connections, grammars, limits, protocol, streams  # noqa: E402, F401
from attacks.attempt import ATTACKS, Attack, Attempt, attempt_to  # noqa: E402
from attacks.fuzz import fuzz, send, shots  # noqa: E402
from attacks.stage import Stage  # noqa: E402
from attacks.verdict import HEADER, Row  # noqa: E402


def play(names: list[str], url: str | None, seconds: float) -> Iterator[Row]:
    """Play these, those without keys first, each kind on a server of its own, and say what came of
    each."""
    chosen = sorted((ATTACKS[name] for name in names), key=lambda attack: attack.keyed)
    for keyed, attacks in groupby(chosen, key=lambda attack: attack.keyed):
        if keyed and url:
            continue
        with Stage(url, keyed) as stage:
            for attack in attacks:
                yield stage.play(attack, seconds)


def fuzzing(count: int, seed: int) -> Attack:
    """The fuzz as an attack, with as much time as it may need."""

    async def fuzzed(attempt: Attempt) -> None:
        await fuzz(attempt, count, seed)

    fuzzed.__doc__ = f"{count} requests over all routes, seed {seed}."
    return Attack(name=f"fuzz of {count}", finding=0, play=fuzzed, limit_s=60 + count)


@contextmanager
def told_as_it_comes(path: Path | None, card: dict[str, Any]) -> Iterator[list[Row]]:
    """Rows that are appended are written to the file in the end, also if something fails."""
    rows: list[Row] = []
    try:
        yield rows
    finally:
        if path:
            result = {"benchmark": "hostile", **card, "rows": [row.as_json() for row in rows]}
            path.write_text(json.dumps(result, indent=1))


def one_shot(url: str | None, seed: int, number: int) -> None:
    """Send one request of the fuzz again, and print what comes back."""
    *_, shot = shots(number + 1, seed)
    print(shot)

    async def fire(attempt: Attempt) -> None:
        print(await send(attempt, shot))

    with Stage(url) as stage:
        attempt = Attempt(url=stage.server.url, seconds=0)
        asyncio.run(attempt_to(Attack(name="shot", finding=0, play=fire), attempt))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url")
    parser.add_argument(
        "--only", nargs="+", choices=sorted(ATTACKS), default=list(ATTACKS), metavar="NAME"
    )
    parser.add_argument("--bounded", action="store_true", help="those that the test in CI plays")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seconds", type=float, default=60, help="of hundred-clients")
    parser.add_argument("--fuzz", type=int, metavar="COUNT", help="this, and no attack")
    parser.add_argument("--seed", type=int, default=17)
    parser.add_argument("--shot", type=int, metavar="NUMBER")
    parser.add_argument("--list", action="store_true")
    return parser.parse_args()


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a server of ours ends, too
    args = arguments()
    if args.list:
        print(
            "\n\n".join(
                f"{name} (finding {attack.finding or '-'}): {attack.told}"
                for name, attack in ATTACKS.items()
            )
        )
        return
    if args.shot is not None:
        return one_shot(args.url, args.seed, args.shot)
    names = [name for name in args.only if ATTACKS[name].bounded or not args.bounded]
    from bench_embeddings import card

    print(json.dumps(card()))
    print(HEADER, flush=True)
    with told_as_it_comes(args.json, card()) as rows:
        for row in fuzz_rows(args) if args.fuzz else play(names, args.url, args.seconds):
            rows.append(row)
            print(row, flush=True)
    sys.exit(any(row.complaints() for row in rows))


def fuzz_rows(args: argparse.Namespace) -> Iterator[Row]:
    with Stage(args.url) as stage:
        yield stage.play(fuzzing(args.fuzz, args.seed), args.seconds)


if __name__ == "__main__":
    main()
