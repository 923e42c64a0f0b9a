"""Structured output under guidance: random schemas, expressions, choices and grammars.

The texts obey them at every scale. vLLM masks the logits before it samples. Blending masked rows
would give NaN at scale 0, and +inf below it, so the mask is applied after the blend here. Plain
requests in the same batch must not change.
"""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.engine.engines import Engine, differences, guided, plain, tokens
from tests.engine.oracle import PROMPTS, Case, Oracle

pytestmark = pytest.mark.slow
IS_V2 = os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1"
SCALES = (-1.0, 0.0, 0.5, 1.5, 5.0)
GRAMMARS = int(os.environ.get("CFG_SERVE_GRAMMARS", "1" if IS_V2 else "50"))
"""Number of structures of each of four kinds."""
MAX_TOKENS = 200
TEXTS = ["Once upon a time", "The sun rose over", "A grey cat and a", "q"]
"""Prompts of whole characters.

vLLM's detokenizer joins a cut-off character of the prompt to the answer's text.
"""

Check = Callable[[str], bool]


@pytest.fixture(scope="module")
def engine(model_folder: Callable[[str], Path]) -> Iterator[Engine]:
    grammar = {"backend": "xgrammar", "disable_any_whitespace": True}
    engine = Engine(
        model_folder("llama"),
        structured_outputs_config=grammar,
        max_model_len=512,
        num_gpu_blocks_override=512,
        max_num_batched_tokens=256,
        max_num_seqs=64,
    )
    yield engine
    engine.close()


def random_regex(rng: random.Random) -> tuple[dict[str, Any], Check]:
    atoms = ["[a-f]", "[0-9]", "[A-Z]", "(red|blue)", "(ab|cd)", "x", "-", "[^a-z ]"]
    parts = [
        rng.choice(atoms) + rng.choice(["", "?", "{1,3}", "{2}", "{0,4}"])
        for _ in range(rng.randrange(1, 6))
    ] + ["z"]
    pattern = "".join(parts)
    return {"regex": pattern}, lambda text: re.fullmatch(pattern, text) is not None


def random_choice(rng: random.Random) -> tuple[dict[str, Any], Check]:
    words = [
        "".join(rng.choices("abcdefgh ", k=rng.randrange(1, 9))).strip() or "a"
        for _ in range(rng.randrange(1, 6))
    ]
    return {"choice": sorted(set(words))}, lambda text: text in words


def random_value(rng: random.Random, depth: int) -> dict[str, Any]:
    kinds = ["integer", "boolean", "enum", "string", *["object", "array"] * (depth > 0)]
    kind = rng.choice(kinds)
    if kind == "integer":
        return {"type": "integer", "minimum": 0, "maximum": rng.choice([9, 99, 1000])}
    if kind == "enum":
        return {"enum": rng.sample(["red", "green", "blue", "", "a b"], rng.randrange(1, 4))}
    if kind == "string":
        return {"type": "string", "pattern": "^[a-z]{1,5}$"}
    if kind == "array":
        return {
            "type": "array",
            "items": random_value(rng, depth - 1),
            "minItems": 1,
            "maxItems": rng.randrange(1, 3),
        }
    if kind == "object":
        names = rng.sample(["a", "b", "size", "name"], rng.randrange(1, 4))
        values = {name: random_value(rng, depth - 1) for name in names}
        return {
            "type": "object",
            "properties": values,
            "required": names,
            "additionalProperties": False,
        }
    return {"type": "boolean"}


def random_schema(rng: random.Random) -> tuple[dict[str, Any], Check]:
    names = rng.sample(["x", "y", "colour"], rng.randrange(1, 3))
    values = {name: random_value(rng, 1) for name in names}
    schema = {
        "type": "object",
        "properties": values,
        "required": names,
        "additionalProperties": False,
    }

    def check(text: str) -> bool:
        jsonschema.validate(json.loads(text), schema)
        return True

    return {"json": schema}, check


def random_grammar(rng: random.Random) -> tuple[dict[str, Any], Check]:
    """Sums and differences of small numbers, with brackets that must match.

    This is not a regular language.
    """
    depth = rng.randrange(1, 4)
    rules = [f'root ::= level{depth} "="', 'level0 ::= [0-9] | [0-9] "+" [0-9]']
    rules += [
        f'level{i} ::= "(" level{i - 1} ")" | "[" level{i - 1} "]"' for i in range(1, depth + 1)
    ]

    def check(text: str) -> bool:
        opening, inner = text[:depth], text[depth : -depth - 1]
        closing = "".join({"(": ")", "[": "]"}[bracket] for bracket in reversed(opening))
        return text.endswith(closing + "=") and re.fullmatch(r"\d(\+\d)?", inner) is not None

    return {"grammar": "\n".join(rules)}, check


KINDS = {
    "regex": random_regex,
    "choice": random_choice,
    "json": random_schema,
    "grammar": random_grammar,
}


ON_V2 = ("regex", "json")


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=[pytest.mark.v2] * (k in ON_V2)) for k in KINDS]
)
def test_random_structures_are_obeyed_at_every_scale(
    engine: Engine, llama: Oracle, kind: str
) -> None:
    """One batch has each structure at each scale, and plain requests.

    The texts of the plain requests must be the reference's.
    """
    from vllm.sampling_params import StructuredOutputsParams

    rng = random.Random(kind)
    ids = [tuple(engine.llm.get_tokenizer().encode(text)) for text in TEXTS]
    prompts, params, checks = [], [], []
    for structure, check in [KINDS[kind](rng) for _ in range(GRAMMARS)]:
        for scale in SCALES:
            prompt, negative = rng.sample(ids, 2)
            sampled = (
                {"temperature": 1.0, "seed": rng.randrange(10**6)} if rng.random() < 0.5 else {}
            )
            structured = StructuredOutputsParams(**structure)
            prompts.append(prompt)
            params.append(
                guided(
                    Case(prompt, negative, scale),
                    structured_outputs=structured,
                    max_tokens=MAX_TOKENS,
                    ignore_eos=False,
                    **sampled,
                )
            )
            checks.append((structure, check))
    neighbours = PROMPTS[:2] if IS_V2 else PROMPTS
    length = 6 if IS_V2 else 24
    outputs = engine.generate(
        [*prompts, *neighbours], params + [plain(max_tokens=length) for _ in neighbours]
    )
    for (structure, check), output in zip(checks, outputs, strict=False):
        answer = output.outputs[0]
        assert (answer.finish_reason, check(answer.text)) == ("stop", True), (
            structure,
            answer.text,
        )
    want = [text[:length] for text in llama.plain[: len(neighbours)]]
    assert differences(tokens(outputs[len(checks) :]), want) == []
