"""Inject faults into a served cluster, and print a table of the requests' outcomes.

    python -m tools.chaos                          all faults; `link` needs root and `ip`
    python -m tools.chaos --faults engine replica  some of them
    python -m tools.chaos --clients 12 --replicas 3 --json FILE
    python -m tools.chaos --replicas 3 --kills 200
    python -m tools.chaos --replicas 3 --speculation draft --faults engine replica
    python -m tools.chaos --across-nodes --faults worker node
    python -m tools.chaos --haproxy --faults haproxy proxy router

The cluster consists of real processes on this machine: a head node (controller, proxy, two routers)
and worker nodes with one engine each. One node more than replicas is there. With `--across-nodes`,
each engine has two workers, which are Ray actors on different nodes; their CPUs are presented to
Ray as GPUs. With `--haproxy`, HAProxy is in front, and connects to the routers without Serve's
proxy. With `--kills`, replicas and engines are killed again and again, each at a random time after
two replicas have become ready, so that one is always left. Each row has twenty of them.

Clients send requests of four APIs and many kinds (tools/serving/questions.py) whose right answers
are known, streamed and not. For each fault the table has the requests in flight, their outcomes,
the time until clients got the last error, the longest pause of a stream, and the time until the
service was restored.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

from tools.chaos.faults import FAULTS, SPECIAL
from tools.chaos.judging import HEADER, Row, judge
from tools.chaos.stage import (
    ENGINE,
    HAPROXY,
    MANAGER,
    PROXY,
    RECOVERY_LIMIT_S,
    REPLICA,
    SPECULATION,
    Stage,
    across_nodes,
    chaos_config,
    speculating,
)
from tools.serving.cluster import Cluster
from tools.serving.load import Load
from tools.serving.process import REPOSITORY, haproxy_env
from tools.serving.questions import OF_EVERY_KIND

RAY_CPU = REPOSITORY / "tests" / "support" / "ray_cpu"
CALM_S = 5.0
"""Service counts as restored when everything runs and no client got an error for this long."""
KILLS_PER_ROW = 20
BETWEEN_KILLS_S = (4.0, 8.0)
"""The ingress has then noticed the last one."""


async def strike(stage: Stage, load: Load, name: str) -> Row:
    """Run clients, inject a fault, wait until the service is restored, and judge all requests."""
    told, breaks = FAULTS[name]
    load.outcomes.clear()
    before = await asyncio.to_thread(stage.counted)
    stop = asyncio.Event()
    clients = asyncio.ensure_future(load.run(stop))
    await asyncio.sleep(8)
    at = time.monotonic()
    await asyncio.to_thread(breaks, stage)
    whole_s = await until_whole(stage, load, at)
    stop.set()
    await clients
    seen = [outcome for outcome in load.outcomes if outcome.ended > at]
    # A router that was killed has taken its counts with it.
    return judge(told, seen, at, whole_s, await asyncio.to_thread(stage.counted) - before)


async def kill_often(stage: Stage, load: Load, number: int, seed: int) -> Row:
    """Kill replicas and engines one after another, at random times, while clients ask."""
    load.outcomes.clear()
    before = await asyncio.to_thread(stage.counted)
    rng, stop, killed = random.Random(seed), asyncio.Event(), Counter[str]()
    clients = asyncio.ensure_future(load.run(stop))
    at = time.monotonic()
    while killed.total() < number:
        await asyncio.sleep(rng.uniform(*BETWEEN_KILLS_S))
        if await asyncio.to_thread(stage.ready) >= 2:
            name = rng.choice((ENGINE, REPLICA))
            rng.choice(await asyncio.to_thread(stage.cluster.find, name)).kill()
            killed[name] += 1
            print(f"  {killed.total()} of {number}, {dict(load.count())}", flush=True)
    whole_s = await until_whole(stage, load, time.monotonic())
    stop.set()
    await clients
    told = f"{killed[ENGINE]} engines and {killed[REPLICA]} replicas killed"
    after = await asyncio.to_thread(stage.counted)
    return judge(told, load.outcomes, at, whole_s, after - before)


async def until_whole(stage: Stage, load: Load, at: float) -> float | None:
    """Return the seconds from `at` until the service was restored. None: it was not."""
    while time.monotonic() - at < RECOVERY_LIMIT_S:
        since = time.monotonic()
        if await asyncio.to_thread(stage.whole):
            await asyncio.sleep(CALM_S)
            calm = all(o.kind == "right" for o in load.outcomes if o.ended > since)
            if calm and await asyncio.to_thread(stage.whole):
                return since - at
        await asyncio.sleep(0.5)
    return None


def stage_of(
    cluster: Cluster,
    clients: int,
    workers: int = 0,
    proxies: tuple[str, ...] = (PROXY,),
    replicas: int = 2,
    speculation: str | None = None,
) -> tuple[Stage, Load]:
    """Serve on a new cluster, and learn the right answers.

    workers: number of workers of each engine, each on its own node. 0: no separate workers.
    """
    for _ in range(replicas * max(1, workers) + 1):
        cluster.add(gpus=1) if workers else cluster.add(engine=1)
    config = chaos_config(replicas=replicas)
    config = across_nodes(config) if workers else config
    config = speculating(config, speculation) if speculation else config
    server = cluster.serve(config)
    stage = Stage(cluster, server, config, workers, proxies)
    server.wait_until_ready()
    deadline = time.monotonic() + RECOVERY_LIMIT_S
    while not stage.whole() and time.monotonic() < deadline:
        time.sleep(1)
    questions = tuple(q for q in OF_EVERY_KIND if not (speculation and q.is_sampled))
    load = Load(server.url, clients, questions)
    asyncio.run(load.learn())
    return stage, load


def plays(
    stage: Stage, load: Load, faults: Sequence[str], kills: int
) -> Iterator[Coroutine[Any, Any, Row]]:
    """What makes each row: one of the faults, or some of the kills."""
    for seed, first in enumerate(range(0, kills, KILLS_PER_ROW)):
        yield kill_often(stage, load, min(KILLS_PER_ROW, kills - first), seed)
    for name in () if kills else faults:
        yield strike(stage, load, name)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--faults", nargs="+", choices=FAULTS, default=[n for n in FAULTS if n not in SPECIAL]
    )
    parser.add_argument(
        "--haproxy",
        action="store_true",
        help="put HAProxy in front; the fault `proxy` then kills its manager",
    )
    parser.add_argument(
        "--across-nodes",
        action="store_true",
        help="two workers per engine; the fault `worker` kills one",
    )
    parser.add_argument("--speculation", choices=SPECULATION)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--kills", type=int, metavar="N", help="instead of --faults")
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--folder", type=Path, help="folder of Ray's files; for `disk`, on a small file system"
    )
    args = parser.parse_args()
    rows = []
    env = {"PYTHONPATH": str(RAY_CPU)} if args.across_nodes else {}
    if args.haproxy:
        env |= haproxy_env()
    proxies = (MANAGER, HAPROXY) if args.haproxy else (PROXY,)
    workers = 2 if args.across_nodes else 0
    linked = "link" in args.faults and not args.kills
    with Cluster(linked=linked, folder=args.folder, env=env) as cluster:
        stage, load = stage_of(
            cluster, args.clients, workers, proxies, args.replicas, args.speculation
        )
        try:
            print(HEADER, flush=True)
            for played in plays(stage, load, args.faults, args.kills or 0):
                rows.append(asyncio.run(played))
                print(rows[-1], flush=True)
                for outcome in load.outcomes:
                    if outcome.kind != "right":
                        asked = outcome.question
                        print(f"  {outcome.kind}: {asked.api.path} {asked.more} {outcome.detail}")
                if args.json:
                    args.json.write_text(json.dumps([vars(row) for row in rows], indent=1))
        finally:
            stage.server.stop()


if __name__ == "__main__":
    main()
