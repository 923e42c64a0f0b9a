"""Routing policies in a SIMULATION: no engine runs here. Prefix hits, balance and waiting of four
ways to choose.

What there is to win: a prompt whose beginning is cached on the replica that gets it need not be
computed again. What there is to lose: if all that share a beginning go to one replica, it queues
while others idle; under guidance all traffic shares one beginning, the negative prompt. And what
bounds both: no replica can hold all prefixes.

A replica is an LRU of KV chunks and a continuous-batching loop: decode rows first, then prefill,
first come first served; a step takes a fixed time and a time for each token. Arrivals are Poisson;
load 1 would be all that the replicas can compute, were nothing cached: the first two policies are
then two thirds busy. Reports leave a replica every 0.5 s and come 0.5 s later.

    python -m benchmarks.routing.simulation [--replicas 4] [--prefixes 64] [--requests 3000]
"""

from __future__ import annotations

import heapq
import random
import statistics
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, count
from typing import Any

from deployments.requests.group import GroupRequest
from deployments.requests.prefix_hashes import CHUNK_TOKENS, Prefix, tokens
from deployments.routing.placer import Placer
from deployments.routing.prefix_index import PrefixIndex

from ..report import Report, parser

STEP_S, TOKEN_S, STEP_TOKENS = 0.010, 1 / 8000, 2048
TOKENS_PER_S = STEP_TOKENS / (STEP_S + STEP_TOKENS * TOKEN_S)
REPORT_EVERY_S = REPORT_AGE_S = 0.5
ROUTED_S = 0.02
"""From a router's choice to the replica's word that it has the request."""
BLOCKS_PER_CHUNK = 2


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A request: one of `prefixes` shared texts and a question of its own; against one negative
    prompt for all. Its output has 1 to output_tokens tokens.

    zipf: the k-th prefix is asked for with weight k^-zipf; 0 is uniform. prefixes=0: only the
    negative is shared.
    """

    replicas: int = 4
    prefixes: int = 64
    requests: int = 3000
    load: float = 1.0
    zipf: float = 0.0
    prefix_chars: int = 1500
    negative_chars: int = 256
    question_chars: int = 200
    output_tokens: int = 64
    kv_tokens: int = 10_240
    slots: int = 256
    seed: int = 0

    def arrivals(self) -> Iterator[tuple[float, GroupRequest]]:
        """(seconds, request), in order."""
        rng = random.Random(self.seed)
        shared = [_text(rng, self.prefix_chars) for _ in range(self.prefixes)]
        weights = list(accumulate((k + 1) ** -self.zipf for k in range(self.prefixes)))
        negative = Prefix.of(_text(rng, self.negative_chars))
        now = 0.0
        for _ in range(self.requests):
            first = (
                rng.choices(shared, cum_weights=weights)[0]
                if shared
                else _text(rng, self.prefix_chars)
            )
            prompt = Prefix.of(first + _text(rng, self.question_chars))
            request = GroupRequest(prefixes=(prompt, negative), output_tokens=self.output_tokens)
            work = request.tokens + self.output_tokens
            now += rng.expovariate(self.load * self.replicas * TOKENS_PER_S / work)
            yield now, request


def _text(rng: random.Random, num_chars: int) -> str:
    return rng.randbytes(num_chars // 2 + 1).hex()[:num_chars]


# --- a replica ------------------------------------------------------------------------------------


@dataclass(eq=False)
class Job:
    """One group on its way. own_chunks: of KV that nobody else can use, such as output."""

    name: str
    request: GroupRequest
    arrived: float
    prefill: int = 0
    own_chunks: int = 0
    output: int = 1
    first_token: float = 0.0
    hits: list[int] = field(default_factory=list)


class Engine:
    """A replica's KV and its loop."""

    def __init__(self, workload: Workload) -> None:
        self.capacity, self.slots = workload.kv_tokens // CHUNK_TOKENS, workload.slots
        self.queue: deque[Job] = deque()
        self.running: list[Job] = []
        self._users: Counter[Any] = Counter()  # chunk -> streams that hold it
        # Chunks that nobody holds, least recently used first.
        self._idle: OrderedDict[Any, None] = OrderedDict()
        self._own = 0
        self.busy_s, self.jobs = 0.0, 0

    @property
    def free_chunks(self) -> int:
        return self.capacity - len(self._users) - self._own

    def report(self) -> dict[str, int]:
        """What ModelReplica.record_routing_stats returns."""
        waiting = sum(job.request.tokens for job in self.queue)
        return {
            "free_blocks": BLOCKS_PER_CHUNK * self.free_chunks,
            "total_blocks": BLOCKS_PER_CHUNK * self.capacity,
            "block_size": CHUNK_TOKENS // BLOCKS_PER_CHUNK,
            "queued_prefill_tokens": waiting + sum(job.prefill for job in self.running),
            "running": sum(job.request.streams for job in self.running),
            "waiting": sum(job.request.streams for job in self.queue),
            "max_num_seqs": self.slots,
            "calls": self.jobs,
        }

    def step(self, now: float) -> tuple[float, list[Job]]:
        """(when the step ends, the jobs that end with it)."""
        while self.queue and 2 * len(self.running) + 2 <= self.slots and self._admit(self.queue[0]):
            self.running.append(self.queue.popleft())
        decoding = [job for job in self.running if not job.prefill]
        budget = STEP_TOKENS - sum(job.request.streams for job in decoding)
        end = now + STEP_S + TOKEN_S * (STEP_TOKENS - self._prefill(budget))
        for job in decoding:
            job.output -= 1
            job.first_token = job.first_token or end
        done = [job for job in decoding if not job.output]
        self.busy_s += TOKEN_S * (STEP_TOKENS - budget)
        for job in done:
            self.running.remove(job)
            self._release(job)
        return end, done

    def _prefill(self, budget: int) -> int:
        """The budget that is left."""
        before = budget
        for job in self.running:
            computed = min(budget, job.prefill)
            job.prefill -= computed
            budget -= computed
        self.busy_s += TOKEN_S * (before - budget)
        return budget

    def _admit(self, job: Job) -> bool:
        """Take the KV of all streams, or nothing."""
        chains = [prefix.chain for prefix in job.request.prefixes]
        job.hits = [
            next((i for i, c in enumerate(chain) if not self._has(c)), len(chain))
            for chain in chains
        ]
        tails = [p.num_tokens + job.output - tokens(len(p.chain)) for p in job.request.prefixes]
        own = sum(-(-tail // CHUNK_TOKENS) for tail in tails)
        if self.free_chunks < own + sum(
            chunk not in self._users for chain in chains for chunk in chain
        ):
            return False
        for chain in chains:
            self._users.update(chain)
            for chunk in chain:
                self._idle.pop(chunk, None)
        self._own += own
        job.own_chunks, job.prefill = own, job.request.tokens - sum(map(tokens, job.hits))
        while len(self._users) + len(self._idle) + self._own > self.capacity:
            self._idle.popitem(last=False)
        return True

    def _has(self, chunk: bytes) -> bool:
        return chunk in self._users or chunk in self._idle

    def _release(self, job: Job) -> None:
        """Leaves first, so that they are evicted first; what was this job's own stays until then,
        too."""
        self._own -= job.own_chunks
        self._idle.update(((job.name, i), None) for i in range(job.own_chunks))
        for prefix in job.request.prefixes:
            for chunk in reversed(prefix.chain):
                self._users[chunk] -= 1
                if not self._users[chunk]:
                    del self._users[chunk]
                    self._idle[chunk] = None


# --- policies -------------------------------------------------------------------------------------


class RoundRobin:
    """A router: it knows what it sent, what was answered, and what is reported. This one looks at
    nothing of it."""

    def __init__(self, workload: Workload) -> None:
        self.replicas, self.ongoing = range(workload.replicas), Counter[int]()
        self._turn, self._rng = count(), random.Random(workload.seed)

    def choose(self, job: Job, now: float) -> int:
        return next(self._turn) % len(self.replicas)

    def sent(self, job: Job, replica: int, now: float) -> None:
        self.ongoing[replica] += 1

    def answered(self, job: Job, replica: int, now: float) -> None:
        self.ongoing[replica] -= 1

    def report(self, replica: int, stats: dict[str, int], now: float) -> None:
        pass


class PowerOfTwo(RoundRobin):
    """Serve's own: the shorter queue of two replicas."""

    def choose(self, job: Job, now: float) -> int:
        return min(
            self._rng.sample(self.replicas, min(2, len(self.replicas))),
            key=self.ongoing.__getitem__,
        )


class PrefixOnly(RoundRobin):
    """Naive: the longest cached prefixes of both streams, then the shorter queue."""

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload)
        self._index = PrefixIndex(default_capacity=workload.kv_tokens // CHUNK_TOKENS)

    def choose(self, job: Job, now: float) -> int:
        def hits(replica: int) -> int:
            return sum(
                self._index.matched(replica, prefix.chain) for prefix in job.request.prefixes
            )

        return min(self.replicas, key=lambda replica: (-hits(replica), self.ongoing[replica]))

    def sent(self, job: Job, replica: int, now: float) -> None:
        super().sent(job, replica, now)
        for prefix in job.request.prefixes:
            self._index.add(replica, prefix.chain, now)


class Ours(RoundRobin):
    """deployments/routing/placer.py, as GroupRouter calls it."""

    def __init__(self, workload: Workload, costs: Any = None) -> None:
        super().__init__(workload)
        self.placer = Placer(costs, workload.seed)
        self.placer.keep_only(self.replicas)

    def choose(self, job: Job, now: float) -> int:
        return self.placer.rank(job.name, job.request, self.replicas, now)[0]

    def sent(self, job: Job, replica: int, now: float) -> None:
        self.placer.sent(job.name, job.request, replica, now)

    def answered(self, job: Job, replica: int, now: float) -> None:
        self.placer.answered(job.name, replica, now)

    def report(self, replica: int, stats: dict[str, int], now: float) -> None:
        self.placer.report(replica, stats, now, REPORT_AGE_S)


POLICIES: dict[str, Callable[[Workload], RoundRobin]] = {
    "round robin": RoundRobin,
    "power of two choices": PowerOfTwo,
    "prefix only (naive)": PrefixOnly,
    "ours": Ours,
}


# --- the simulation -------------------------------------------------------------------------------


class Simulation:
    """Events in order of time, until every job is done."""

    def __init__(self, workload: Workload, policy: RoundRobin) -> None:
        self.engines = [Engine(workload) for _ in range(workload.replicas)]
        self.policy, self.now = policy, 0.0
        self.done: list[Job] = []
        self._todo = workload.requests
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._ties = count()
        self._stepping: set[int] = set()
        rng = random.Random(workload.seed)
        for i, (at, request) in enumerate(workload.arrivals()):
            self._at(
                at,
                self._arrive,
                Job(str(i), request, at, output=rng.randint(1, workload.output_tokens)),
            )
        for replica in range(workload.replicas):
            self._at(REPORT_EVERY_S * (replica + 1) / workload.replicas, self._report, replica)

    def _at(self, time: float, what: Callable[..., None], *args: Any) -> None:
        heapq.heappush(self._events, (time, next(self._ties), what, args))

    def run(self) -> Simulation:
        while self._todo:
            self.now, _, what, args = heapq.heappop(self._events)
            what(*args)
        return self

    def _arrive(self, job: Job) -> None:
        self._at(self.now + ROUTED_S, self._routed, job, self.policy.choose(job, self.now))

    def _routed(self, job: Job, replica: int) -> None:
        self.policy.sent(job, replica, self.now)
        self.engines[replica].jobs += 1
        self.engines[replica].queue.append(job)
        if replica not in self._stepping:
            self._step(replica)

    def _step(self, replica: int) -> None:
        engine = self.engines[replica]
        self._stepping.discard(replica)
        if engine.queue or engine.running:
            end, done = engine.step(self.now)
            self._stepping.add(replica)
            self._at(end, self._ended, replica, done)

    def _ended(self, replica: int, done: list[Job]) -> None:
        for job in done:
            self.policy.answered(job, replica, self.now)
        self.done += done
        self._todo -= len(done)
        self._step(replica)

    def _report(self, replica: int) -> None:
        self._at(self.now + REPORT_AGE_S, self._reported, replica, self.engines[replica].report())
        self._at(self.now + REPORT_EVERY_S, self._report, replica)

    def _reported(self, replica: int, stats: dict[str, int]) -> None:
        self.policy.report(replica, stats, self.now)

    def result(self) -> dict[str, float]:
        """hits: tokens found cached of all prompt tokens; of the conditional streams alone:
        conditional_hits."""
        hits = [sum(column) for column in zip(*(job.hits for job in self.done), strict=True)]
        prompts = [
            sum(p.num_tokens for p in ps)
            for ps in zip(*(j.request.prefixes for j in self.done), strict=True)
        ]
        waited = sorted(job.first_token - job.arrived for job in self.done)
        return {
            "hit_rate": CHUNK_TOKENS * sum(hits) / sum(prompts),
            "conditional_hit_rate": CHUNK_TOKENS * hits[0] / prompts[0],
            "max_over_mean_requests": _imbalance([engine.jobs for engine in self.engines]),
            "max_over_mean_work": _imbalance([engine.busy_s for engine in self.engines]),
            "utilisation": sum(engine.busy_s for engine in self.engines)
            / self.now
            / len(self.engines),
            "ttft_mean_s": statistics.fmean(waited),
            "ttft_p95_s": waited[int(0.95 * len(waited))],
        }


def _imbalance(values: Sequence[float]) -> float:
    return max(values) / statistics.fmean(values)


def simulate(workload: Workload, policy: str) -> dict[str, float]:
    """What a policy makes of a workload."""
    return Simulation(workload, POLICIES[policy](workload)).run().result()


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--replicas", type=int, default=4)
    options.add_argument("--prefixes", type=int, default=64)
    options.add_argument("--requests", type=int, default=3000)
    args = options.parse_args()
    common: dict[str, Any] = {
        name: vars(args)[name] for name in ("replicas", "prefixes", "requests")
    }
    workloads = {
        "uniform": Workload(**common),
        "uniform, load 0.7": Workload(**common, load=0.7),
        "zipf 1": Workload(**common, zipf=1.0),
        "negative of 1500 chars": Workload(**common, negative_chars=1500, kv_tokens=12_288),
        "only the negative shared": Workload(**common | {"prefixes": 0}),
        "uniform, load 0.02": Workload(**common, load=0.02),
    }
    print("SIMULATION of the routing policy: no engine is run")
    report = Report("routing simulation", args)
    rows: list[dict[str, Any]] = []
    for name, load in workloads.items():
        for policy in POLICIES:
            found = {key: round(value, 3) for key, value in simulate(load, policy).items()}
            if not rows:
                report.head("workload", "policy", *found)
            rows.append({"workload": name, "policy": policy, **found})
            report.row(*rows[-1].values())
    report.end(simulation=True, rows=rows)


if __name__ == "__main__":
    main()
