"""The page docs/models.md, made from the table of architectures and what was measured of them.

`python -m tools.architectures` measures. This module needs neither vLLM nor a model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from page_tables import table as markdown_table

from tools.architectures import results, table
from tools.architectures.rows import HF, Row

PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"

HEAD = """# Models
Guidance works on the tokens' log-probabilities, so it does not depend on the architecture of a
model. But engines do: a model may have windows, latent attention, experts, recurrent states, or a
head that cannot be blended. So every architecture for text generation in vLLM {vllm}'s registry was
tried under guidance, on a CPU, and models that read images were driven by text.

**{equal} of {all} architectures gave the reference's tokens.** For the others, the reason stands in
[the last table](#not-run). One is refused, because it cannot be exact; the others need kernels that
a CPU does not have, or fail without guidance, too. Measured: {dates}.

Each row is a tiny model with random weights, so that any error changes its text. It answers {cases}
guided requests of 1 to 150 tokens, at three scales: in one batch; again, on cached prefixes; beside
plain requests; and in steps of 16 tokens, with so few blocks that groups are preempted. Two oracles
say what is right:
- *transformers*: the loop of `cfg_core/reference.py` on the model of Hugging Face transformers, in
  float32. Every token must be the same.
- *stock vLLM*: the log-probabilities of both streams, from vLLM without the plugin, blended in
  float32. Every token must be the most likely one: in float32 within 1e-4 times `|s| + |1 - s|`, in
  bfloat16 within 0.5 times that, and there nine of ten tokens exactly. It is used where
  transformers has no such model, where vLLM itself differs from transformers, or where the model
  runs in another type than float32.

"Preempted" is how often a group was preempted. It is 0 where one block holds a whole text, which is
so for recurrent states. "Head" is where groups are blended: before the model's head if it is
affine, which is tried at start, else after it. This page is written by `make pages`.
`python -m tools.architectures --all` measures again, in half an hour.
"""

FORMATS = """## Formats
The same for types, quantised weights and caches, as far as vLLM's CPU build has them. The oracle is
stock vLLM.
"""

NOT_RUN = """## Not run
Tried, and not possible on a CPU. The last column is what vLLM said.
"""


def page() -> str:
    """The text of docs/models.md."""
    found = results.load()
    good = [row for row in table.ARCHITECTURES if equal(row, found)]
    head = HEAD.format(
        vllm=next(iter(found.values()))["vllm"],
        equal=len(good),
        all=len(table.ARCHITECTURES),
        cases=results.NUM_CASES,
        dates=" to ".join(dict.fromkeys((min(dates(found)), max(dates(found))))),
    )
    return "\n".join(
        [
            head,
            "## Kinds\n" + kinds(good),
            "## Architectures\n" + architectures(good, found),
            FORMATS + formats([row for row in table.FORMATS if equal(row, found)], found),
            NOT_RUN + not_run([row for row in table.ROWS if not equal(row, found)], found),
        ]
    )


def equal(row: Row, found: dict[str, Any]) -> bool:
    return bool(found[row.label]["outcome"] == "equal")


def dates(found: dict[str, Any]) -> list[str]:
    return [one["date"] for one in found.values()]


def kinds(rows: Sequence[Row]) -> str:
    """How many architectures of each kind were equal."""
    counts = Counter(kind for row in rows for kind in row.kinds)
    cells = ((kind, str(n)) for kind, n in counts.most_common())
    return f"{markdown_table(('kind', 'equal'), cells)}\n"


def architectures(rows: Sequence[Row], found: dict[str, Any]) -> str:
    head = ("architecture", "kind", "type", "oracle", "head", "preempted", "remark")
    cells = (
        (
            f"`{row.name}`",
            ", ".join(row.kinds),
            row.dtype,
            "transformers" if row.oracle == HF else "stock vLLM",
            "before" if found[row.label]["affine_head"] else "after",
            str(found[row.label]["preemptions"]),
            row.note,
        )
        for row in sorted(rows, key=lambda row: row.name.lower())
    )
    return f"{markdown_table(head, cells)}\n"


def formats(rows: Sequence[Row], found: dict[str, Any]) -> str:
    head = ("format", "model", "type", "not exactly the best", "preempted")
    cells = (
        (
            row.label,
            f"`{row.name}`",
            row.dtype,
            "{inexact} of {tokens} tokens".format(**found[row.label]["verdict"]),
            str(found[row.label]["preemptions"]),
        )
        for row in rows
    )
    return f"{markdown_table(head, cells)}\n"


def not_run(rows: Sequence[Row], found: dict[str, Any]) -> str:
    head = ("model or format", "kind", "why", "error")
    cells = (
        (
            row.label if row in table.FORMATS else f"`{row.label}`",
            ", ".join(row.kinds),
            row.missing,
            f"`{error(found[row.label])}`",
        )
        for row in sorted(rows, key=lambda row: row.label.lower())
    )
    return f"{markdown_table(head, cells)}\n"


def error(result: dict[str, Any]) -> str:
    """The first words of what was raised."""
    text = str(result.get("error", "; ".join(result.get("problems", ()))))
    short = text if len(text) <= 150 else f"{text[:147]}..."
    return short.replace("|", "/").replace("`", "'")
