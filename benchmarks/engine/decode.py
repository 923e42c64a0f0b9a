"""Decoding: what a step of guided groups costs, against the plain streams that they are made of.

    python -m benchmarks.engine.decode [--batches 1 4 16 32] [--turns 8]
        [--model chat|stories|300m|1b|8b] [--sampling greedy top-p] [--negatives 1 48 256]
        [--peers transformers client]

The physics. A decode step reads all weights once, whatever the batch, and computes about
2 x parameters FLOPs for each stream. `bound` is the larger of the two times for 2B streams, from
rates that are measured here (physics.py). A group of two streams does the forward pass of two plain
requests, so a step of B groups should take as long as one of 2B plain requests:

    parity = step(2B plain) / step(B groups) = 1

It may be more than 1: a group needs one row of the head, one sample and one text, where two plain
requests need two of each. It is less than 1 if the blend and its bookkeeping cost more than that.

What is timed is `LLMEngine.step` (bench.py). The loads take turns in one engine, and ratios are
taken within a turn. `top-p` samples at temperature 0.8 with top-p 0.95. Peers, on the same thread:

- `transformers`: guided `generate` of Hugging Face transformers on the same batch. The difference
  of two texts of different length is timed, so that prompts do not count.
- `client`: what a client can do itself without guidance in the engine. For each token it sends both
  prompts with `max_tokens` 1 and `logprobs` 20, and merges what it gets. Prefixes are cached, and
  calls are in this process, so HTTP would come on top. It cannot see beyond 20 tokens.

Prints a card, a table of medians with ranges, and one line of JSON.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

from ..llm import guidance
from ..peer import guided_generate
from ..report import Report, parser
from ..turns import spread, take_turns
from .bench import CUDA, MODELS, SCALE, Bench, add_options, model_of
from .physics import measure

SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "top-p": {"temperature": 0.8, "top_p": 0.95},
}
PEER_TOKENS = (4, 20)
"""Lengths of the two texts whose difference is timed."""
CLIENT_TOKENS = 6
LOGPROBS = 20
"""The most that a client may ask for by default."""


class DecodeBench(Bench):
    """A Bench with peers. sampling: one of SAMPLINGS, for all requests."""

    sampling = "greedy"
    _peer: Any = None

    def params(self, negative: int) -> Any:
        extra = guidance(SCALE, self.ids(negative)) if negative else None
        return self.sampling_params(extra, **SAMPLINGS[self.sampling])

    def step_s(self, requests: int, negative: int) -> tuple[float, float]:
        """Seconds, and CPU-seconds, of the median decode step of that many requests.

        negative: tokens of each negative. 0: the requests are plain.
        """
        wall, cpu = self.steps([self.params(negative) for _ in range(requests)])
        return statistics.median(wall), statistics.median(cpu)

    def client_s(self, groups: int, negative: int) -> float:
        """Seconds of a token of a client that merges two plain requests for each group."""
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=LOGPROBS)
        pairs = [(self.ids(self.args.prompt), self.ids(negative)) for _ in range(groups)]
        took = []
        for _ in range(CLIENT_TOKENS):
            start = time.perf_counter()
            names = [[self.send(ids, params) for ids in pair] for pair in pairs]
            found: dict[str, dict[int, float]] = {}
            while self.engine.has_unfinished_requests():
                for output in self.engine.step():
                    rows: Any = output.outputs[0].logprobs[0]
                    found[output.request_id] = {i: row.logprob for i, row in rows.items()}
            for pair, (leader, follower) in zip(pairs, names, strict=True):
                token = merged(found[leader], found[follower])
                for ids in pair:
                    ids.append(token)
            took.append(time.perf_counter() - start)
        return statistics.median(took[1:])

    def transformers_s(self, requests: int, negative: int) -> float:
        """Seconds of a step of transformers' guided `generate` on a batch of that many prompts."""
        self._peer = self._peer or self.in_transformers("cuda" if CUDA else "cpu").eval()
        prompts = [self.ids(self.args.prompt) for _ in range(requests)]
        negatives = [self.ids(negative) for _ in range(requests)]
        sampled = {"do_sample": True, "top_k": 0, **SAMPLINGS["top-p"]}
        options = sampled if self.sampling == "top-p" else {}
        took = []
        for tokens in PEER_TOKENS:
            start = time.perf_counter()
            guided_generate(self._peer, prompts, negatives, SCALE, tokens, **options)
            took.append(time.perf_counter() - start)
        return (took[1] - took[0]) / (PEER_TOKENS[1] - PEER_TOKENS[0])

    def row(self, batch: int, negative: int) -> dict[str, Any]:
        """Medians of all turns for `batch` groups, in ms and as ratios."""
        loads = {
            "plain(B)": (batch, 0),
            "guided(B)": (batch, negative),
            "plain(2B)": (2 * batch, 0),
        }
        cpu: dict[str, list[float]] = {name: [] for name in loads}

        def step(name: str) -> float:
            wall_s, cpu_s = self.step_s(*loads[name])
            cpu[name].append(cpu_s)
            return wall_s

        peers = {"transformers": self.transformers_s, "client": self.client_s}
        ways: dict[str, Callable[[], float]] = {name: partial(step, name) for name in loads}
        ways |= {peer: partial(peers[peer], batch, negative) for peer in self.args.peers}
        turns = take_turns(ways, self.args.turns)
        of_cpu = zip(cpu["plain(2B)"][1:], cpu["guided(B)"][1:], strict=True)
        parities = turns.ratios("plain(2B)", "guided(B)")
        return {
            "sampling": self.sampling,
            "batch": batch,
            "negative": negative,
            "ms": {name: 1000 * s for name, s in turns.medians().items()},
            "parity": statistics.median(parities),
            "parity_range": [min(parities), max(parities)],
            "parity_cpu": statistics.median(plain / guided for plain, guided in of_cpu),
            "of_plain": turns.ratio("plain(B)", "guided(B)"),
            "of_peers": {peer: turns.ratio(peer, "guided(B)") for peer in self.args.peers},
        }


def merged(leader: dict[int, float], follower: dict[int, float]) -> int:
    """The likeliest token of the blend, of those that both rows tell; else the leader's."""
    both = leader.keys() & follower.keys()
    blend = {i: follower[i] + SCALE * (leader[i] - follower[i]) for i in both} or leader
    return max(blend, key=blend.__getitem__)


def headline(rows: list[dict[str, Any]]) -> str:
    """The tokens per second of the guided requests, as a part of those of plain ones."""
    parts = (
        f"B={row['batch']} {row['of_plain']:.2f}, {row['parity']:.2f} of half of 2B" for row in rows
    )
    return f"of plain(B): {'; '.join(parts)}"


def options() -> argparse.Namespace:
    found = parser(__doc__)
    add_options(found, MODELS, tokens=24, turns=8)
    found.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16, 32])
    found.add_argument("--negatives", type=int, nargs="+", default=[48], help="their tokens")
    found.add_argument("--sampling", nargs="+", choices=SAMPLINGS, default=["greedy"])
    found.add_argument("--peers", nargs="+", choices=["transformers", "client"], default=[])
    return found.parse_args()


def main() -> None:
    args = options()
    with tempfile.TemporaryDirectory() as folder:
        bench = DecodeBench(args, model_of(args.model, Path(folder)))
        rates = measure(getattr(torch, args.dtype))
        torch.cuda.empty_cache()
        sizes = bench.sizes()
        report = Report(
            "decode",
            args,
            threads=torch.get_num_threads(),
            **sizes,
            read_gb_s=round(rates.bytes_s / 1e9, 1),
            gemm_gflop_s=round(rates.flop_s / 1e9),
        )
        report.head(
            *("sampling", "B", "negative", "plain(B), ms", "guided(B), ms", "plain(2B), ms"),
            *("bound, ms", "parity (range)", "of CPU time", "tokens/s, of plain(B)"),
            "peers: ms, times slower",
        )
        rows = []
        for bench.sampling, batch, negative in product(args.sampling, args.batches, args.negatives):
            row = bench.row(batch, negative)
            bound_ms = 1000 * rates.step_s(sizes["bytes"], sizes["parameters"], 2 * batch)
            rows.append({**row, "bound_ms": bound_ms})
            ms = row["ms"]
            peers = [f"{p} {ms[p]:.0f}, {times:.1f}" for p, times in row["of_peers"].items()]
            report.row(
                *(row["sampling"], batch, negative),
                *(f"{ms[name]:.1f}" for name in ("plain(B)", "guided(B)", "plain(2B)")),
                f"{bound_ms:.1f}",
                f"{row['parity']:.3f} ({spread(row['parity_range'])})",
                f"{row['parity_cpu']:.3f}",
                f"{row['of_plain']:.2f}",
                "; ".join(peers) or "-",
            )
        report.end(headline=headline(rows), rows=rows)


if __name__ == "__main__":
    main()
