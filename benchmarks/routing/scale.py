"""From four replicas to a thousand: what a router and Serve's controller do for each.

It is a model, checked against measured points.

    python -m benchmarks.routing.scale [--replicas 4 16 64 256 1000] [--measured 4 8 16 32]

The model. Three things grow with the number of replicas N, all on CPUs beside the engines:

- A choice: the router compares replicas for each request. It compares MAX_COMPARED at most
  (deployments/routing/placement.py), so its time should be constant from there on.
- What the router hears: each replica reports twice a second, and Serve's controller passes the list
  of all replicas to every router. Its time should be linear in N.
- What the controller does: it asks every replica for its report and its health. Its time should be
  linear in N.

`choices` SIMULATES the traffic of N replicas with the engines of simulation.py, and times the
real policy, on this machine. Requests go to `--routers` routers in turns, each of which sees only
its own and the reports. `hits` are tokens found cached of all prompt tokens; `max/mean` is of the
replicas' work; p2c stands for the power of two choices, with one router that knows everything.

`controller` MEASURES real Ray Serve on this machine: an application of N replicas that compute
nothing, with the real GroupRouter and the real period of reports; CPU time of the controller, and
of one process with a router, while nothing is asked. A line through all points but the largest
predicts the largest, and 1,000. Its replicas share the cores of this machine, so N is small there.

Prints a card, two tables, and one line of JSON.
"""

# No `from __future__ import annotations` here: Serve reads annotations.

import logging
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from deployments.health.engine_watch import REPORTED_AT

from ..report import Report, parser
from .simulation import TOKENS_PER_S, Job, Ours, PowerOfTwo, Simulation, Workload

LOAD = 0.7
"""Of what the replicas can compute with empty caches."""
REQUESTS_EACH = 40
"""Requests per replica in a simulation."""
FEWEST_REQUESTS = 1000
PREFIXES_EACH = 8
"""Texts that several requests begin with, per replica."""

SETTLE_S, MEASURE_S = 10.0, 20.0
START_LIMIT_S = 300.0
REPORT = {"total_blocks": 100_000, "free_blocks": 100_000, "max_num_seqs": 256}


# --- choices, simulated ---------------------------------------------------------------------------


class Routers(Ours):
    """Several of ours, as the ingresses of a cluster: requests go to them in turns."""

    def __init__(self, workload: Workload, num_routers: int) -> None:
        super().__init__(workload)
        self._routers = [Ours(workload) for _ in range(num_routers)]
        self.seconds = 0.0

    def choose(self, job: Job, now: float) -> int:
        return int(self._timed(self._of(job).choose, job, now))

    def sent(self, job: Job, replica: int, now: float) -> None:
        self._timed(self._of(job).sent, job, replica, now)

    def answered(self, job: Job, replica: int, now: float) -> None:
        self._timed(self._of(job).answered, job, replica, now)

    def report(self, replica: int, stats: dict[str, int], now: float) -> None:
        for router in self._routers:
            router.report(replica, stats, now)

    def _of(self, job: Job) -> Ours:
        return self._routers[int(job.name) % len(self._routers)]

    def _timed(self, work: Any, *args: Any) -> Any:
        start = time.perf_counter()
        result = work(*args)
        self.seconds += time.perf_counter() - start
        return result


def choices(replicas: int, num_routers: int) -> dict[str, float]:
    """One row of the first table."""
    requests = max(FEWEST_REQUESTS, REQUESTS_EACH * replicas)
    prefixes = PREFIXES_EACH * replicas
    workload = Workload(replicas=replicas, prefixes=prefixes, requests=requests, load=LOAD)
    routers = Routers(workload, num_routers)
    ours = Simulation(workload, routers).run().result()
    p2c = Simulation(workload, PowerOfTwo(workload)).run().result()
    work = ours["utilisation"] * TOKENS_PER_S
    return {
        "replicas": replicas,
        "choice_us": 1e6 * routers.seconds / requests,
        "hits": ours["hit_rate"],
        "hits_p2c": p2c["hit_rate"],
        "max_over_mean": ours["max_over_mean_work"],
        "max_over_mean_p2c": p2c["max_over_mean_work"],
        "first_token_s": ours["ttft_mean_s"],
        "first_token_s_p2c": p2c["ttft_mean_s"],
        "tokens_per_replica_s": work,
    }


# --- the controller, measured ---------------------------------------------------------------------


class Replica:
    """A replica that reports and computes nothing."""

    def record_routing_stats(self) -> dict[str, int]:
        now_ms = int(1000 * time.time())
        return {**REPORT, REPORTED_AT: now_ms, "running": now_ms % 100}

    async def ask(self) -> int:
        return os.getpid()


class Ingress:
    """A process with a router."""

    def __init__(self, replicas: Any) -> None:
        self._replicas = replicas

    async def ask(self) -> int:
        await self._replicas.ask.remote()
        return os.getpid()


@dataclass
class Processes:
    """CPU-seconds of a second, of the two processes."""

    controller: float
    router: float


def measured(replicas: int) -> Processes:
    """What the two do at rest, with so many replicas."""
    import psutil
    from ray import serve

    from deployments.generator.replica import ROUTER

    deployment: Any = serve.deployment(
        name="Replica",
        num_replicas=replicas,
        request_router_config=ROUTER,
        ray_actor_options={"num_cpus": 0},
    )(Replica)
    ingress: Any = serve.deployment(name="Ingress", ray_actor_options={"num_cpus": 0})(Ingress)
    handle = serve.run(ingress.bind(deployment.bind()), name="scale", route_prefix=None)
    router = psutil.Process(handle.ask.remote().result(timeout_s=START_LIMIT_S))
    names = {p.pid: " ".join(p.cmdline()) for p in psutil.Process().children(recursive=True)}
    controller = psutil.Process(next(pid for pid, name in names.items() if "ServeContr" in name))
    time.sleep(SETTLE_S)
    before, start = [_cpu_s(p) for p in (controller, router)], time.perf_counter()
    time.sleep(MEASURE_S)
    took = time.perf_counter() - start
    used = [(_cpu_s(p) - b) / took for p, b in zip((controller, router), before, strict=True)]
    serve.delete("scale")
    return Processes(*used)


def _cpu_s(process: Any) -> float:
    return float(sum(process.cpu_times()[:2]))


def line(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, float]:
    """(what does not depend on x, slope): the line of least squares."""
    slope, intercept = statistics.linear_regression(xs, ys)
    return intercept, slope


# --- output ---------------------------------------------------------------------------------------


def told_choices(report: Report, sizes: Sequence[int], num_routers: int) -> list[dict[str, float]]:
    report.head(
        *("replicas (simulated)", "a choice, us", "hits", "hits, p2c", "max/mean", "max/mean, p2c"),
        *("first token, s", "first token, s, p2c"),
    )
    forms = {
        "choice_us": ".0f",
        **dict.fromkeys(("hits", "hits_p2c"), ".3f"),
        **dict.fromkeys(("max_over_mean", "max_over_mean_p2c"), ".2f"),
        **dict.fromkeys(("first_token_s", "first_token_s_p2c"), ".3f"),
    }
    rows = []
    for replicas in sizes:
        rows.append(row := choices(replicas, num_routers))
        report.row(replicas, *(format(row[name], form) for name, form in forms.items()))
    return rows


def told_controller(report: Report, sizes: Sequence[int], largest: int) -> dict[str, Any]:
    import ray

    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    report.head("replicas", "controller, CPU-s/s", "a router, CPU-s/s")
    rows = []
    for replicas in sizes:
        found = measured(replicas)
        rows.append({"replicas": replicas, **vars(found)})
        report.row(replicas, f"{found.controller:.3f}", f"{found.router:.3f}")
    ray.shutdown()
    predicted = {}
    for size, known in ((sizes[-1], rows[:-1]), (largest, rows)):
        cells = []
        for name in ("controller", "router"):
            fixed, each = line([r["replicas"] for r in known], [r[name] for r in known])
            predicted[f"{name} at {size}"] = fixed + each * size
            cells.append(f"{fixed + each * size:.3f}")
        report.row(f"{size}, predicted", *cells)
    return {"rows": rows, "predicted": predicted}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--replicas", type=int, nargs="*", default=[4, 16, 64, 256, 1000])
    options.add_argument("--routers", type=int, default=4)
    options.add_argument("--measured", type=int, nargs="*", default=[4, 8, 16, 32])
    args = options.parse_args()
    report = Report("scale", args)
    found: dict[str, Any] = {}
    if args.replicas:
        found["choices"] = told_choices(report, args.replicas, args.routers)
    if args.measured:
        found["controller"] = told_controller(report, args.measured, 1000)
    report.end(**found)


if __name__ == "__main__":
    main()
