"""Random loads on random engines, each made from one seed."""

from __future__ import annotations

import random
from collections.abc import Collection
from pathlib import Path
from typing import Any

from cfg_core.policy.pool import EVEN
from cfg_core.vllm_plugin import config
from tests.simulation.paths import EnginePath, make_config
from tests.simulation.sim import Simulation
from tests.simulation.texts import VOCAB, model_token


def simulate(folder: Path, path: EnginePath, seed: int, num_requests: int = 30) -> Simulation:
    """Run one random load on one random engine until everything has finished.

    Raises AssertionError if a check fails.
    """
    rng = random.Random(seed)
    setup = random_setup(rng)
    num_blocks = setup.pop("num_blocks")
    if path.states:
        # A stream has states beside its KV blocks: with drafts, one for each token of a step.
        num_blocks += num_blocks if path.drafts else num_blocks // 2
    if path.states == "align":
        # By default, vLLM keeps the state of the last whole block of a prompt alone.
        setup["prefix_cache_retention_interval"] = (0, 16, 64)[seed % 3]
    sim = Simulation(make_config(folder, drafts=path.drafts, **setup), num_blocks, path)
    random_load(sim, rng, num_requests)
    sim.check_drained()
    errors = [r for r, reason in sim.finished.items() if "error" in reason.lower()]
    assert not errors, errors
    return sim


def random_setup(rng: random.Random) -> dict[str, Any]:
    """Engine arguments that make conflicts frequent: tiny pools, tiny budgets, few slots."""
    kv_split = rng.choice(("elastic", "elastic", "even"))
    return {
        "kv_split": kv_split,
        "num_blocks": (
            rng.choice((17, 20, 30, 60)) if kv_split == "elastic" else rng.choice((36, 60))
        ),
        "max_num_seqs": rng.choice((2, 3, 5, 16)),
        "max_num_batched_tokens": rng.choice((20, 33, 64, 256)),
        "scheduling_policy": rng.choice(("fcfs", "priority")),
        "enable_prefix_caching": rng.random() < 0.7,
        "long_prefill_token_threshold": rng.choice((0, 0, 20)),
        "scheduler_reserve_full_isl": rng.random() < 0.6,
        "watermark": rng.choice((0.0, 0.0, 0.05)),
    }


def random_load(
    sim: Simulation,
    rng: random.Random,
    num_requests: int,
    abort_share: float = 0.02,
    reset_share: float = 0.002,
) -> None:
    """Run a random load until all requests have finished.

    Random are arrivals, lengths, scales, priorities, stops, grammars, aborts and resets.
    """
    shared = [rng.randrange(4, VOCAB) for _ in range(64)]
    added = 0
    while added < num_requests or sim.busy:
        for _ in range(rng.choice((0, 0, 1, 1, 2, 5)) if added < num_requests else 0):
            _add_random(sim, rng, f"r{added}", shared)
            added += 1
        live = [r for r in sim.outputs if r not in sim.finished]
        if live and rng.random() < abort_share:
            sim.abort(rng.choice(live))
        if rng.random() < 0.3:
            sim.compile_grammars()
        if rng.random() < reset_share:
            sim.scheduler.reset_prefix_cache(reset_running_requests=True)
        sim.step()
        assert sim.steps < 50_000, f"no progress: {sim.scheduler.guidance_stats()}"


def _add_random(sim: Simulation, rng: random.Random, rid: str, shared: list[int]) -> None:
    def prompt(longest: int) -> list[int]:
        head = shared[: rng.choice((0, 0, 16, 33, 64))]
        return (head + [rng.randrange(4, VOCAB) for _ in range(rng.randint(1, longest))])[-longest:]

    stats, budget = sim.scheduler.guidance_stats(), config.step_budget(sim.scheduler)
    path, split = sim.runner.path, sim.scheduler._split.pool
    kept = split.watermark if path.drafts and path.states else 0  # where there is less to spare
    pool = (stats["total_blocks"] - 2 - kept) * sim.block_size
    most = min(6, stats["max_num_seqs"], budget // config.rows_per_stream(sim.config))
    size = rng.randint(2, most) if rng.random() < 0.4 else 2
    drafts = path.drafts
    room = (40 if size == 2 else 52) + drafts  # for output, drafts, and the rest of a block
    room += sim.block_size * {"": 0, "none": 1 + drafts, "align": 3 + drafts}[path.states]
    if split.kv_split == EVEN:
        longest = min(100, pool // 2 // (size - 1) - room)
    else:
        longest = min(100, pool // size - room)
    size, longest = (size, longest) if longest > 0 else (2, max(1, min(100, pool // 2 - room)))
    guided, streams, schedule = rng.random() < 0.7, [], []
    window: tuple[int, int | None] = (0, None)
    if guided and (size > 2 or rng.random() < 0.2):
        weights = (-1.0, -0.5, 0.0, 0.25, 1.0, 2.0)
        streams = [(rng.choice(weights), prompt(longest)) for _ in range(size - 1)]
    elif guided and rng.random() < 0.2:
        firsts = sorted(rng.sample(range(1, 25), rng.randint(1, 4)))
        schedule = [(first, rng.choice((0.0, 1.0, 1.5))) for first in firsts]
        schedule = [(0, 3.0), *schedule]
    if guided and rng.random() < 0.3:
        start = rng.choice((0, 0, 1, 2, 7, 15))
        window = (start, rng.choice((None, start + rng.randint(1, 12))))
    own = prompt(longest)
    score, between = 0, None
    dice = random.Random(str(own))  # of its own, so that the other choices of a seed stay
    if guided and dice.random() < 0.4:
        between = random_markers(dice, rid, own)
    elif guided and not schedule and window == (0, None):
        score = dice.randint(0, min(len(own) - 1, longest // 2)) if dice.random() < 0.4 else 0
    suffix = []
    if guided and not streams and not score and not (between and between[2]):
        suffix = random_suffix(dice, sim)
        own = own[-1:] if suffix and dice.random() < 0.2 else own
    gate = random_gate(random.Random(f"gate {own}")) if suffix else None
    room_for = max(1, longest - score)
    max_tokens = rng.randint(1, 30)
    sim.add(
        rid,
        own,
        max_tokens=max_tokens,
        scale=rng.choice((-1.0, 0.0, 1.5, 3.0)) if guided else None,
        negative=prompt(longest)[:room_for] if guided and rng.random() < 0.8 else None,
        priority=rng.randint(0, 2),
        stop=(stop := rng.sample(range(4, VOCAB), 8) if rng.random() < 0.4 else ()),
        grammar=rng.random() < 0.1,
        streams=[(weight, ids[:room_for]) for weight, ids in streams],
        schedule=schedule,
        window=window,
        score=score,
        between=between,
        begun=0 if score else random_begun(dice, rid, max_tokens, stop),
        suffix=suffix,
        gate=gate,
    )


def random_begun(rng: random.Random, rid: str, max_tokens: int, stop: Collection[int]) -> int:
    """How many tokens a request has already: often none, and never so many that it is complete."""
    ends = (i for i in range(max_tokens) if model_token(rid, i) in stop)
    most = min(max_tokens - 1, next(ends, max_tokens))
    return rng.randint(0, most) if rng.random() < 0.5 else 0


def random_suffix(rng: random.Random, sim: Simulation) -> list[int]:
    """Up to 40 tokens that a step can have; mostly none. Admission refuses the other paths."""
    scheduler = sim.scheduler.scheduler_config
    threshold = scheduler.long_prefill_token_threshold or 1_000
    room = config.step_budget(sim.scheduler) - config.rows_per_stream(sim.config)
    most = min(40, room, threshold - 1)
    if rng.random() < 0.6 or sim.runner.path.states:
        return []
    return [rng.randrange(4, VOCAB) for _ in range(rng.randint(1, most))]


def random_gate(rng: random.Random) -> int | None:
    """How many percent of a text's gates are open; None for none."""
    return rng.choice((None, 0, 5, 20, 50, 90, 100))


def random_markers(rng: random.Random, rid: str, prompt: list[int]) -> tuple[int, int, bool]:
    """Markers that mostly come in the text: some early, some next to each other."""
    text = [*prompt[-3:], *(model_token(rid, i) for i in range(20)), 2]
    start, end = rng.sample(sorted(set(text)), 2)
    return start, end, rng.random() < 0.6
