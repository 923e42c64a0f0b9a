"""How exact the trust region's strength is: against bisection in float64.

    python -m benchmarks.engine.strength_error [--vocabularies 49152 152064 262144] [--out FILE]

The engine computes the largest t with KL(softmax(log p + t d) || p) <= limit in float32, by a
safeguarded Newton method, from logits of the model's type. `of the method` compares it with
bisection in float64 of the same logits. `of the type` compares it with bisection of the logits
before they were rounded to the type: what the type itself changes.

The rows are random: peaked and flat leaders, followers from near to unlike them, at scales from 1.5
to 8 and limits from 0.05 to 2 nats. Relative errors, of the rows where the region binds. `over`
says by how much of the limit the sampled distribution is too far, at most.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch

from cfg_core.blend import StrengthRows, blend, weaken

from ..report import Report, parser

TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SPREADS = (0.5, 1.5, 4.0)
APART = (0.1, 0.5, 1.5)
SCALES = (1.5, 2.5, 4.0, 8.0)
LIMITS = (0.05, 0.5, 2.0)
BISECTIONS = 40


def streams(vocabulary: int, rows: int) -> torch.Tensor:
    """Logits [2, n, vocabulary] float32: `rows` of each spread and distance."""
    generator = torch.Generator().manual_seed(0)

    def noise() -> torch.Tensor:
        return torch.randn(rows, vocabulary, generator=generator)

    pairs = [
        torch.stack([leader := noise() * spread, leader + noise() * spread * apart])
        for spread, apart in itertools.product(SPREADS, APART)
    ]
    return torch.cat(pairs, 1)


def bisected(logits: torch.Tensor, scale: float, limit: float) -> torch.Tensor:
    """The strengths [n] in float64."""
    leader, follower = torch.log_softmax(logits.double(), -1)
    push = (scale - 1) * (leader - follower)

    def fits(t: torch.Tensor) -> torch.Tensor:
        return divergences(leader + t.unsqueeze(-1) * push, leader) <= limit

    low, high = torch.zeros(len(leader)).double(), torch.ones(len(leader)).double()
    whole = fits(high)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        fit = fits(middle)
        low, high = torch.where(fit, middle, low), torch.where(fit, high, middle)
    return torch.where(whole, 1.0, low)


def divergences(scores: torch.Tensor, leader: torch.Tensor) -> torch.Tensor:
    """KL(softmax(scores) || leader) in float64, [n]."""
    logp = torch.log_softmax(scores.double(), -1)
    return (logp.exp() * (logp - leader.double())).sum(-1)


def found(logits: torch.Tensor, scale: float, limit: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The engine's strengths [n], and the divergences [n] of what it samples."""
    rows = logits.shape[1]
    weights = torch.tensor([[scale], [1 - scale]]).expand(2, rows)
    limits = StrengthRows(torch.arange(rows), torch.full((rows, 1), limit), torch.zeros(rows, 1))
    sampled, strength = weaken(logits[0], blend(logits, weights), limits)
    return strength.double(), divergences(sampled, torch.log_softmax(logits[0].double(), -1))


@torch.inference_mode()
def errors(exact: torch.Tensor, dtype: torch.dtype) -> dict[str, Any]:
    """Of all scales and limits together."""
    logits = exact.to(dtype)
    method, kind, over, bound = [], [], [], 0
    for scale, limit in itertools.product(SCALES, LIMITS):
        strength, distance = found(logits, scale, limit)
        same = bisected(logits, scale, limit)
        unrounded = same if dtype == exact.dtype else bisected(exact, scale, limit)
        binds = (same < 1) & (strength < 1)
        bound += int(binds.sum())
        method.append(((strength - same).abs() / same)[binds])
        kind.append(((strength - unrounded).abs() / unrounded)[binds])
        over.append((distance / limit - 1)[binds])
    return {
        "rows": bound,
        "method_largest": float(torch.cat(method).max()),
        "type_median": float(torch.cat(kind).median()),
        "type_largest": float(torch.cat(kind).max()),
        "over_largest": float(torch.cat(over).max()),
    }


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--vocabularies", type=int, nargs="+", default=[49_152, 152_064, 262_144])
    options.add_argument("--rows", type=int, default=2, help="of each spread and distance")
    args = options.parse_args()
    report = Report("strength_error", args)
    columns = ("rows", "method_largest", "type_median", "type_largest", "over_largest")
    report.head(
        "vocabulary",
        "logits",
        "rows that bind",
        "of the method, largest",
        "of the type, median",
        "of the type, largest",
        "over, largest",
    )
    rows = []
    for vocabulary in args.vocabularies:
        exact = streams(vocabulary, args.rows)
        for name, dtype in TYPES.items():
            row = {"vocabulary": vocabulary, "type": name, **errors(exact, dtype)}
            rows.append(row)
            report.row(vocabulary, name, *(f"{row[column]:.2g}" for column in columns))
    report.end(rows=rows)


if __name__ == "__main__":
    main()
