"""Sample pictures of all digits through the guided engine, and measure them over the scale.

    .venv/bin/python -m examples.digits.sample [--images 120] [--out RESULT.json]

The negative is `<null>`, the prompt that the model learned for pictures of any class. The seed of a
picture depends on its class and number alone, so the columns of the plot differ only in guidance.
Prints a table for docs/digits.md.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.card import card
from benchmarks.oracle import oracle_version
from examples.digits.images import (
    CLASSES,
    FOLDER,
    MODEL,
    NULL_ID,
    PIXEL_IDS,
    PIXELS,
    Split,
    class_id,
    to_text,
)

if TYPE_CHECKING:
    from vllm import LLM

os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

RESULT = FOLDER / "results" / "digits.json"
IMAGES = 120
SHOWN = 3
"""Pictures of each class in the result, for the plot."""


@dataclass(frozen=True)
class Guidance:
    """A scale, and the pixels that are guided: from `start` to before `end`."""

    scale: float
    start: int = 0
    end: int = PIXELS

    def fields(self) -> dict[str, Any]:
        """The fields of the request (docs/guidance.md)."""
        if self.scale == 1:
            return {}
        window = {"guidance_start": self.start, "guidance_end": self.end}
        return {
            "guidance_scale": self.scale,
            "negative_prompt_token_ids": [NULL_ID],
            **({} if self.is_whole else window),
        }

    @property
    def is_whole(self) -> bool:
        return (self.start, self.end) == (0, PIXELS)

    @property
    def name(self) -> str:
        scale = f"{self.scale:g}" + (" (off)" if self.scale == 1 else "")
        return scale if self.is_whole else f"{scale}, pixels {self.start} to {self.end - 1}"


SCALES = [Guidance(scale) for scale in (0.0, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)]
WINDOWS = [
    Guidance(scale, start, end) for scale in (3.0, 6.0) for start, end in ((0, 32), (32, 64))
]


def start_engine(model: Path = MODEL) -> LLM:
    from vllm import LLM

    from cfg_core.vllm_plugin import guided_engine_args

    return LLM(
        str(model),
        dtype="float32",
        max_model_len=2 * PIXELS,
        max_num_seqs=128,
        enforce_eager=True,
        kv_cache_memory_bytes=256 << 20,
        **guided_engine_args(),
    )


def sample(llm: LLM, guidance: Guidance, per_class: int, **options: Any) -> Split:
    """`per_class` pictures of each class. `options` are passed to SamplingParams."""
    from vllm import SamplingParams

    labels = np.repeat(np.arange(CLASSES, dtype=np.uint8), per_class)
    params = [
        SamplingParams(
            **{
                "temperature": 1.0,
                "seed": number,
                "max_tokens": PIXELS,
                "allowed_token_ids": PIXEL_IDS,
                "extra_args": guidance.fields(),
                **options,
            }
        )
        for number in range(len(labels))
    ]
    prompts: Any = [{"prompt_token_ids": [class_id(int(label))]} for label in labels]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return Split(np.array([out.outputs[0].token_ids for out in outputs], np.uint8), labels)


def point(llm: LLM, judge: Any, guidance: Guidance, per_class: int) -> dict[str, Any]:
    started = time.perf_counter()
    found = sample(llm, guidance, per_class)
    seconds = time.perf_counter() - started
    shown = [
        [to_text(image) for image in found.images[found.labels == label][:SHOWN]]
        for label in range(CLASSES)
    ]
    measured = judge.measure(found)
    print(f"{row(guidance.name, measured)} {seconds:.0f} s", flush=True)
    return {**asdict(guidance), **measured, "seconds": round(seconds, 1), "shown": shown}


def row(name: str, found: dict[str, Any]) -> str:
    """A line of the table in docs/digits.md."""
    low, high = found["accuracy_interval"]
    return (
        f"| {name} | {found['accuracy']:.1%} ({100 * low:.1f} to {100 * high:.1f}) "
        f"| {_with_error(found, 'distance')} | {_with_error(found, 'kinds')} "
        f"| {found['copies']:.1%} |"
    )


def table(result: dict[str, Any]) -> list[str]:
    points = [(_guidance(found).name, found) for found in result["points"]]
    return [
        "| scale | the judge sees the digit | distance | kinds of 30 | copies |",
        "|---|---|---|---|---|",
        *(row(name, found) for name, found in points),
        row("held-out pictures", result["real"]),
    ]


def _with_error(found: dict[str, Any], name: str) -> str:
    error = found[f"{name}_error"]
    return f"{found[name]:.1f}" + ("" if error is None else f" ± {error:.1f}")


def _guidance(found: dict[str, Any]) -> Guidance:
    return Guidance(found["scale"], found["start"], found["end"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", type=int, default=IMAGES, help="of each class and point")
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    llm = start_engine(args.model)
    from examples.digits.judge import Judge  # after vLLM, which imports scikit-learn if it can

    judge = Judge()
    points = [point(llm, judge, guidance, args.images) for guidance in (*SCALES, *WINDOWS)]
    described = card() | {"scikit-learn": oracle_version("scikit-learn")}
    result = {"card": described, "real": judge.real(), "points": points}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print("\n".join(table(result)))


if __name__ == "__main__":
    main()
