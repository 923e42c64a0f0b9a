"""Rules against the executable specification and against their definitions, and how a package adds
one."""

from __future__ import annotations

import math
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from typing import Any

import numpy as np
import pytest
import torch

from cfg_core import GuidanceError, GuidanceParams
from cfg_core.blend import RuleRows
from cfg_core.blend import rules as computed
from cfg_core.errors import ConfigError
from cfg_core.params import ResolvedFollower, ResolvedGuidance, Strength, TokenIds
from cfg_core.params import rules as declared
from cfg_core.params.rules import Parameter, Rule, RuleKind, check_rule
from cfg_core.reference import FORBIDDEN, rule_scale

VOCABULARY = 600
NWCAD = {"max_divergence": 0.2, "negative_margin": 0.1, "conditional_margin": 0.4}
RULES: list[dict[str, Any]] = [
    {"name": "adacad", "offset": 0.0},
    {"name": "adacad", "offset": -1.5},
    {"name": "arr"},
    {"name": "nwcad", **NWCAD},
]


def put(values: Any, dtype: Any) -> torch.Tensor:
    return torch.from_numpy(np.asarray(values, dtype=dtype))


def pairs(rows: int = 40) -> torch.Tensor:
    """[2, rows, vocabulary]: from equal streams to unlike ones, flat and peaked."""
    generator = torch.Generator().manual_seed(3)
    spread = torch.linspace(0.3, 9, rows).unsqueeze(-1)
    leader = torch.randn(rows, VOCABULARY, generator=generator) * spread
    noise = torch.randn(rows, VOCABULARY, generator=generator) * spread
    share = torch.linspace(0, 1, 5).repeat(rows // 5).unsqueeze(-1)
    logits = torch.stack([leader, leader + share * noise])
    logits[0, 5, :20] = logits[1, 6, 10:40] = logits[:, 7, 3] = FORBIDDEN
    return logits


def scales_of(entries: list[dict[str, Any] | None], logits: torch.Tensor, scale: float) -> Any:
    strengths = [one and Strength(rule=check_rule(one, "rule")) for one in entries]
    found = torch.full((len(entries),), math.nan)
    for rule in RuleRows.of(strengths, put):
        found[rule.rows] = rule.scales(logits[:, rule.rows], put([scale] * len(rule.rows), "f4"))
    return found


@pytest.mark.parametrize("entry", RULES, ids=str)
def test_a_rule_is_that_of_the_specification(entry: dict[str, Any]) -> None:
    logits = pairs()
    found = scales_of([entry] * logits.shape[1], logits, scale=2.5)
    rows = torch.log_softmax(logits.double(), -1)
    want = [rule_scale(entry, rows[0, i], rows[1, i], 2.5) for i in range(logits.shape[1])]
    torch.testing.assert_close(found, torch.tensor(want), atol=2e-5, rtol=1e-5)
    assert len({round(value, 3) for value in want}) >= 3  # the rule tells the rows apart


def test_different_rules_at_once_and_parts_of_rows() -> None:
    logits = pairs()[:, :5].contiguous()
    entries = [RULES[0], None, RULES[3], RULES[1], RULES[0]]
    found = scales_of(entries, logits, 2.0)
    assert found.isnan().tolist() == [entry is None for entry in entries]
    assert found[0] == scales_of([RULES[0]], logits[:, :1], 2.0)
    (rule,) = RuleRows.of([Strength(rule=check_rule(one, "")) for one in RULES[:2]], put)
    part = rule.part(slice(1, 2))
    assert part.rows.tolist() == [1]
    assert part.arguments["offset"].tolist() == [[-1.5]]
    assert RuleRows.of([None, Strength(max_kl=1)], put) == ()


def test_the_definitions() -> None:
    """Streams that share no token, and equal ones; each margin; a rule that finds no number."""
    apart = torch.full((2, 1, 4), FORBIDDEN)
    apart[0, 0, 0] = apart[1, 0, 1] = 0.0
    p, q = apart
    assert computed.js_divergence(p, q).item() == pytest.approx(math.log(2))
    assert computed.js_divergence(p, p).item() == 0
    equal = torch.zeros(2, 1, 4)
    assert scales_of([RULES[0]], equal, 1).item() == 1
    assert scales_of([RULES[2]], equal, 1).item() == 1
    peaked = torch.tensor([[[5.0, 0, 0, 0]], [[0.0, 0, 0, 0]]])
    assert scales_of([RULES[2]], peaked, 1).item() > 1 > scales_of([RULES[2]], peaked.flip(0), 1)
    gate = {"name": "nwcad", **NWCAD}
    assert scales_of([gate], peaked[:1].repeat(2, 1, 1), 3).item() == 0  # they agree, and are sure
    assert scales_of([gate], peaked, 3).item() == 1  # they do not, and the conditional is sure
    assert scales_of([gate], equal, 3).item() == 3  # neither is sure


def test_what_is_no_number_counts_as_1() -> None:
    nothing = RuleRows(lambda *_: torch.tensor([[math.nan], [math.inf]]), put([0, 1], "i8"), {})
    assert nothing.scales(pairs()[:, :2], torch.ones(2)).tolist()[0] == 1
    assert nothing.scales(pairs()[:, :2], torch.ones(2)).isfinite().all()


def test_rows_keep_their_logits() -> None:
    logits = pairs()
    before = logits.clone()
    scales_of([RULES[0]] * logits.shape[1], logits, 1)
    assert torch.equal(logits, before)


def test_a_rule_travels_to_the_engine() -> None:
    params = GuidanceParams.from_fields({"guidance_rule": '{"name": "adacad"}'})
    assert params is not None
    assert params.enabled
    assert params.rule == Rule("adacad", (("offset", 0.0),))
    sent = ResolvedGuidance.of(params, (ResolvedFollower(token_ids=TokenIds.of([1])),))
    assert ResolvedGuidance.from_extra_args(sent.to_extra_args()) == sent
    assert GuidanceParams.from_fields(params.to_extra_args()) == params


def test_what_reads_the_scale_takes_it() -> None:
    rule = check_rule({"name": "nwcad", **NWCAD}, "guidance_rule")
    assert GuidanceParams(rule=rule, scale=2).weights == (2, -1)
    assert GuidanceParams(rule=rule, schedule=((0, 2.0), (5, 3.0))).enabled
    with pytest.raises(GuidanceError, match="leave out guidance_scale"):
        GuidanceParams(rule=Rule("arr"), scale=2)


def halfway(conditional: Any, negative: Any, scale: Any, arguments: Any) -> Any:
    return 1 + arguments["by"] * torch.ones_like(scale)


WITHOUT_FUNCTION = RuleKind(compute="math:no_such_function")
HALFWAY = RuleKind(compute=f"{__name__}:halfway", parameters={"by": Parameter(0.5, least=0)})


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[EntryPoint]]:
    """Entry points that the test may add to."""
    points: list[EntryPoint] = []
    monkeypatch.setattr(declared, "entry_points", lambda group: points)
    for cached in (declared.kinds, computed.function_of):
        cached.cache_clear()
    yield points
    for cached in (declared.kinds, computed.function_of):
        cached.cache_clear()


def point(name: str, value: str) -> EntryPoint:
    return EntryPoint(name, value, declared.ENTRY_POINTS)


def test_a_package_adds_a_rule(packages: list[EntryPoint]) -> None:
    packages.append(point("halfway", f"{__name__}:HALFWAY"))
    computed.load_all()
    assert scales_of([{"name": "halfway"}], pairs()[:, :1], 1).item() == 1.5
    assert scales_of([{"name": "halfway", "by": 2}], pairs()[:, :1], 1).item() == 3
    with pytest.raises(GuidanceError, match="from 0 to inf"):
        check_rule({"name": "halfway", "by": -1}, "guidance_rule")


@pytest.mark.parametrize("value", ["no_such_package:RULE", f"{__name__}:missing", "math:pi"])
def test_a_broken_package_is_named(packages: list[EntryPoint], value: str) -> None:
    packages.append(point("broken", value))
    with pytest.raises(ConfigError, match="guidance rule `broken`"):
        computed.load_all()


def test_a_function_that_is_missing_is_named(packages: list[EntryPoint]) -> None:
    packages.append(point("broken", f"{__name__}:WITHOUT_FUNCTION"))
    with pytest.raises(ConfigError, match="guidance rule `broken` cannot be loaded"):
        computed.load_all()
