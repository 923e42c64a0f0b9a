"""What rounding does to the guided distribution: blended before the head, or after it.

    python -m benchmarks.engine.blend_error [--scales 0.5 1.5 2.5 4 8] [--out FILE]

The physics. After the head, each stream's logits are rounded to the type of the model, and the
blend multiplies that error by |s| and |1 - s|. Before the head, the blend is computed in float32
from the hidden states, and rounded once. So an early blend should be more exact, and the more so
the larger the scale.

The streams are the last tokens of the prompts of benchmarks/instructions (the conversation, and the
same without the instruction). Their hidden states are those of the chat model in float32. Both
blends get these states, and the head, rounded to the type. They are compared with float64 from
states and head as they are: the mean Kullback-Leibler divergence, the mean of the largest error
among the ten likeliest tokens (in log-probability), and how often the likeliest token is the same.
"""

from __future__ import annotations

from typing import Any

import torch

from cfg_core.blend import blend

from ..instructions import prompts
from ..llm import CHAT
from ..report import Report, parser

TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
LIKELIEST = 10


@torch.inference_mode()
def states() -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states [2, prompts, hidden size] of both streams, and the head's weights, float32."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(CHAT, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(CHAT)
    found: list[list[torch.Tensor]] = [[], []]
    for prompt in prompts.prompts():
        for stream, messages in zip(found, (prompt.conditional(), prompt.negative()), strict=True):
            ids = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
            stream.append(model.model(**ids).last_hidden_state[0, -1])
    return torch.stack([torch.stack(stream) for stream in found]), model.lm_head.weight


def exact(hidden: torch.Tensor, head: torch.Tensor, scale: float) -> torch.Tensor:
    """Guided log-probabilities [prompts, vocabulary], computed in float64."""
    rows = (hidden.double() @ head.double().T).log_softmax(-1)
    return (rows[1] + scale * (rows[0] - rows[1])).log_softmax(-1)


def early(hidden: torch.Tensor, head: torch.Tensor, scale: float) -> torch.Tensor:
    rows = hidden.float()
    blended = (rows[1] + scale * (rows[0] - rows[1])).to(hidden.dtype)
    return (blended @ head.T).double().log_softmax(-1)


def late(hidden: torch.Tensor, head: torch.Tensor, scale: float) -> torch.Tensor:
    weights = torch.tensor([[scale], [1 - scale]]).expand(2, hidden.shape[1])
    return blend(hidden @ head.T, weights).double().log_softmax(-1)


def errors(found: torch.Tensor, expected: torch.Tensor) -> dict[str, float]:
    likeliest = expected.topk(LIKELIEST, -1).indices
    wrong = (found - expected).gather(-1, likeliest).abs().amax(-1)
    divergence = (expected.exp() * (expected - found)).sum(-1)
    same = found.argmax(-1) == expected.argmax(-1)
    return {
        "divergence": float(divergence.mean()),
        "largest_error": float(wrong.mean()),
        "same_token": float(same.double().mean()),
    }


@torch.inference_mode()
def main() -> None:
    options = parser(__doc__)
    options.add_argument("--scales", type=float, nargs="+", default=[0.5, 1.5, 2.5, 4, 8])
    args = options.parse_args()
    hidden, head = states()
    report = Report("blend-error", args, model=CHAT.name, prompts=hidden.shape[1])
    report.head(
        *("type", "scale", "divergence: late, early", "largest error: late, early", "same token")
    )
    rows: list[dict[str, Any]] = []
    for name, dtype in TYPES.items():
        for scale in args.scales:
            expected = exact(hidden, head, scale)
            given = hidden.to(dtype), head.to(dtype), scale
            found = {"late": errors(late(*given), expected)}
            found["early"] = errors(early(*given), expected)
            rows.append({"type": name, "scale": scale, **found})
            cells = [
                ", ".join(format(found[way][key], form) for way in ("late", "early"))
                for key, form in (
                    ("divergence", ".2e"),
                    ("largest_error", ".2e"),
                    ("same_token", ".3f"),
                )
            ]
            report.row(name, f"{scale:g}", *cells)
    report.end(rows=rows)


if __name__ == "__main__":
    main()
