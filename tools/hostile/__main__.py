"""Attack a running server while watchers measure what other clients get, and print a table.

    python -m tools.hostile                       all, on configs/stories.yaml, started here
    python -m tools.hostile --list                their names, and what each sends
    python -m tools.hostile --only NAME ...       some of them
    python -m tools.hostile --url URL             on a server that runs; none that need keys
                                                        or a model that reads images
    python -m tools.hostile --only hundred-clients --seconds 300
    python -m tools.hostile --fuzz 10000 [--seed N] [--shot NUMBER]

Attackers claim the address 10.6.6.6 and watchers the address 10.0.0.1 in `X-Forwarded-For`. A
server at `--url` believes that with FORWARDED_ALLOW_IPS=127.0.0.1 in its environment. If the server
has keys, each side has its own key. Watchers run in their own process. They know the right answers
to what they send: guided and plain requests, an embedding, a grammar that is new each time, and
/ready twice a second. Each request uses a new connection.

Columns of the table:

- `came back`: the statuses that attackers got.
- `right, wrong, 429` and `errors told`: what watchers got, from the start of the attack until all
  was calm again.
- `longest extra wait`: the wait beyond the slowest request of the same class without the attack.
  Requests that still wait are counted.
- `longest /ready`: the slowest answer of /ready.
- `calm after`: the time from the end of the attack until each class of watchers got right answers.
- `memory`: of all the server's processes, with shared pages counted once. It is measured before the
  attack, at its maximum, and after a rest. If more memory is in use after the rest, the attack is
  played again, and memory is also measured after that.

The verdict is `held` if all of this is true:

- All watchers got right answers, and none waited more than 2 s longer.
- /ready took at most 1 s.
- No client got a 500 or an equivalent of it.
- No process died.
- Memory came back to within 10 %, or grew by 5 % at most the second time.
- All KV blocks were free again.
- Each request got the answer that its attack demands. `python -m tools.hostile --list` prints
  these demands.

The exit status is 0 if all attacks held. If a server that this script started does not recover, it
is restarted before the next attack, and a line says so.
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

from tools.hostile.attacks.fuzz import fuzz, send, shots
from tools.hostile.attempt import ATTACKS, Attack, Attempt, attempt_to
from tools.hostile.stage import Stage
from tools.hostile.verdict import HEADER, Row


def play(names: list[str], url: str | None, seconds: float) -> Iterator[Row]:
    """Play the attacks `names`, and yield a row for each.

    Attacks without keys come first. Attacks with keys, and those with images, run on other servers.
    """

    def needs(attack: Attack) -> tuple[bool, bool]:
        return attack.sees, attack.keyed

    chosen = sorted((ATTACKS[name] for name in names), key=needs)
    for (sees, keyed), attacks in groupby(chosen, key=needs):
        if url and (sees or keyed):
            continue
        with Stage(url, keyed, sees=sees) as stage:
            for attack in attacks:
                yield stage.play(attack, seconds)


def fuzzing(count: int, seed: int) -> Attack:
    """Return the fuzz as an attack, with a time limit that suffices."""

    async def fuzzed(attempt: Attempt) -> None:
        await fuzz(attempt, count, seed)

    fuzzed.__doc__ = f"{count} requests over all routes, seed {seed}."
    return Attack(name=f"fuzz of {count}", finding=0, play=fuzzed, limit_s=60 + count)


@contextmanager
def told_as_it_comes(path: Path | None, card: dict[str, Any]) -> Iterator[list[Row]]:
    """Yield a list of rows, and write it to the file at the end, also after an error."""
    rows: list[Row] = []
    try:
        yield rows
    finally:
        if path:
            result = {"benchmark": "hostile", **card, "rows": [row.as_json() for row in rows]}
            path.write_text(json.dumps(result, indent=1))


def one_shot(url: str | None, seed: int, number: int) -> None:
    """Send one request of the fuzz again, and print the answer."""
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
    parser.add_argument(
        "--bounded", action="store_true", help="the attacks that the test in CI plays"
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seconds", type=float, default=60, help="duration of hundred-clients")
    parser.add_argument(
        "--fuzz", type=int, metavar="COUNT", help="send COUNT fuzzed requests, and play no attack"
    )
    parser.add_argument("--seed", type=int, default=17)
    parser.add_argument("--shot", type=int, metavar="NUMBER")
    parser.add_argument("--list", action="store_true")
    return parser.parse_args()


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that our server ends too
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
    from benchmarks.card import card

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
