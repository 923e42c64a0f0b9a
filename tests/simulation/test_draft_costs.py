"""The cost of drafts, measured by the real scheduler on steps whose times are known.

Random loads measure costs, too (sim.py): their texts and blocks must stay right while trials decide
how many drafts there are.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cfg_core.policy.draft_cost import DraftCosts
from cfg_core.policy.draft_length import DRAFT_COST
from cfg_core.vllm_plugin.core.speculation import Speculation
from tests.simulation.paths import PATHS, EnginePath, make_config
from tests.simulation.sim import TOKEN_SECONDS, Simulation

DRAFTING = [path for path in PATHS if path.drafts]
ROWS = 4


def started(
    folder: Path,
    path: EnginePath,
    costs: DraftCosts | None = None,
    plain: int = 0,
    seed: int | None = None,
) -> Simulation:
    """A simulation of two guided requests, and of some plain ones, that have run to their end.

    seed: of the first one, which is sampled then.
    """
    sim = Simulation(make_config(folder, drafts=path.drafts), 100, path)
    if costs is not None:
        sim.scheduler._speculation.costs = costs
    for i in range(ROWS // 2):
        sim.add(f"guided {i}", [7 + i] * 20, 150, scale=2.0, negative=[9 + i] * 12)
    params = sim.scheduler.requests["guided 0"].sampling_params
    assert params is not None
    params.seed, params.temperature = seed, float(seed is not None)
    for i in range(plain):
        sim.add(f"plain {i}", [7 + i] * 20, 150)
    sim.run()
    sim.check_drained()
    return sim


@pytest.mark.parametrize("path", DRAFTING, ids=lambda path: path.name)
def test_the_cost_of_a_draft_is_that_of_a_token_in_each_row(
    model_folder: Path, path: EnginePath
) -> None:
    sim = started(model_folder, path)
    rows = TOKEN_SECONDS * ROWS
    assert sim.scheduler._speculation.costs.of(ROWS) == pytest.approx(rows / (1 + rows))
    milli = sim.scheduler.guidance_stats()[f"draft_cost_milli_from_{ROWS}"]
    assert milli == round(1000 * rows / (1 + rows))


@pytest.mark.parametrize("path", DRAFTING, ids=lambda path: path.name)
def test_beside_plain_requests_nothing_is_measured(model_folder: Path, path: EnginePath) -> None:
    """Their drafts are not ours to choose."""
    sim = started(model_folder, path, plain=1)
    assert sim.scheduler._speculation.costs.of(ROWS + 1) == DRAFT_COST
    assert "draft_cost_milli_from_4" not in sim.scheduler.guidance_stats()


@pytest.mark.parametrize("path", DRAFTING[:2], ids=lambda path: path.name)
def test_a_text_with_a_seed_does_not_depend_on_how_long_steps_take(
    model_folder: Path, path: EnginePath
) -> None:
    sim = started(model_folder, path, seed=3)
    assert sim.scheduler._speculation.costs.of(ROWS) == DRAFT_COST
    sim.scheduler._speculation.costs = DraftCosts(constant=5.0)  # no draft is worth that
    before = sim.scheduler.guidance_stats()["guided_drafts"]
    sim.add("seeded", [3] * 20, 60, scale=2.0, negative=[4] * 12)
    params = sim.scheduler.requests["seeded"].sampling_params
    assert params is not None
    params.seed, params.temperature = 4, 1.0
    sim.run()
    assert sim.scheduler.guidance_stats()["guided_drafts"] > before


@pytest.mark.parametrize("path", DRAFTING, ids=lambda path: path.name)
def test_a_given_cost_is_used_as_it_is(model_folder: Path, path: EnginePath) -> None:
    sim = started(model_folder, path, DraftCosts(constant=5.0))
    stats = sim.scheduler.guidance_stats()
    assert stats["guided_drafts"] == 0
    assert not [name for name in stats if name.startswith("draft_cost")]


def test_drafts_behind_a_window_do_not_depend_on_other_groups(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first plain step verifies as many as its group had planned, though more were made."""
    planned = {"r": 1, "other": 3}
    monkeypatch.setattr(Speculation, "_next_length", lambda self, leader, *_: planned[leader])
    sim = Simulation(make_config(model_folder, drafts=3), 60, EnginePath(drafts=3))
    sim.add("r", [7] * 5, 25, scale=2.0, window=(0, 4))
    sim.add("other", [8] * 5, 30, scale=2.0)
    schedule, drafts = sim.scheduler.schedule, list[int]()

    def noted() -> Any:
        step = schedule()
        if "r" in step.num_scheduled_tokens and "r" not in sim.scheduler._groups:
            drafts.append(len(step.scheduled_spec_decode_tokens.get("r", ())))
        return step

    monkeypatch.setattr(sim.scheduler, "schedule", noted)
    sim.run()
    sim.check_drained()
    assert drafts[0] <= 1
    assert max(drafts) == 3
