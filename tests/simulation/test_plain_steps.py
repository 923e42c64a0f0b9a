"""Plain traffic is scheduled as vLLM's own classes do it: each step has the same content.

The same random loads run on our scheduler, and on one in which each method of vLLM that we override
is vLLM's again. Only plain requests are in them, with drafts, stops, grammars, priorities, aborts
and resets of the prefix cache.
"""

import inspect
import random

import pytest
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from cfg_core.vllm_plugin.core.scheduler import GuidedScheduler
from tests.simulation.paths import PATHS, make_config
from tests.simulation.sim import Simulation
from tests.simulation.texts import VOCAB

SEEDS = range(1)


def overridden(cls):
    """The names of vLLM that our classes define again."""
    theirs = AsyncScheduler if issubclass(cls, AsyncScheduler) else Scheduler
    ours = [one for one in cls.__mro__ if one.__module__.startswith("cfg_core")]
    names = {name for one in ours for name in vars(one) if not name.startswith("__")}
    return {name: inspect.getattr_static(theirs, name) for name in names if hasattr(theirs, name)}


def content(step):
    """What the workers hear of a step, but for its guidance."""
    cached = step.scheduled_cached_reqs
    return {
        "tokens": dict(step.num_scheduled_tokens),
        "drafts": dict(step.scheduled_spec_decode_tokens),
        "next drafts": step.num_spec_tokens_to_schedule,
        "preempted": step.preempted_req_ids,
        "finished": step.finished_req_ids,
        "new": [(r.req_id, r.num_computed_tokens, r.block_ids) for r in step.scheduled_new_reqs],
        "cached": [
            *zip(cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True)
        ],
        "resumed": cached.resumed_req_ids,
    }


def play(folder, path, seed, stock):
    """The steps of a load, and its texts."""
    rng, steps = random.Random(seed), []
    blocks = rng.choice((14, 30, 200)) * (1 + path.drafts * bool(path.states))
    options = {"max_num_batched_tokens": rng.choice((48, 512)), "max_num_seqs": rng.choice((3, 16))}
    if rng.random() < 0.5:
        options["scheduling_policy"] = "priority"
    with pytest.MonkeyPatch.context() as patch:
        if stock:
            for cls in (GuidedScheduler, *GuidedScheduler.__subclasses__()):
                for name, theirs in overridden(cls).items():
                    patch.setattr(cls, name, theirs)
        sim = Simulation(make_config(folder, drafts=path.drafts, **options), blocks, path)
        execute = sim.runner.execute
        patch.setattr(
            sim.runner, "execute", lambda step: steps.append(content(step)) or execute(step)
        )
        shared = [rng.randrange(4, VOCAB) for _ in range(40)]
        for number in range(30):
            own = [rng.randrange(4, VOCAB) for _ in range(rng.randint(1, 40))]
            sim.add(
                f"r{number}",
                shared[: rng.choice((0, 16, 40))] + own,
                max_tokens=rng.randint(1, 30),
                priority=rng.randint(0, 2),
                stop=rng.sample(range(4, VOCAB), 8) if rng.random() < 0.4 else (),
                grammar=rng.random() < 0.1,
            )
            sim.compile_grammars()
            for _ in range(rng.randint(0, 6)):
                if sim.busy:
                    sim.step()
            if rng.random() < 0.1:
                sim.abort(f"r{rng.randint(0, number)}")
        sim.run()
    return steps, sim.outputs


@pytest.mark.parametrize("seed", SEEDS, ids=[f"seed{s}" for s in SEEDS])
@pytest.mark.parametrize("path", PATHS, ids=[p.name for p in PATHS])
def test_each_step_is_what_vllms_scheduler_makes(model_folder, path, seed):
    ours, theirs = (play(model_folder, path, seed, stock) for stock in (False, True))
    assert len(ours[0]) > 50
    assert ours == theirs


def test_another_step_would_be_noticed(model_folder, monkeypatch):
    reserve = GuidedScheduler._reserve_prefill_lookahead
    monkeypatch.setattr(
        GuidedScheduler,
        "_reserve_prefill_lookahead",
        lambda self, request, computed, new: min(reserve(self, request, computed, new), 7),
    )
    ours, theirs = (play(model_folder, PATHS[0], 0, stock) for stock in (False, True))
    assert ours[1] == theirs[1]
    assert ours != theirs
