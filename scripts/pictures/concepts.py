"""Draw the pictures of docs/concepts.md.

    python scripts/pictures/concepts.py FOLDER            draws them from docs/concepts/moon.json
    python scripts/pictures/concepts.py --measure         makes that file from the chat model

Each picture has a light ground of its own, so that it can be read on a light and on a dark page.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parents[2]
NUMBERS = ROOT / "docs" / "concepts" / "moon.json"
MODEL = ROOT / "models" / "SmolLM2-135M-Instruct"

INK, MUTED, LINE, GROUND = "#1b2733", "#5a6672", "#c6cdd4", "#fbfcfd"
CONDITIONAL, NEGATIVE, BLEND, PLAIN = "#1f5fa8", "#c2571a", "#1e7b4d", "#7a6aa8"
PALE = {CONDITIONAL: "#d6e4f3", NEGATIVE: "#f6dfd0", BLEND: "#d3eadd", PLAIN: "#e4dff0"}

CONTEXT, QUESTION, ANSWER = "The moon is green.", "What colour is the moon?", "The moon is"
SCALE, SHOWN = 1.5, 5


class Picture:
    """Shapes of an SVG, drawn from the top left."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.size, self.title = (width, height), title
        self.shapes: list[str] = []

    def box(
        self,
        at: tuple[float, float],
        size: tuple[float, float],
        fill: str = "none",
        stroke: str = LINE,
        dashed: bool = False,
    ) -> None:
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        self.shapes.append(
            f'<rect x="{at[0]:g}" y="{at[1]:g}" width="{size[0]:g}" height="{size[1]:g}" rx="4"'
            f' fill="{fill}" stroke="{stroke}"{dash}/>'
        )

    def text(
        self,
        at: tuple[float, float],
        words: str,
        color: str = INK,
        anchor: str = "start",
        size: int = 13,
        bold: bool = False,
    ) -> None:
        weight = ' font-weight="600"' if bold else ""
        self.shapes.append(
            f'<text x="{at[0]:g}" y="{at[1]:g}" fill="{color}" text-anchor="{anchor}"'
            f' font-size="{size}"{weight}>{escape(words)}</text>'
        )

    def line(
        self, points: Sequence[tuple[float, float]], color: str = MUTED, arrow: bool = True
    ) -> None:
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        end = ' marker-end="url(#arrow)"' if arrow else ""
        self.shapes.append(
            f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.6"{end}/>'
        )

    def write(self, path: Path) -> None:
        width, height = self.size
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
            f' width="{width}" height="{height}" role="img"'
            ' font-family="system-ui, sans-serif">\n'
            f"<title>{escape(self.title)}</title>\n"
            '<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7"'
            f' markerHeight="7" orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="{MUTED}"/></marker>'
            "</defs>\n"
            f'<rect x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8"'
            f' fill="{GROUND}" stroke="{LINE}"/>\n'
        )
        path.write_text(head + "\n".join(self.shapes) + "\n</svg>\n", encoding="utf-8")


# ---- the pictures --------------------------------------------------------------------------------


def blend() -> Picture:
    """Two prompts, two rows, and the row that is sampled, with measured probabilities."""
    rows = json.loads(NUMBERS.read_text(encoding="utf-8"))["rows"]
    made = Picture(860, 330, "Two streams of one model, and the blend of their predictions")
    panels = (
        (20, "conditional stream", f"{CONTEXT} {QUESTION}", CONDITIONAL, "conditional"),
        (305, "negative stream", QUESTION, NEGATIVE, "negative"),
        (
            590,
            "blend, which is sampled",
            "negative + 1.5 * (conditional - negative)",
            BLEND,
            "blend",
        ),
    )
    for left, name, prompt, color, row in panels:
        made.text((left, 32), name, color, bold=True, size=14)
        made.box((left, 44), (250, 50), PALE[color], color)
        made.text((left + 8, 64), prompt, size=10)
        tail = f"{ANSWER} ..." if row != "blend" else "of log-probabilities"
        made.text((left + 8, 84), tail, MUTED, size=10)
        for place, (word, share) in enumerate(rows[row][:SHOWN]):
            _bar(made, (left, 122 + 30 * place), word, share, color)
    made.text((20, 294), '"green" is an unlikely word in both streams.', MUTED, size=12)
    made.text(
        (20, 313),
        "The passage made it much likelier than it was, so it is first in the blend"
        " (measured on SmolLM2-135M-Instruct).",
        MUTED,
        size=12,
    )
    return made


def _bar(made: Picture, at: tuple[float, float], word: str, share: float, color: str) -> None:
    left, top = at
    is_green = word.strip() == "green"
    made.text((left + 58, top + 13), word.strip(), anchor="end", size=12, bold=is_green)
    made.box(
        (left + 66, top), (max(1.5, share * 250), 17), color if is_green else PALE[color], color
    )
    made.text((left + 72 + share * 250, top + 13), _percent(share), MUTED, size=11)


def _percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.005 else f"{share:.2%}"


def lockstep() -> Picture:
    """Steps of one engine: two prompts of unequal length, then joint steps."""
    made = Picture(860, 300, "Steps of an engine: both streams sample in the same steps")
    left, width = 150, 76
    made.text((20, 34), "step", MUTED, size=12)
    for step in range(9):
        made.text((left + width * step + width / 2, 34), str(step + 1), MUTED, "middle", 12)
    rows = (
        ("conditional", CONDITIONAL, ["prompt", "hold", "hold", *["token"] * 6]),
        ("negative", NEGATIVE, ["prompt", "prompt", "prompt", *["token"] * 6]),
        ("plain request", PLAIN, ["prompt", *["token"] * 8]),
    )
    for place, (name, color, cells) in enumerate(rows):
        top = 52 + 52 * place + (16 if place == 2 else 0)
        made.text((20, top + 24), name, color, bold=True)
        for step, cell in enumerate(cells):
            at, size = (left + width * step + 3, top), (width - 6, 38)
            is_held = cell == "hold"
            made.box(at, size, "none" if is_held else PALE[color], color, dashed=is_held)
            label = "waits" if is_held else "reads" if cell == "prompt" else "token"
            shade = MUTED if is_held else INK
            made.text((at[0] + size[0] / 2, top + 24), label, shade, "middle", 12)
    made.box((left + width * 3 - 1, 46), (width * 6 + 2, 102), "none", BLEND)
    made.text((left + width * 6, 164), "joint steps", BLEND, "middle", 12, bold=True)
    notes = (
        "The negative's prompt is longer. The conditional stream is held one token before its end,",
        "so that no token is sampled without the other stream. A request without guidance shares",
        "the steps, and waits for nobody.",
    )
    for place, note in enumerate(notes):
        made.text((20, 246 + 18 * place), note, MUTED, size=12)
    return made


def pool() -> Picture:
    """The KV pool's blocks by role, with a boundary that moves."""
    made = Picture(860, 270, "One KV pool, used by two roles")
    columns, size = 30, 25
    for top, title, leaders, followers in (
        (44, "short negatives: kv_split elastic", 22, 5),
        (114, "long negatives: kv_split elastic", 15, 14),
        (184, "any negatives: kv_split even, where no role passes the middle", 15, 5),
    ):
        made.text((20, top - 8), title, MUTED, size=12)
        for place in range(columns):
            from_right = columns - 1 - place
            fill, stroke = GROUND, LINE
            if place < leaders:
                fill, stroke = PALE[CONDITIONAL], CONDITIONAL
            elif from_right < followers:
                fill, stroke = PALE[NEGATIVE], NEGATIVE
            made.box((20 + place * (size + 2), top), (size, size), fill, stroke)
    middle = 20 + columns / 2 * (size + 2) - 1
    made.line([(middle, 178), (middle, 216)], INK, arrow=False)
    for left, color, words in (
        (20, CONDITIONAL, "leaders: conditional streams and plain requests"),
        (350, NEGATIVE, "followers: negative streams"),
        (580, LINE, "free"),
    ):
        made.box((left, 234), (16, 16), PALE.get(color, GROUND), color)
        made.text((left + 24, 247), words, size=12)
    return made


def groups() -> Picture:
    """The rows of one step: a plain request, a pair, and a group of four streams."""
    made = Picture(860, 300, "One forward pass for plain requests, pairs and larger groups")
    made.text((20, 32), "streams in one step", MUTED, size=12)
    made.text((340, 32), "one forward", MUTED, size=12)
    made.text((560, 32), "blend: one row each", MUTED, size=12)
    made.text((755, 32), "tokens", MUTED, size=12)
    requests = (
        ("plain request", ((PLAIN, "prompt"),)),
        ("pair", ((CONDITIONAL, "c   weight 1.5"), (NEGATIVE, "u   weight -0.5"))),
        (
            "group of four",
            (
                (CONDITIONAL, "c   weight 2"),
                (NEGATIVE, "u1   weight -0.5"),
                (NEGATIVE, "u2   weight -0.75"),
                (NEGATIVE, "u3   weight 0.25"),
            ),
        ),
    )
    top = 48
    made.box((340, top), (110, 230), "#eef1f4", LINE)
    made.text((395, top + 112), "the model,", anchor="middle")
    made.text((395, top + 130), "one batch", anchor="middle")
    for name, streams in requests:
        first = top
        for color, words in streams:
            made.box((130, top), (150, 24), PALE[color], color)
            made.text((140, top + 17), words, size=12)
            made.line([(284, top + 12), (336, top + 12)])
            top += 30
        middle = (first + top - 6) / 2
        made.text((20, middle + 5), name, bold=True, size=12)
        color = PLAIN if len(streams) == 1 else BLEND
        made.line([(454, middle), (556, middle)])
        made.box((560, middle - 12), (130, 24), PALE[color], color)
        made.text(
            (625, middle + 5), "row" if len(streams) == 1 else "blended row", INK, "middle", 12
        )
        made.line([(694, middle), (750, middle)])
        made.box((755, middle - 12), (64, 24), PALE[color], color)
        made.text((787, middle + 5), "token", INK, "middle", 12)
        top += 12
    return made


def windows() -> Picture:
    """The scale over the output tokens: a window, and a schedule."""
    made = Picture(860, 280, "Guidance that changes over the output tokens")
    for left, title, steps in (
        (60, "guidance_scale: 2, guidance_start: 4, guidance_end: 12", [(0, 1), (4, 2), (12, 1)]),
        (490, "guidance_schedule: [[0, 3.0], [8, 1.5]]", [(0, 3), (8, 1.5)]),
    ):
        bottom, per_token, per_scale = 210.0, 20, 52
        made.text((left - 30, 32), title, bold=True, size=12)
        for mark in (1, 2, 3):
            level = bottom - per_scale * (mark - 1)
            made.line([(left, level), (left + 16 * per_token, level)], LINE, arrow=False)
            made.text((left - 12, level + 4), str(mark), MUTED, "end", 12)
        for token in range(0, 17, 4):
            made.text((left + token * per_token, bottom + 22), str(token), MUTED, "middle", 12)
        made.text((left + 8 * per_token, bottom + 46), "output token", MUTED, "middle", 12)
        ends = [first for first, _ in steps[1:]] + [16]
        points: list[tuple[float, float]] = []
        for (first, scale), end in zip(steps, ends, strict=True):
            level = bottom - per_scale * (scale - 1)
            points += [(left + first * per_token, level), (left + end * per_token, level)]
            if scale != 1:
                made.box(
                    (left + first * per_token, level),
                    ((end - first) * per_token, bottom - level),
                    PALE[BLEND],
                    "none",
                )
            words = "off: a plain request" if scale == 1 else f"scale {scale:g}"
            middle = left + (first + end) / 2 * per_token
            narrow = (end - first) * per_token < 110 and scale == 1
            made.text((middle, level - 8), "off" if narrow else words, INK, "middle", 12)
        made.line(points, BLEND, arrow=False)
    return made


PICTURES = {
    "blend": blend,
    "lockstep": lockstep,
    "pool": pool,
    "groups": groups,
    "windows": windows,
}


# ---- the numbers ---------------------------------------------------------------------------------


def measure() -> dict[str, object]:
    """The likeliest next words of both streams and of their blend, on the chat model in float32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)

    def row(question: str) -> torch.Tensor:
        asked = [{"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
        ids = tokenizer(text + ANSWER, add_special_tokens=False)["input_ids"]
        with torch.no_grad():
            found: torch.Tensor = model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
        return found

    conditional, negative = row(f"{CONTEXT} {QUESTION}"), row(QUESTION)
    rows = {
        "conditional": conditional,
        "negative": negative,
        "blend": (negative + SCALE * (conditional - negative)).log_softmax(-1),
    }
    (green,) = tokenizer(" green", add_special_tokens=False)["input_ids"]
    return {
        "scale": SCALE,
        "rows": {name: _likeliest(x, green, tokenizer) for name, x in rows.items()},
    }


def _likeliest(row: object, green: int, tokenizer: object) -> list[tuple[str, float]]:
    """The likeliest tokens of a row with their probabilities, `green` always among them."""
    import torch

    assert isinstance(row, torch.Tensor)
    best = [int(token) for token in row.topk(SHOWN).indices]
    if green not in best:
        best[-1] = green
    decode = tokenizer.decode  # type: ignore[attr-defined]
    return [(decode(token), round(float(row[token].exp()), 4)) for token in best]


def main() -> None:
    if sys.argv[1:] == ["--measure"]:
        NUMBERS.write_text(json.dumps(measure(), indent=1) + "\n", encoding="utf-8")
        return
    folder = Path(sys.argv[1])
    for name, drawn in PICTURES.items():
        drawn().write(folder / f"{name}.svg")


if __name__ == "__main__":
    main()
