"""The expected tokens: Hugging Face `generate`, float32, greedy, one request at a time.

This module does not use vLLM. `Oracle` computes and caches the answers of one model. `PAIRS` and
`SCALES` are the requests that every architecture answers (12 pairs x 6 scales).
"""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from cfg_core.reference import Generation, guided_generate, plain_generate
from tests.engine.tiny_models import NUM_SPECIAL, PAD, VOCAB_SIZE

NEW_TOKENS = 24
SCALES = (-1.0, 0.0, 0.5, 1.5, 3.0, 7.5)
LENGTHS = (
    *((12, 5), (5, 12), (40, 1), (1, 40), (33, 33), (64, 17)),
    *((17, 64), (100, 3), (3, 100), (150, 120), (16, 16), (32, 150)),
)
"""(prompt tokens, negative tokens): negatives shorter, longer and as long, around the block size
32."""

MIN_MARGIN = 5.0
"""The least gap between the reference's two best tokens, in units of `rounding`.

With this gap, rounding decides no token.
"""


def rounding(scale: float) -> float:
    """The allowed difference of float32 log-probabilities of two implementations under guidance.

    Two correct engines differ by up to 1e-5 without guidance (measured: 8e-6), because they add in
    another order. The blend multiplies that by |s| + |1 - s|. 2e-5 leaves a factor of two.
    """
    return 2e-5 * (abs(scale) + abs(1 - scale))


@dataclass(frozen=True)
class Case:
    """One guided request. There are 72 of them: for each pair, every scale."""

    prompt: tuple[int, ...]
    negative: tuple[int, ...]
    scale: float


def random_ids(rng: random.Random, length: int) -> tuple[int, ...]:
    return tuple(rng.randrange(NUM_SPECIAL, VOCAB_SIZE) for _ in range(length))


def make_pairs(seed: int = 7) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    rng = random.Random(seed)
    return [(random_ids(rng, prompt), random_ids(rng, negative)) for prompt, negative in LENGTHS]


PAIRS = make_pairs()
CASES = [Case(prompt, negative, scale) for prompt, negative in PAIRS for scale in SCALES]
PROMPTS = [prompt for prompt, _ in PAIRS]


class Oracle:
    """The answers of the model in `folder`. They are computed on first use, and then cached.

    takes_suffixes: whether engines of this model take a `negative_suffix`.
    """

    takes_suffixes = True

    def __init__(self, folder: Path) -> None:
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self.model.generation_config.eos_token_id = None  # as SamplingParams(ignore_eos=True)

    @functools.cached_property
    def guided(self) -> list[list[int]]:
        """HF `generate(guidance_scale=..., negative_prompt_ids=...)` of each of CASES."""
        return [self.hf(case.prompt, scale=case.scale, negative=case.negative) for case in CASES]

    @functools.cached_property
    def plain(self) -> list[list[int]]:
        """HF `generate` of each of PROMPTS, without guidance."""
        return [self.hf(prompt) for prompt in PROMPTS]

    @functools.cached_property
    def margin(self) -> float:
        """The least gap between the two best scores, in units of `rounding`.

        It is the least of all steps of CASES and PROMPTS.
        """
        guided = (
            top_gap_along(self.model, case, output) / rounding(case.scale)
            for case, output in zip(CASES, self.guided, strict=True)
        )
        plain = (
            plain_generate(self.model, p, max_new_tokens=NEW_TOKENS).min_gap / rounding(1.0)
            for p in PROMPTS
        )
        return min(*guided, *plain)

    def hf(
        self,
        prompt: tuple[int, ...],
        *,
        scale: float | None = None,
        negative: tuple[int, ...] | None = None,
        max_new_tokens: int = NEW_TOKENS,
        **options: Any,
    ) -> list[int]:
        """Greedy tokens of one `generate` call."""
        ids = torch.tensor([prompt])
        if scale is not None:
            options["guidance_scale"] = scale
        if negative is not None:
            options["negative_prompt_ids"] = torch.tensor([negative])
        out = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=max_new_tokens,
            pad_token_id=PAD,
            **options,
        )
        tokens: list[int] = out[0, len(prompt) :].tolist()
        return tokens

    def reference(self, case: Case, **options: Any) -> Generation:
        """The project's own loop on the same model, for requests other than CASES."""
        options = {"max_new_tokens": NEW_TOKENS, **options}
        text = guided_generate(self.model, case.prompt, case.negative, scale=case.scale, **options)
        assert text.min_gap > 2 * rounding(case.scale), (
            "rounding could decide a token: choose another request"
        )
        return text


@torch.inference_mode()
def top_gap_along(model: PreTrainedModel, case: Case, output: list[int]) -> float:
    """The least gap of the guided scores along `output`.

    Each stream is computed in one forward pass. The model is causal, so row t is step t.
    """
    rows = []
    for start in (case.prompt, case.negative):
        logits = model(torch.tensor([[*start, *output[:-1]]])).logits[0, len(start) - 1 :]
        rows.append(torch.log_softmax(logits.float(), dim=-1))
    conditional, negative = rows
    best = (negative + case.scale * (conditional - negative)).topk(2, dim=-1).values
    return float((best[:, 0] - best[:, 1]).min())
