"""Random loads on the real scheduler.

Lockstep, KV contents, roles and cleanup are checked on every step. The test's id names a failing
seed: `pytest tests/simulation -k "seed7"` replays it.
"""

import functools
import re

import pytest

from cfg_core.errors import CompatibilityError
from cfg_core.policy import lockstep
from cfg_core.vllm_plugin import config, drafters, wire
from cfg_core.vllm_plugin.core import states
from cfg_core.vllm_plugin.core.scheduler import GuidedAsyncScheduler, GuidedScheduler
from cfg_core.vllm_plugin.core.states import States
from cfg_core.vllm_plugin.core.suffixes import Suffixes
from cfg_core.vllm_plugin.core.timelines import Timelines
from tests.simulation.loads import simulate
from tests.simulation.paths import PATHS, EnginePath, make_config
from tests.simulation.sim import Simulation

SEEDS = range(6)
MOST_SEEDS = 100
"""Loads that a test looks through for an event that few of them have."""
RARE = {"v1-pp2-states-align": 45}
"""The first load of a path in which one stream of a group decodes alone, where that is rare."""
LEAST_SEEDS = 5
"""Loads that a test plays even if the first one has the event."""
guidance_of, stays_steady = GuidedScheduler._guidance, GuidedScheduler._stays_steady


@pytest.fixture(scope="session")
def load(model_folder):
    """Runs the load of a path and a seed once, and returns what it counted."""

    @functools.cache
    def run(path, seed):
        steady = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                GuidedScheduler,
                "_stays_steady",
                lambda self: steady.append(stays_steady(self)) or steady[-1],
            )
            stats = simulate(model_folder, path, seed).scheduler.guidance_stats()
        return {**stats, "steady": sum(steady)}

    return run


@pytest.mark.parametrize("seed", SEEDS, ids=[f"seed{s}" for s in SEEDS])
@pytest.mark.parametrize("path", PATHS, ids=[p.name for p in PATHS])
def test_random_load(load, path, seed):
    assert load(path, seed)["joint_steps"] > 20


@pytest.mark.parametrize("path", PATHS, ids=[p.name for p in PATHS])
def test_the_loads_do_preempt_groups_take_samples_back_and_reach_steady_steps(load, path):
    """Without these events, the tests above would prove little."""
    counted = ("group_preemptions", "solo_rows", "windows_opened", "windows_closed")
    counted += ("scored_tokens", "steady")
    totals = {name: sum(load(path, seed)[name] for seed in SEEDS) for name in counted}
    assert min(totals.values()) > 0, totals


@pytest.mark.parametrize("path", [p for p in PATHS if p.drafts], ids=lambda p: p.name)
def test_beside_a_drafter_that_cannot_be_guided_only_plain_requests_verify_drafts(
    model_folder, monkeypatch, path
):
    monkeypatch.setattr(drafters, "METHODS", ())
    stats = [simulate(model_folder, path, seed).scheduler.guidance_stats() for seed in (0, 1)]
    assert min(counted["joint_steps"] for counted in stats) > 20
    assert sum(counted["guided_drafts"] for counted in stats) == 0
    assert min(counted["plain_drafts"] for counted in stats) > 0


@pytest.mark.parametrize(
    ("path_name", "seed"),
    [
        # A solo row was not taken back, because its step was treated as a steady step.
        ("v1", 180),
        # A reset dropped the follower's output in flight, but not the leader's.
        ("v2-async-pp4", 397),
    ],
)
def test_seeds_that_once_failed(model_folder, path_name, seed):
    simulate(model_folder, next(p for p in PATHS if p.name == path_name), seed)


@pytest.mark.parametrize("path", PATHS, ids=[p.name for p in PATHS])
def test_without_reserved_blocks_taking_samples_back_keeps_guidance_exact(
    model_folder, monkeypatch, path
):
    """Without reserved blocks, vLLM preempts one stream of a group while the other decodes.

    The policy avoids this for speed. Taking samples back keeps the result exact.
    """
    taken_back = []
    monkeypatch.setattr(lockstep, "_fits", lambda *args: True)
    monkeypatch.setattr(
        GuidedScheduler,
        "_guidance",
        lambda self, *step: [
            guidance := guidance_of(self, *step),
            (
                taken_back.extend(s for s in guidance.solo if self.requests[s].num_output_tokens)
                if guidance
                else None
            ),
        ][0],
    )
    first = RARE.get(path.name, 0)
    for seed in range(first, first + MOST_SEEDS):
        simulate(model_folder, path, seed)
        if taken_back and seed >= first + LEAST_SEEDS - 1:
            return
    pytest.fail("no stream was alone in a decode")


STATE_PATHS = [path for path in PATHS if path.states]


@pytest.mark.parametrize("path", STATE_PATHS, ids=[p.name for p in STATE_PATHS])
def test_the_plan_leaves_no_state_to_undo(load, path):
    """A state that contains a token too many costs a group all of its computed tokens."""
    assert path.states in ("none", "align")
    for seed in SEEDS:
        assert load(path, seed)["recomputed_streams"] == 0, seed


@pytest.mark.parametrize("path", STATE_PATHS, ids=[p.name for p in STATE_PATHS])
def test_a_state_that_cannot_be_undone_is_computed_again(model_folder, monkeypatch, path):
    """Without reserved blocks, vLLM preempts one stream of a group while the other decodes.

    The other's state then contains a token that was taken back. Using it is found out.
    """
    monkeypatch.setattr(lockstep, "_fits", lambda *args: True)
    for seed in range(RARE.get(path.name, 0), MOST_SEEDS):
        stats = simulate(model_folder, path, seed).scheduler.guidance_stats()
        if stats["recomputed_streams"]:
            break
    else:
        pytest.fail("no state had to be computed again")
    monkeypatch.setattr(States, "note_taken_back", lambda *args: None)
    with pytest.raises(AssertionError, match="its state is not that of its"):  # noqa: PT012
        for later in range(seed, MOST_SEEDS):
            simulate(model_folder, path, later)


def test_no_prompt_of_one_token_begins_with_the_state_of_another_stream(model_folder, monkeypatch):
    """It would, with the placeholders for drafts that vLLM adds to such a prompt."""
    monkeypatch.setattr(states, "_pad_no_prompts", lambda _: None)
    path = next(path for path in STATE_PATHS if path.drafts)
    with pytest.raises(AssertionError, match="its state is not that of its"):  # noqa: PT012
        for seed in range(MOST_SEEDS):
            simulate(model_folder, path, seed)


@pytest.mark.parametrize("planned", ["joint_limit", "most_hits"])
def test_the_plan_for_cached_states_is_needed(model_folder, monkeypatch, planned):
    """Without it, groups are computed again, and remain exact."""
    if planned == "joint_limit":
        monkeypatch.setattr(States, "joint_limit", 0)
    else:
        monkeypatch.setattr(States, "most_hits", lambda self, request: None)
    assert any(
        simulate(model_folder, path, seed).scheduler.guidance_stats()["recomputed_streams"]
        for seed in range(20)
        for path in STATE_PATHS
        if path.states == "align"
    )


@pytest.mark.parametrize("path", PATHS, ids=[p.name for p in PATHS])
def test_a_solo_decode_whose_input_token_is_in_flight_is_repeated(model_folder, monkeypatch, path):
    sim = Simulation(make_config(model_folder, drafts=path.drafts), 60, path)
    sim.add("r", [7] * 10, 30, scale=2.0, negative=[8] * 5)
    while len(sim.outputs["r"]) < 3:
        sim.step()
    follower = sim.scheduler.requests["r#negative0"]
    streams = ("r", follower.request_id)
    with monkeypatch.context() as patch:
        patch.setattr(
            lockstep, "plan", lambda *args: lockstep.StepPlan(streams, frozenset(streams))
        )
        while not sim.scheduler.guidance_stats()["solo_rows"]:
            sim.scheduler._steady = None
            follower.next_decode_eligible_step = sim.scheduler.current_step + 2  # vLLM skips it
            sim.step()
    sim.run()
    sim.check_drained()
    assert len(sim.outputs["r"]) == 30


SUFFIX_PATHS = [path for path in PATHS if not path.states]


@pytest.mark.parametrize("path", SUFFIX_PATHS, ids=[p.name for p in SUFFIX_PATHS])
def test_suffixes_that_vllm_cuts_are_taken_back(model_folder, monkeypatch, path):
    """Without the plan, steps compute what fits of a suffix. Taking back keeps guidance exact."""
    cut = []
    take = Suffixes.take

    def taken(self, step):
        found = take(self, step)
        cut.extend(s for s in found if len(s.tokens) < len(self._groups[s.leader].suffix))
        return found

    monkeypatch.setattr(Suffixes, "take", taken)
    monkeypatch.setattr(
        lockstep,
        "plan",
        lambda snapshot, needs: lockstep.StepPlan(
            streams := tuple(s.id for unit in snapshot.running for s in unit.streams),
            frozenset(streams),
        ),
    )
    sim = Simulation(make_config(model_folder, max_num_batched_tokens=40), 60, path)
    for i in range(12):
        sim.add(f"r{i}", [7 + i] * 20, 12, scale=2.0, suffix=range(10, 25 + i))
    sim.run()
    sim.check_drained()
    assert cut
    assert all(len(tokens) == 12 for tokens in sim.outputs.values())


@pytest.mark.parametrize("path", SUFFIX_PATHS, ids=[p.name for p in SUFFIX_PATHS])
def test_closed_gates_save_suffixes_except_in_a_pipeline(load, path):
    """On V1, with drafts and async scheduling, they do not either."""
    counts = [load(path, seed) for seed in SEEDS]
    probes, saved = (
        sum(count[name] for count in counts) for name in ("gate_probes", "gate_saved_tokens")
    )
    saves = path.stages == 1 and (path.v2 or not (path.asynchronous and path.drafts))
    assert (probes > 20) == (saved > 100) == saves, (probes, saved)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_text_whose_gates_stay_closed_computes_its_suffix_once(model_folder, asynchronous):
    """With async scheduling twice, as the second step is scheduled before the first one tells."""
    path = EnginePath(asynchronous=asynchronous)
    sim = Simulation(make_config(model_folder), 60, path)
    sim.add("r", [7] * 20, 12, scale=2.0, suffix=range(10, 25), gate=0)
    sim.run()
    sim.check_drained()
    stats = sim.scheduler.guidance_stats()
    once = 1 + asynchronous
    assert stats["joint_steps"] == once
    assert stats["gate_probes"] == 12 - once
    assert stats["gate_saved_tokens"] == sim.runner.saved == 15 * (12 - once)
    assert stats["gate_closed_tokens"] == 12


def test_a_gate_that_stays_open_is_never_probed(model_folder):
    sim = Simulation(make_config(model_folder), 60)
    sim.add("r", [7] * 20, 12, scale=2.0, suffix=range(10, 25), gate=100)
    sim.run()
    stats = sim.scheduler.guidance_stats()
    assert (stats["joint_steps"], stats["gate_probes"], stats["gate_closed_tokens"]) == (12, 0, 0)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(("token_cost", "pays"), [(0.0, False), (1.0, True)])
def test_gates_are_probed_beside_others_if_that_pays(model_folder, asynchronous, token_cost, pays):
    path = EnginePath(asynchronous=asynchronous)
    sim = Simulation(make_config(model_folder), 60, path, token_cost)
    sim.add("plain", [7] * 20, 40)
    sim.add("gated", [8] * 20, 12, scale=2.0, suffix=range(10, 25), gate=0)
    sim.run()
    sim.check_drained()
    assert sim.scheduler.guidance_stats()["gate_probes"] == (11 - asynchronous) * pays


PROBE_PATHS = [path for path in SUFFIX_PATHS if path.asynchronous and path.stages == 1]


def run_windows_with_gates(folder, path):
    """Windows that end behind any token, whose gate is open or closed."""
    sim = Simulation(make_config(folder, max_num_batched_tokens=256), 120, path)
    for i in range(40):
        window = (0, 2 + i % 8)
        sim.add(f"r{i}", [7 + i] * 5, 12, scale=2.0, suffix=[9] * 5, window=window, gate=50)
    sim.run()
    sim.check_drained()


@pytest.mark.parametrize("path", PROBE_PATHS, ids=[p.name for p in PROBE_PATHS])
def test_a_window_does_not_end_before_its_last_probe_tells(model_folder, monkeypatch, path):
    run_windows_with_gates(model_folder, path)
    advance = Timelines.advance
    monkeypatch.setattr(Timelines, "advance", lambda self, unknown: advance(self))
    with pytest.raises(AssertionError):
        run_windows_with_gates(model_folder, path)


@pytest.mark.parametrize("gate", [0, 30])
@pytest.mark.parametrize("reset", [False, True], ids=["preempted", "reset"])
@pytest.mark.parametrize("path", PROBE_PATHS, ids=[p.name for p in PROBE_PATHS])
def test_a_leader_is_preempted_while_its_probe_is_in_flight(model_folder, path, reset, gate):
    sim = Simulation(make_config(model_folder), 60, path)
    sim.add("r", [7] * 20, 25, scale=2.0, suffix=[9] * 5, gate=gate)
    disturbed = 0
    while sim.busy:
        sim.step()
        if "r" in sim.scheduler._probes.in_flight and disturbed < 10:
            disturbed += 1
            if reset:
                sim.scheduler.reset_prefix_cache(reset_running_requests=True)
                continue
            leader = sim.scheduler.requests["r"]
            sim.scheduler.running.remove(leader)
            sim.scheduler._preempt_request(leader, 0.0)
    sim.check_drained()
    assert disturbed > 3
    assert len(sim.outputs["r"]) == 25


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside a plain request"])
def test_a_drafter_rests_while_only_groups_with_suffixes_decode(model_folder, monkeypatch, beside):
    """The workers hear nothing of the step that reads the prompt: the drafter reads it, too."""
    rests, attach = [], wire.attach

    def attached(step, guidance):
        rests.append(guidance.drafter_rests)
        attach(step, guidance)

    monkeypatch.setattr(wire, "attach", attached)
    sim = Simulation(make_config(model_folder, drafts=3), 200, EnginePath(drafts=3))
    sim.add("r", [7] * 20, 12, scale=2.0, suffix=[9] * 5)
    if beside:
        sim.add("plain", [8] * 20, 60)
    sim.run()
    assert rests == [not beside] * 12


def test_a_suffix_takes_blocks_behind_its_leader_alone(model_folder):
    """Three groups of 40 prompt tokens share all whole blocks, whatever their suffixes are."""
    sim = Simulation(make_config(model_folder, max_num_batched_tokens=256), 60)
    for i in range(3):
        sim.add(f"r{i}", [7] * 40, 4, scale=2.0, suffix=range(10, 20 + i))
        sim.step()
    while not all(sim.outputs.values()):
        sim.step()
    held = sim.scheduler._roles.held(sim.scheduler.requests)
    assert len(held) == 2 + 3 * 2
    sim.run()
    sim.check_drained()


def test_plain_requests_are_scheduled_by_vllm_itself(model_folder, monkeypatch):
    """Without a group, no plan is made: only the stock scheduler decides."""
    monkeypatch.setattr(
        "cfg_core.policy.lockstep.plan", lambda *args: pytest.fail("a plan was made")
    )
    sim = Simulation(make_config(model_folder), 40)
    for i in range(10):
        sim.add(f"r{i}", [5 + i] * 20, max_tokens=10, scale=1.0 if i % 2 else None)
    sim.run()
    sim.check_drained()


def test_a_group_that_cannot_fit_ends_with_an_error_and_affects_no_other(model_folder):
    """The scheduler's own check, in addition to admission.

    Such a request never runs, and never gives unguided tokens.
    """
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
    sim.scheduler.kv_cache_manager.get_computed_blocks = lambda r, *more: (
        hits.append((r.request_id, lookup(r, *more)[1])),
        lookup(r, *more),
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


@pytest.mark.parametrize("path", [p for p in PATHS if p.asynchronous], ids=lambda p: p.name)
def test_a_reset_drops_the_output_in_flight_of_a_whole_group(model_folder, path):
    """Also the output of a stream that was preempted just before is dropped.

    vLLM alone would deliver it.
    """
    sim = Simulation(make_config(model_folder), 60, path)
    sim.add("r", [7] * 10, 30, scale=2.0, negative=[8] * 5)
    while len(sim.outputs["r"]) < 3 or not sim.scheduler.requests["r"].num_output_placeholders:
        sim.step()
    follower = sim.scheduler.requests["r#negative0"]
    sim.scheduler.running.remove(follower)
    sim.scheduler._preempt_request(follower, 0.0)
    sim.scheduler.reset_prefix_cache(reset_running_requests=True)
    sim.run()
    sim.check_drained()
    assert len(sim.outputs["r"]) == 30


def test_the_even_split_refuses_a_pool_whose_halves_are_too_small(model_folder):
    with pytest.raises(CompatibilityError, match="lower max_model_len"):
        Simulation(make_config(model_folder, kv_split="even"), 30)


@pytest.mark.parametrize(
    ("section", "option", "value", "words"),
    [
        (
            "parallel_config",
            "enable_batch_sharded_sampling",
            True,
            "set enable_batch_sharded_sampling=False",
        ),
        ("parallel_config", "decode_context_parallel_size", 2, "context parallelism"),
        ("model_config", "is_encoder_decoder", True, "encoder-decoder models"),
        ("speculative_config", "method", "ngram_gpu", "ngram_gpu on vLLM's V1 model runner"),
        (
            "speculative_config",
            "enable_adaptive_verification",
            True,
            "set enable_adaptive_verification=False",
        ),
    ],
)
def test_what_cannot_be_exact_is_known(model_folder, section, option, value, words):
    made = make_config(model_folder, drafts=3 * (section == "speculative_config"))
    assert config.cannot_guide(made) is None
    vars(getattr(made, section))[option] = value
    assert re.search(words, config.cannot_guide(made))


def test_models_that_read_prompts_in_both_directions_cannot_be_guided(model_folder):
    """A chunk's tokens see each other, so holding a stream back would change what it says."""
    made = make_config(model_folder)
    made.model_config.model_arch_config.architectures = ["HrmTextForCausalLM"]
    assert re.search("in both directions", config.cannot_guide(made))


def test_an_engine_that_cannot_guide_serves_plain_requests(model_folder):
    """The scheduler refuses guided ones, if a frontend does not: no token without guidance."""
    made = make_config(model_folder)
    made.parallel_config.enable_batch_sharded_sampling = True
    sim = Simulation(made, 60)
    sim.add("guided", [7] * 20, max_tokens=5, scale=2.0)
    sim.add("plain", [7] * 20, max_tokens=5)
    sim.run()
    assert "error" in sim.finished["guided"].lower()
    assert sim.outputs["guided"] == []
    assert len(sim.outputs["plain"]) == 5


@pytest.mark.parametrize("option", ["max_num_seqs", "max_num_batched_tokens"])
def test_an_engine_too_small_for_a_group_serves_plain_requests(model_folder, option):
    made = make_config(model_folder)
    vars(made.scheduler_config)[option] = 1
    sim = Simulation(made, 60)
    sim.add("guided", [7] * 20, max_tokens=5, scale=2.0)
    sim.add("plain", [7] * 20, max_tokens=5)
    sim.run()
    assert "error" in sim.finished["guided"].lower()
    assert len(sim.outputs["plain"]) == 5


def test_a_wrong_option_of_ours_is_refused_at_start(model_folder):
    made = make_config(model_folder)
    made.additional_config = {"cfg_serve": {"kv_split": "odd"}}
    with pytest.raises(CompatibilityError, match="it must be one of elastic, even"):
        Simulation(made, 30)


def test_speculation_in_a_pipeline_cannot_be_guided(model_folder):
    made = make_config(model_folder, drafts=3)
    made.parallel_config.pipeline_parallel_size = 2
    assert "use tensor_parallel_size" in config.cannot_guide(made)


def test_a_vllm_without_our_hooks_is_refused():
    from typing_extensions import override

    from cfg_core.vllm_plugin.config import check_overrides

    class Changed(GuidedAsyncScheduler):
        @override
        def a_method_that_vllm_lost(self):
            pass

    check_overrides(GuidedAsyncScheduler)
    with pytest.raises(CompatibilityError, match=r"no method a_method_that_vllm_lost.*0\.32"):
        check_overrides(Changed)


def test_a_drafter_that_is_not_known_is_refused():
    """It must not be guided with the wrong class, and not be left without guidance."""
    from cfg_core.vllm_plugin.config import guided_class

    class Stock: ...

    class Guided(Stock): ...

    class Newer(Stock): ...

    assert guided_class(Stock(), {Stock: Guided}) is Guided
    with pytest.raises(CompatibilityError, match="cannot guide Newer: use another speculative"):
        guided_class(Newer(), {Stock: Guided})
