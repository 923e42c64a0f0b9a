"""Random loads on the real scheduler: lockstep, KV contents, roles and cleanliness, checked on every step.

A failing seed is named in the test's id: `pytest tests/simulation -k "seed7"` replays it.
"""

import random

import pytest

from cfg_core.vllm_plugin.scheduler import GuidedScheduler
from tests.simulation.sim import Simulation, make_config, random_load

SEEDS = range(12)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    return tmp_path_factory.mktemp("simulated-model")


def random_setup(rng: random.Random) -> dict:
    """Engine arguments that hurt: tiny pools, tiny budgets, few slots."""
    kv_split = rng.choice(("elastic", "elastic", "even"))
    return {
        "kv_split": kv_split,
        "num_blocks": rng.choice((17, 20, 30, 60)) if kv_split == "elastic" else rng.choice((36, 60)),
        "max_num_seqs": rng.choice((2, 3, 5, 16)),
        "max_num_batched_tokens": rng.choice((20, 33, 64, 256)),
        "scheduling_policy": rng.choice(("fcfs", "priority")),
        "enable_prefix_caching": rng.random() < 0.7,
        "long_prefill_token_threshold": rng.choice((0, 0, 20)),
        "scheduler_reserve_full_isl": rng.random() < 0.6,
        "watermark": rng.choice((0.0, 0.0, 0.05)),
    }


def simulate(model_folder, seed: int) -> Simulation:
    rng = random.Random(seed)
    setup = random_setup(rng)
    num_blocks = setup.pop("num_blocks")
    sim = Simulation(make_config(model_folder, **setup), num_blocks)
    random_load(sim, rng, num_requests=30)
    sim.check_drained()
    return sim


def simulate_all(model_folder) -> None:
    for seed in SEEDS:
        simulate(model_folder, seed)


@pytest.mark.parametrize("seed", SEEDS, ids=[f"seed{s}" for s in SEEDS])
def test_random_load(model_folder, seed):
    sim = simulate(model_folder, seed)
    assert sim.scheduler.guidance_stats()["joint_steps"] > 20
    assert not [r for r, reason in sim.finished.items() if "error" in reason.lower()]


def test_the_loads_do_preempt_groups_and_take_samples_back(model_folder):
    """Otherwise the tests above would prove little."""
    totals = {"group_preemptions": 0, "solo_rows": 0}
    for seed in (0, 1, 2, 3):
        stats = simulate(model_folder, seed).scheduler.guidance_stats()
        for name in totals:
            totals[name] += stats[name]
    assert min(totals.values()) > 0, totals


FAULTS = {
    "a solo sample is not taken back": ("_take_back", staticmethod(lambda request: None)),
    "solo rows are not looked for": ("_samples", lambda self, stream, step: stream in step.num_scheduled_tokens),
    "followers outlive their leader": ("_close", lambda self, groups: None),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught(model_folder, monkeypatch, fault):
    monkeypatch.setattr(GuidedScheduler, *FAULTS[fault])
    with pytest.raises((AssertionError, RuntimeError, KeyError, IndexError)):
        simulate_all(model_folder)


def test_plain_requests_take_vllms_own_path(model_folder, monkeypatch):
    """Without a group, no plan is made: the stock scheduler alone decides."""
    monkeypatch.setattr("cfg_core.lockstep.plan", lambda *args: pytest.fail("a plan was made"))
    sim = Simulation(make_config(model_folder), 40)
    for i in range(10):
        sim.add(f"r{i}", [5 + i] * 20, max_tokens=10, scale=1.0 if i % 2 else None)
    sim.run()
    sim.check_drained()


def test_a_group_that_cannot_fit_ends_with_an_error_and_hurts_nobody(model_folder):
    """The net behind admission: such a request never runs, and is never emitted unguided."""
    sim = Simulation(make_config(model_folder), 10)
    sim.add("huge", [7] * 100, max_tokens=50, scale=2.0, negative=[8] * 100)
    sim.add("small", [7] * 20, max_tokens=5, scale=2.0)
    sim.run()
    assert "error" in sim.finished["huge"].lower()
    assert sim.outputs["huge"] == []
    assert len(sim.outputs["small"]) == 5


def test_output_is_cut_to_the_longer_stream(model_folder):
    sim = Simulation(make_config(model_folder), 60)
    sim.add("r", [7] * 10, max_tokens=200, scale=2.0, negative=[8] * 200)
    sim.run()
    assert len(sim.outputs["r"]) == 56
    assert "length" in sim.finished["r"].lower()
    sim.check_drained()


def test_both_streams_use_the_prefix_cache(model_folder):
    sim = Simulation(make_config(model_folder), 60)
    hits = []
    lookup = sim.scheduler.kv_cache_manager.get_computed_blocks
    sim.scheduler.kv_cache_manager.get_computed_blocks = lambda r: (
        hits.append((r.request_id, lookup(r)[1])),
        lookup(r),
    )[1]
    for rid in ("first", "second"):
        sim.add(rid, list(range(10, 60)), max_tokens=5, scale=2.0, negative=list(range(100, 140)))
        sim.run()
    assert dict(hits) == {"first": 0, "first#negative0": 0, "second": 48, "second#negative0": 32}


def test_reset_of_the_prefix_cache_under_load_keeps_groups_whole(model_folder):
    sim = Simulation(make_config(model_folder), 60)
    for i in range(6):
        sim.add(f"r{i}", [5 + i] * 30, max_tokens=20, scale=2.0, negative=[9] * 17)
    for _ in range(8):
        sim.step()
    sim.scheduler.reset_prefix_cache(reset_running_requests=True)
    sim.run()
    sim.check_drained()
    assert all(len(tokens) == 20 for tokens in sim.outputs.values())


def test_the_even_split_refuses_a_pool_whose_halves_are_too_small(model_folder):
    from cfg_core.errors import CompatibilityError

    with pytest.raises(CompatibilityError, match="lower max_model_len"):
        Simulation(make_config(model_folder, kv_split="even"), 30)
