"""Every sampling option under guidance, against the reference loop.

test_options.py compares them on V1, and test_paths.py on V2 with async scheduling.

A sampled text is replayed: the reference computes the guided scores, shapes them, and draws with
vLLM's own kernel and the request's seed. All steps between the guided scores and the draw are
computed here by hand, in vLLM's order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from cfg_core.reference import FORBIDDEN, Formula, Processor, combine, next_log_probs
from tests.engine import witness
from tests.engine.engines import Engine, guided
from tests.engine.formulas import MEDIAN_ENTROPY
from tests.engine.oracle import CASES, Case, Oracle
from tests.engine.tiny_models import EOS, make_tokenizer

SAMPLED = {"temperature": 0.8}
ALLOWED = list(range(40, 90))
BIAS = {20: 7.0, 21: -4.0, 50: 6.0, 60: -100.0}
VOWELS = make_tokenizer().encode("aeiouAEIOU", add_special_tokens=False)
LETTERS = make_tokenizer().encode("abcdef", add_special_tokens=False)
SOME = list(range(4, 260, 9))
PRINTABLE = make_tokenizer().encode("".join(map(chr, range(33, 127))), add_special_tokens=False)
ADACAD = {"name": "adacad", "offset": 1.0}
LIMIT_S = 900

Draw = Callable[[Tensor, int, int], int]
"""(shaped scores [vocabulary], position of the last token read, step) -> token.

Each is made for one seed.
"""


def penalties(repetition: float = 1.0, frequency: float = 0.0, presence: float = 0.0) -> Processor:
    def process(scores: Tensor, prompt: list[int], output: list[int]) -> Tensor:
        for token in set(prompt + output):
            scores[token] *= repetition if scores[token] < 0 else 1 / repetition
        for token in set(output):
            scores[token] -= frequency * output.count(token) + presence
        return scores

    return process


def bias(scores: Tensor, prompt: list[int], output: list[int]) -> Tensor:
    for token, value in BIAS.items():
        scores[token] += value
    return scores


def end_bias(scores: Tensor, prompt: list[int], output: list[int]) -> Tensor:
    scores[EOS] += 9.0
    return scores


def only(allowed: Sequence[int]) -> Processor:
    def process(scores: Tensor, prompt: list[int], output: list[int]) -> Tensor:
        masked = torch.full_like(scores, FORBIDDEN)
        masked[list(allowed)] = scores[list(allowed)]
        return masked

    return process


def in_six(scores: Tensor, prompt: list[int], output: list[int]) -> Tensor:
    """Six letters and the end token."""
    return only(LETTERS if len(output) < 6 else [EOS])(scores, prompt, output)


def forbid(*tokens: int, first_tokens: float = math.inf) -> Processor:
    def process(scores: Tensor, prompt: list[int], output: list[int]) -> Tensor:
        if len(output) < first_tokens:
            scores[list(tokens)] = FORBIDDEN
        return scores

    return process


@dataclass(frozen=True)
class Option:
    """One row of the table.

    params: fields of SamplingParams.
    stop: tokens at which a text ends.
    grammar: a regex that the text follows.
    formula: what differs from the pair with one scale, as the reference takes it. `extra` has the
        same for the engine.
    """

    name: str
    params: dict[str, Any] = field(default_factory=dict)
    processors: tuple[Processor, ...] = ()
    extra: dict[str, Any] = field(default_factory=dict)
    stop: Sequence[int] = ()
    grammar: str | None = None
    formula: dict[str, Any] = field(default_factory=dict)

    @property
    def samples(self) -> int:
        return int(self.params.get("n", 1))


GREEDY = Option("greedy")
OPTIONS = [
    GREEDY,
    Option("repetition_penalty", {"repetition_penalty": 1.7}, (penalties(repetition=1.7),)),
    Option("frequency_penalty", {"frequency_penalty": 2.0}, (penalties(frequency=2.0),)),
    Option("presence_penalty", {"presence_penalty": 2.0}, (penalties(presence=2.0),)),
    Option("logit_bias", {"logit_bias": BIAS}, (bias,)),
    Option("allowed_token_ids", {"allowed_token_ids": ALLOWED}, (only(ALLOWED),)),
    Option(
        "end token, ignore_eos=False",
        {"logit_bias": {EOS: 9.0}, "ignore_eos": False},
        (end_bias,),
        stop=[EOS],
    ),
    Option("bad_words", {"bad_words": list("aeiouAEIOU")}, (forbid(*VOWELS),)),
    Option("stop_token_ids", {"stop_token_ids": SOME}, stop=SOME),
    Option(
        "min_tokens",
        {"stop_token_ids": SOME, "min_tokens": 5},
        (forbid(*SOME, first_tokens=5),),
        stop=SOME,
    ),
    Option(
        "stop, a string",
        {"stop": list("aeiouAEIOU"), "allowed_token_ids": PRINTABLE},
        (only(PRINTABLE),),
        stop=VOWELS,
    ),
    Option(
        "structured_outputs, a regex",
        {"ignore_eos": False},
        (in_six,),
        stop=[EOS],
        grammar="[a-f]{6}",
    ),
    Option("logits_processors", {}, (witness.reference,), witness.asked()),
    Option("temperature, seed", SAMPLED),
    Option("n = 3", {**SAMPLED, "n": 3}),
    Option("top_k", {**SAMPLED, "top_k": 5}),
    Option("top_p", {**SAMPLED, "top_p": 0.7}),
    Option("min_p", {**SAMPLED, "min_p": 0.1}),
    Option(
        "guidance_start, guidance_end",
        extra={"guidance_start": 2, "guidance_end": 6},
        formula={"start": 2, "end": 6},
    ),
    Option(
        "guidance_schedule",
        extra={"guidance_schedule": [[0, 3.0], [3, 0.5], [5, -1.0]]},
        formula={"scales": ((0, 3.0), (3, 0.5), (5, -1.0))},
    ),
    Option("guidance_top_k", extra={"guidance_top_k": 3}, formula={"top_k": 3}),
    Option("guidance_min_p", extra={"guidance_min_p": 0.5}, formula={"min_p": 0.5}),
    Option(
        "guidance_filter_top_k",
        extra={"guidance_filter_top_k": 2},
        formula={"filter_top_k": 2},
    ),
    Option("guidance_max_kl", extra={"guidance_max_kl": 0.1}, formula={"max_kl": 0.1}),
    Option(
        "guidance_min_entropy",
        extra={"guidance_min_entropy": MEDIAN_ENTROPY},
        formula={"min_entropy": MEDIAN_ENTROPY},
    ),
    Option("guidance_rule", extra={"guidance_rule": ADACAD}, formula={"rule": ADACAD}),
    Option(
        "rule, sampled",
        {**SAMPLED, "top_p": 0.9},
        (),
        {"guidance_rule": ADACAD, "guidance_max_kl": 0.3},
        formula={"rule": ADACAD, "max_kl": 0.3},
    ),
    Option(
        "limits, sampled",
        {**SAMPLED, "top_p": 0.9},
        (),
        {"guidance_max_kl": 0.3, "guidance_min_entropy": MEDIAN_ENTROPY, "guidance_top_k": 40},
        formula={"max_kl": 0.3, "min_entropy": MEDIAN_ENTROPY, "top_k": 40},
    ),
    Option(
        "window, cuts, sampled",
        {**SAMPLED, "top_p": 0.9, "presence_penalty": 1.0},
        (penalties(presence=1.0),),
        {"guidance_end": 6, "guidance_top_k": 12, "guidance_min_p": 0.05},
        formula={"end": 6, "top_k": 12, "min_p": 0.05},
    ),
    Option(
        "all of these",
        {
            "temperature": 1.3,
            "top_k": 20,
            "top_p": 0.9,
            "min_p": 0.01,
            "repetition_penalty": 1.2,
            "presence_penalty": 0.5,
            "logit_bias": BIAS,
        },
        (bias, penalties(repetition=1.2, presence=0.5), witness.reference),
        witness.asked(),
    ),
]


PART_OF_OTHERS = {
    *("repetition_penalty", "frequency_penalty", "presence_penalty", "logit_bias"),
    *("allowed_token_ids", "stop_token_ids", "temperature, seed", "top_k", "top_p", "min_p"),
    *("guidance_top_k", "guidance_min_p", "guidance_max_kl", "guidance_min_entropy"),
    "guidance_rule",
}
"""Options that another row has, too: `make test` plays them alone on V1 only."""


def shape(scores: Tensor, params: dict[str, Any]) -> Tensor:
    """Temperature, then min_p, top_k and top_p, by their definitions; `scores` [vocabulary]."""
    scores = scores / params["temperature"]
    probs = scores.softmax(-1)
    scores = scores.masked_fill(probs < params.get("min_p", 0.0) * probs.max(), FORBIDDEN)
    if "top_k" in params:
        scores = scores.masked_fill(scores < scores.topk(params["top_k"]).values[-1], FORBIDDEN)
    if "top_p" in params:
        order = scores.argsort(descending=True)
        before = scores[order].softmax(-1).cumsum(-1) - scores[order].softmax(-1)
        scores = scores.index_fill(0, order[before >= params["top_p"]], FORBIDDEN)
    return scores


@torch.inference_mode()
def replay(
    oracle: Oracle, case: Case, option: Option, draw: Draw | None, num_tokens: int
) -> list[int]:
    """The reference's text. It is greedy if `draw` is None."""
    prompt, output = list(case.prompt), []
    formula = Formula(**{"scales": ((0, case.scale),), **option.formula})
    while len(output) < num_tokens and (not output or output[-1] not in option.stop):
        scores = next_log_probs(oracle.model, prompt + output, torch.float32)
        if formula.guides_after(prompt, output):
            shared = formula.output_of_followers(output)
            negative = next_log_probs(oracle.model, [*case.negative, *shared], torch.float32)
            scores = combine([scores, negative], formula, len(output))
        for process in option.processors:
            scores = process(scores.clone(), prompt, output)
        if draw is None:
            output.append(int(scores.argmax()))
        else:
            output.append(
                draw(shape(scores, option.params), len(prompt) + len(output) - 1, len(output))
            )
    return output


def draw_v1(seed: int) -> Draw:
    """vLLM's CPU sampler: a seed for each step from the request's generator."""
    generator = torch.Generator().manual_seed(seed)

    def draw(scores: Tensor, position: int, step: int) -> int:
        noise = torch.randint(0, 2**31, (1,), generator=generator, dtype=torch.long)
        return int(torch.ops._C.fused_gumbel_argmax(scores.unsqueeze(0), noise))

    return draw


def draw_v2(seed: int) -> Draw:
    """Model Runner V2's kernel: noise from the seed and the position."""
    from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

    def draw(scores: Tensor, position: int, step: int) -> int:
        sampled = gumbel_sample(
            scores.unsqueeze(0),
            torch.zeros(1, dtype=torch.int32),
            torch.ones(1),
            torch.tensor([seed]),
            torch.tensor([position]),
            apply_temperature=False,
            is_drafting=False,
        )
        return int(sampled)

    return draw


def params_of(case: Case, option: Option, seed: int, num_tokens: int) -> Any:
    options = {"max_tokens": num_tokens, **option.params}
    if "temperature" in option.params:
        options["seed"] = seed
    if option.grammar is not None:
        from vllm.sampling_params import StructuredOutputsParams

        options["structured_outputs"] = StructuredOutputsParams(regex=option.grammar)
    params = guided(case, **options)
    params.extra_args = {**params.extra_args, **option.extra}
    if option.extra.keys() & {"guidance_schedule", "guidance_rule"}:
        del params.extra_args["guidance_scale"]
    return params


def without(option: Option) -> Option:
    """The baseline of an option: the same temperature and no other option.

    For the temperature itself, the baseline is greedy.
    """
    temperature = {k: v for k, v in option.params.items() if k == "temperature"}
    number = {k: v for k, v in option.params.items() if k == "n"}
    return Option(
        "", number if {**temperature, **number} == option.params else {**temperature, **number}
    )


@dataclass(frozen=True)
class Result:
    """The result of one option.

    wrong: the cases whose text differs from the reference's.
    changed: whether the option changed any text. If not, the test shows nothing.
    """

    wrong: list[int]
    changed: bool


def compare(engine: Engine, oracle: Oracle, option: Option) -> Result:
    """All cases in one batch, against the reference."""
    v2 = engine.llm.llm_engine.vllm_config.use_v2_model_runner
    cases, num_tokens = chosen(v2)
    params = [params_of(case, option, 1000 + 10 * i, num_tokens) for i, case in enumerate(cases)]
    outputs = engine.generate([case.prompt for case in cases], params)
    got = [[list(sample.token_ids) for sample in output.outputs] for output in outputs]

    def reference(i: int, option: Option) -> list[list[int]]:
        """The reference's samples of one case.

        The seed of each sample is one more than that of the sample before.
        """
        draw = (draw_v2 if v2 else draw_v1) if "temperature" in option.params else None
        draws = [draw(1000 + 10 * i + sample) if draw else None for sample in range(option.samples)]
        return [replay(oracle, cases[i], option, draw, num_tokens) for draw in draws]

    wrong = [i for i in range(len(cases)) if got[i] != reference(i, option)]
    return Result(wrong, any(got[i] != reference(i, without(option)) for i in range(len(cases))))


def chosen(v2: bool) -> tuple[list[Case], int]:
    """The cases, with every scale among them, and the length of their texts.

    V2's kernels are interpreted here, so it gets fewer and shorter ones. Prompts have printable
    characters only: vLLM looks for stop strings in text, and half a character would hide what
    follows it.
    """
    cases, num_tokens = (CASES[::9], 8) if v2 else (CASES[::5], 16)
    return [
        Case(*(tuple(PRINTABLE[t % 94] for t in ids) for ids in (c.prompt, c.negative)), c.scale)
        for c in cases
    ], num_tokens
