"""Rules: functions that compute the scale of each token of a pair from the pair's two rows.

    guided = negative + scale * (conditional - negative)        on log-softmax

They are functions of one position's rows, so drafts stay exact under them. Nothing here waits for
the device. cfg_core/params/rules.py has their names and parameters, and says how a package adds
one. JSD(p, q) is the Jensen-Shannon divergence with the natural logarithm, from 0 to log 2:

    JSD(p, q) = KL(p || m) / 2 + KL(q || m) / 2,  m = (p + q) / 2
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from cfg_core.blend.formula import LARGEST_WEIGHT, LEAST
from cfg_core.errors import ConfigError
from cfg_core.params import Strength
from cfg_core.params.rules import kinds

LEAST_PROBABILITY = 1e-37
"""Instead of a probability of 0, whose logarithm no other number can be subtracted from."""

Compute: TypeAlias = Callable[[Tensor, Tensor, Tensor, Mapping[str, Tensor]], Tensor]
"""(conditional [n, V], negative [n, V], scale [n, 1], arguments [n, 1] each) -> scales [n, 1].

The rows are log-probabilities, float32, with -inf for what a stream forbids. `scale` is
guidance_scale, for rules that read it. NaN counts as 1: the token is the conditional stream's own.
"""


def adacad(
    conditional: Tensor, negative: Tensor, scale: Tensor, arguments: Mapping[str, Tensor]
) -> Tensor:
    """`1 + JSD(conditional, negative) + offset`: stronger where the streams disagree.

    Source: Wang et al., AdaCAD, arXiv 2409.07394 (its alpha is the divergence).
    """
    return 1 + js_divergence(conditional, negative) + arguments["offset"]


def arr(
    conditional: Tensor, negative: Tensor, scale: Tensor, arguments: Mapping[str, Tensor]
) -> Tensor:
    """`1 + d` where the conditional stream is surer of its token than the negative, else `1 - d`.

    d is JSD / log 2, from 0 to 1. A stream is as sure as its most likely token is likely.

    Source: Jiang et al., Adaptive Regime Routing, arXiv 2606.10298.
    """
    share = (js_divergence(conditional, negative) / math.log(2)).clamp(0, 1)
    surer = conditional.amax(-1, keepdim=True) > negative.amax(-1, keepdim=True)
    return torch.where(surer, 1 + share, 1 - share)


def nwcad(
    conditional: Tensor, negative: Tensor, scale: Tensor, arguments: Mapping[str, Tensor]
) -> Tensor:
    """0, 1 or guidance_scale: the negative alone, the conditional alone, or the blend.

    0 where JSD is at most `max_divergence` and the negative's margin at least `negative_margin`;
    else 1 where the conditional's margin is at least `conditional_margin`. A margin is the
    probability of the most likely token less that of the second.

    Source: Tao and Agrawal, No-Worse Context-Aware Decoding, arXiv 2604.16686.
    """
    agree = js_divergence(conditional, negative) <= arguments["max_divergence"]
    stays = agree & (_margin(negative) >= arguments["negative_margin"])
    is_sure = _margin(conditional) >= arguments["conditional_margin"]
    return torch.where(stays, 0.0, torch.where(is_sure, 1.0, scale))


def js_divergence(p: Tensor, q: Tensor) -> Tensor:
    """JSD of rows of log-probabilities [n, V], in nats: [n, 1]."""
    p_exp, q_exp = p.exp(), q.exp()
    middle = ((p_exp + q_exp) / 2).clamp_(min=LEAST_PROBABILITY).log_()
    halves = _divergence(p, p_exp, middle) + _divergence(q, q_exp, middle)
    return (halves / 2).clamp(min=0)


def _divergence(logp: Tensor, p: Tensor, other: Tensor) -> Tensor:
    """KL(p || other), [n, 1]. `other` is finite, so that forbidden tokens add 0."""
    found: Tensor = torch.linalg.vecdot(p, logp.clamp(min=LEAST).sub_(other))
    return found.unsqueeze(-1)


def _margin(logp: Tensor) -> Tensor:
    first, second = logp.topk(2).values.exp().unsqueeze(-1).unbind(-2)
    return first - second


@functools.cache
def function_of(name: str) -> Compute:
    """The function of a rule. Raises ConfigError if a package's cannot be loaded."""
    module, _, attribute = kinds()[name].compute.partition(":")
    try:
        found: Compute = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"guidance rule `{name}` cannot be loaded: {error}.") from error
    return found


def load_all() -> None:
    """Load the functions of all rules. Raises ConfigError if one cannot be loaded."""
    for name in kinds():
        function_of(name)


class RuleRows(NamedTuple):
    """Rows whose scale the same rule computes.

    rows: [n] int64, their places among the blended rows.
    arguments: [n, 1] float32 each.
    """

    compute: Compute
    rows: Tensor
    arguments: dict[str, Tensor]

    @classmethod
    def of(
        cls, strengths: Sequence[Strength | None], put: Callable[[Any, Any], Tensor]
    ) -> tuple[RuleRows, ...]:
        """The rules of rows, in order; empty if no row has one.

        put: makes a tensor of values and a numpy dtype.
        """
        by_name: dict[str, list[tuple[int, Mapping[str, float]]]] = {}
        for row, one in enumerate(strengths):
            if one is not None and one.rule is not None:
                by_name.setdefault(one.rule.name, []).append((row, dict(one.rule.arguments)))
        return tuple(
            cls(
                function_of(name),
                put([row for row, _ in own], np.int64),
                {key: put([[given[key]] for _, given in own], np.float32) for key in own[0][1]},
            )
            for name, own in by_name.items()
        )

    def part(self, part: slice) -> RuleRows:
        """Some of the rows."""
        arguments = {key: values[part] for key, values in self.arguments.items()}
        return RuleRows(self.compute, self.rows[part], arguments)

    def scales(self, pair_2NV: Tensor, scale_N: Tensor) -> Tensor:
        """The scales of these rows, [n] float32.

        pair_2NV: their streams' logits, any float dtype, the conditional's first.
        scale_N: [n] float32, their guidance_scale.
        """
        logp_2NV = torch.log_softmax(pair_2NV.float(), dim=-1)
        conditional_NV, negative_NV = logp_2NV
        found_N1 = self.compute(conditional_NV, negative_NV, scale_N.unsqueeze(-1), self.arguments)
        return found_N1[:, 0].nan_to_num(nan=1.0).clamp(-LARGEST_WEIGHT, LARGEST_WEIGHT)
