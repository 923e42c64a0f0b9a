"""The executable specification against hand-made distributions, and against Hugging Face
transformers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from cfg_core.reference import (
    FORBIDDEN,
    Formula,
    Sampling,
    choose,
    combine,
    draw_uniforms,
    guide,
    guided_generate,
    invert,
    next_log_probs,
    plain_generate,
    top_gap,
    weigh,
    weighted_generate,
    weighted_scores,
)

VOCAB = 50
SCALES = (-1.0, 0.0, 0.5, 1.5, 3.0, 7.5)
PROMPT, NEGATIVE = [3, 14, 15, 9, 26], [27, 18]
N = 12


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    """Random weights, so large that the best token is well ahead of the next."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        initializer_range=0.5,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


class Table:
    """A model whose logits for the next token are row `last token` of a table [V, V]."""

    def __init__(self, rows: Sequence[Sequence[float]]) -> None:
        self.rows = torch.tensor(rows)

    def __call__(self, input_ids: Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=self.rows[input_ids])


def log_p(*probs: float) -> Tensor:
    return torch.tensor(probs, dtype=torch.float64).log()


def hf(
    model: LlamaForCausalLM, scale: float, negative: list[int] | None = NEGATIVE, **options: object
) -> list[int]:
    ids = torch.tensor([PROMPT])
    options = {"do_sample": False, "max_new_tokens": N, "pad_token_id": 0, **options}
    if negative is not None:
        options["negative_prompt_ids"] = torch.tensor([negative])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), guidance_scale=scale, **options)
    return out[0, len(PROMPT) :].tolist()


# --- the blend


def test_scale_one_is_the_conditional_and_scale_zero_the_negative() -> None:
    conditional, negative = log_p(0.7, 0.2, 0.1), log_p(0.1, 0.1, 0.8)
    torch.testing.assert_close(guide(conditional, negative, 1.0), conditional)
    torch.testing.assert_close(guide(conditional, negative, 0.0), negative)


def test_scale_two_squares_the_ratio() -> None:
    """c^2 / n, by hand: 0.49/0.5, 0.04/0.25, 0.01/0.25."""
    guided = guide(log_p(0.7, 0.2, 0.1), log_p(0.5, 0.25, 0.25), 2.0).exp()
    torch.testing.assert_close(guided, torch.tensor([0.98, 0.16, 0.04], dtype=torch.float64))


@pytest.mark.parametrize("scale", [*SCALES, 1e6, -1e6])
def test_equal_streams_are_left_alone(scale: float) -> None:
    conditional = torch.log_softmax(
        torch.randn(VOCAB, generator=torch.Generator().manual_seed(1)), dim=-1
    )
    assert torch.equal(guide(conditional, conditional.clone(), scale), conditional)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize(
    ("conditional", "negative", "first"),
    [
        ((0.0, 0.5, 0.5), (0.2, 0.4, 0.4), FORBIDDEN),
        ((0.2, 0.4, 0.4), (0.0, 0.5, 0.5), math.log(0.2)),
        ((0.0, 0.5, 0.5), (0.0, 0.9, 0.1), FORBIDDEN),
    ],
    ids=["by the conditional", "by the negative", "by both"],
)
def test_a_forbidden_token(conditional, negative, first: float, scale: float) -> None:
    """It stays forbidden if the conditional forbids it; else the conditional alone counts."""
    guided = guide(log_p(*conditional), log_p(*negative), scale)
    assert guided[0].item() == pytest.approx(first)
    assert guided[1:].isfinite().all()


# --- the loop


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize(
    "negative", [NEGATIVE, [7], list(range(20)), None], ids=["2", "1", "20", "default"]
)
def test_equals_hugging_face(
    model: LlamaForCausalLM, scale: float, negative: list[int] | None
) -> None:
    got = guided_generate(model, PROMPT, negative, scale=scale, max_new_tokens=N)
    assert got.min_gap > 1e-3
    assert got.token_ids == hf(model, scale, negative)


def test_float64_gives_the_same_tokens(model: LlamaForCausalLM) -> None:
    got = guided_generate(model, PROMPT, NEGATIVE, scale=3.0, max_new_tokens=N, dtype=torch.float64)
    assert got.token_ids == hf(model, 3.0)


def test_scale_one_is_plain_decoding(model: LlamaForCausalLM) -> None:
    plain = plain_generate(model, PROMPT, max_new_tokens=N).token_ids
    assert guided_generate(model, PROMPT, NEGATIVE, scale=1.0, max_new_tokens=N).token_ids == plain
    assert hf(model, 1.0) == plain
    assert guided_generate(model, PROMPT, NEGATIVE, scale=3.0, max_new_tokens=N).token_ids != plain


def test_scale_zero_follows_the_negative_prompt(model: LlamaForCausalLM) -> None:
    plain = plain_generate(model, NEGATIVE, max_new_tokens=N).token_ids
    assert guided_generate(model, PROMPT, NEGATIVE, scale=0.0, max_new_tokens=N).token_ids == plain


def test_the_default_negative_is_the_last_token(model: LlamaForCausalLM) -> None:
    default = guided_generate(model, PROMPT, scale=3.0, max_new_tokens=N).token_ids
    assert (
        default
        == guided_generate(model, PROMPT, PROMPT[-1:], scale=3.0, max_new_tokens=N).token_ids
    )
    assert (
        default != guided_generate(model, PROMPT, NEGATIVE, scale=3.0, max_new_tokens=N).token_ids
    )


def test_log_probs_are_the_normalised_guided_rows(model: LlamaForCausalLM) -> None:
    """Checked at step 2 against the definition.

    The definition is a softmax of `n + s (c - n)` over both streams with the tokens so far.
    """
    got = guided_generate(model, PROMPT, NEGATIVE, scale=1.5, max_new_tokens=3, keep_log_probs=True)
    assert len(got.log_probs) == 3
    grown = got.token_ids[:2]
    with torch.inference_mode():
        c = next_log_probs(model, PROMPT + grown, torch.float32)
        n = next_log_probs(model, NEGATIVE + grown, torch.float32)
    want = (n.exp() * (c.exp() / n.exp()) ** 1.5).double()
    torch.testing.assert_close(got.log_probs[2].exp(), (want / want.sum()).float())
    assert guided_generate(model, PROMPT, scale=1.5, max_new_tokens=3).log_probs == []


def test_stops_after_the_end_token(model: LlamaForCausalLM) -> None:
    full = guided_generate(model, PROMPT, NEGATIVE, scale=3.0, max_new_tokens=N).token_ids
    end = full[4]
    got = guided_generate(model, PROMPT, NEGATIVE, scale=3.0, max_new_tokens=N, eos_token_id=end)
    assert got.token_ids == full[: full.index(end) + 1]
    assert got.token_ids == hf(model, 3.0, eos_token_id=end)


def test_zero_new_tokens(model: LlamaForCausalLM) -> None:
    got = guided_generate(model, PROMPT, scale=3.0, max_new_tokens=0)
    assert got.token_ids == []
    assert got.min_gap == math.inf


def test_processors_see_the_guided_scores(model: LlamaForCausalLM) -> None:
    """HF, too, applies its repetition penalty after guidance, and to the unnormalised scores."""

    def penalise(scores: Tensor, prompt: list[int], output: list[int]) -> Tensor:
        for token in set(prompt + output):
            scores[token] = scores[token] * 1.5 if scores[token] < 0 else scores[token] / 1.5
        return scores

    got = guided_generate(
        model, PROMPT, NEGATIVE, scale=3.0, max_new_tokens=N, processors=[penalise]
    )
    assert got.token_ids == hf(model, 3.0, repetition_penalty=1.5)
    assert got.token_ids != hf(model, 3.0)


def test_the_streams_share_their_tokens() -> None:
    """The next logits depend on the last token only, so both streams soon agree.

    They agree from the second step on.
    """
    table = Table([[0.0, 1.0, 5.0], [3.0, 0.0, 1.0], [0.0, 4.0, 1.0]])
    got = guided_generate(table, [0], [2], scale=2.0, max_new_tokens=4)
    assert got.token_ids == [2, 1, 0, 2]


# --- sampling


def test_the_same_uniforms_give_the_same_text(model: LlamaForCausalLM) -> None:
    def sample(seed: int) -> list[int]:
        uniforms = draw_uniforms(N, torch.Generator().manual_seed(seed))
        sampling = Sampling(uniforms=uniforms, temperature=2.0)
        return guided_generate(
            model, PROMPT, NEGATIVE, scale=1.5, max_new_tokens=N, sampling=sampling
        ).token_ids

    assert sample(1) == sample(1)
    assert sample(1) != sample(2)


def test_evenly_spread_uniforms_give_the_guided_distribution() -> None:
    """1,000 uniforms on a grid: every token comes up within one of 1,000 times its probability."""
    table = Table([[0.0, 1.0, 2.0], [2.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    want = torch.softmax(
        torch.tensor([0.0, 1.0, 2.0]) * 1.5 - torch.tensor([2.0, 1.0, 0.0]) * 0.5, dim=-1
    )
    counts = [0, 0, 0]
    for k in range(1000):
        sampling = Sampling(uniforms=[(k + 0.5) / 1000])
        counts[
            guided_generate(
                table, [0], [1], scale=1.5, max_new_tokens=1, sampling=sampling
            ).token_ids[0]
        ] += 1
    assert all(abs(count - 1000 * p) <= 1 for count, p in zip(counts, want.tolist(), strict=True))


def test_low_temperature_is_greedy() -> None:
    scores = log_p(0.3, 0.4, 0.3)
    assert {
        choose(scores, Sampling(uniforms=[u], temperature=0.01), 0) for u in (0.001, 0.5, 0.999)
    } == {1}


@pytest.mark.parametrize(
    ("uniform", "token"), [(0.0, 1), (0.249, 1), (0.25, 2), (0.5, 3), (0.999, 3), (1 - 2**-53, 3)]
)
def test_invert_at_the_borders(uniform: float, token: int) -> None:
    """Probabilities 0, 1/4, 1/4, 1/2, 0: the forbidden tokens at both ends are never taken."""
    assert invert(torch.tensor([0.0, 0.25, 0.25, 0.5, 0.0], dtype=torch.float64), uniform) == token


def test_invert_never_leaves_the_vocabulary() -> None:
    """The sum of thirds, times the largest uniform, may round up to the sum itself."""
    probs = torch.tensor([1 / 3] * 3 + [2**-52, 0.0], dtype=torch.float64)
    assert invert(probs, 1 - 2**-53) <= 3


def test_top_gap() -> None:
    assert top_gap(torch.tensor([1.0, 4.0, 2.5])) == 1.5
    assert top_gap(torch.tensor([FORBIDDEN, 4.0, FORBIDDEN])) == math.inf


# --- formulas: those of papers and models, written out


def rows(num: int) -> list[Tensor]:
    """Log-probabilities of so many streams."""
    generator = torch.Generator().manual_seed(num)
    drawn = torch.randn(num, VOCAB, generator=generator, dtype=torch.float64) * 3
    return list(drawn.log_softmax(dim=-1))


def same_distribution(scores: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(scores.log_softmax(dim=-1), wanted.log_softmax(dim=-1))


def keep(scores: Tensor, kept: Tensor) -> Tensor:
    """`scores` where `kept` is true, and forbidden elsewhere."""
    return torch.where(kept, scores, FORBIDDEN)


def test_two_weights_are_a_scale() -> None:
    c, n = rows(2)
    same_distribution(weigh([c, n], (2.5, -1.5)), guide(c, n, 2.5))


def test_any_number_of_streams_is_a_weighted_sum() -> None:
    streams, weights = rows(5), (0.7, -1.2, 0.0, 2.0, -0.5)
    wanted = sum(w * row for w, row in zip(weights, streams, strict=True))
    same_distribution(weigh(streams, weights), wanted)


def test_streams_that_forbid_tokens() -> None:
    streams = rows(3)
    streams[0][0] = streams[1][0] = FORBIDDEN
    streams[1][1] = streams[2][1] = streams[2][2] = FORBIDDEN
    found = weigh(streams, (1.5, -1.0, 0.5))
    assert found[0] == FORBIDDEN
    assert found[1:].isfinite().all()
    # Both followers have the leader's value, which then has all the weight.
    torch.testing.assert_close(found[1], streams[0][1])
    torch.testing.assert_close(found[2], 2.0 * streams[0][2] - streams[1][2])


def test_musicgens_double_guidance() -> None:
    """u + a (w + b (c - w) - u), of a caption with a melody, the melody alone, and nothing."""
    (c, w, u), a, b = rows(3), 3.0, 5.0
    formula = Formula(weights=(a * (1 - b), 1 - a))
    same_distribution(combine([c, w, u], formula, 0), u + a * (w + b * (c - w) - u))


def test_context_aware_decoding() -> None:
    """(1 + a) log p(y | context, question) - a log p(y | question): arXiv 2305.14739."""
    (c, q), a = rows(2), 0.5
    same_distribution(combine([c, q], Formula(weights=(-a,)), 0), (1 + a) * c - a * q)


def test_dexperts() -> None:
    """base + a (expert - anti-expert): arXiv 2105.03023."""
    (base, expert, anti), a = rows(3), 2.0
    formula = Formula(weights=(a, -a))
    same_distribution(combine([base, expert, anti], formula, 0), base + a * (expert - anti))


def test_visual_contrastive_decoding() -> None:
    """(1 + a) c - a u, where p(c) is at least b max p(c): arXiv 2311.16922."""
    (c, u), a, b = rows(2), 1.0, 0.1
    wanted = keep((1 + a) * c - a * u, c.exp() >= b * c.exp().max())
    found = combine([c, u], Formula(weights=(-a,), min_p=b), 0)
    same_distribution(found, wanted)
    assert 1 <= int(found.isfinite().sum()) < VOCAB


def test_minimax_musics_cut() -> None:
    """The conditional's own top k first, then u + s (c - u)."""
    (c, u), s, k = rows(2), 1.5, 5
    kept = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, c.topk(k).indices, value=True)
    found = combine([c, u], Formula(weights=(1 - s,), top_k=k), 0)
    same_distribution(found, keep(u + s * (c - u), kept))


def test_dias_filter() -> None:
    """The top k of c + w (c - u) only filter c, which is sampled."""
    (c, u), w, k = rows(2), 3.0, 7
    best = (c + w * (c - u)).topk(k).indices
    kept = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, best, value=True)
    found = combine([c, u], Formula(weights=(-w,), filter_top_k=k), 0)
    same_distribution(found, keep(c, kept))


def test_equally_likely_tokens_count_among_the_k() -> None:
    c, u = log_p(0.4, 0.2, 0.2, 0.2), log_p(0.25, 0.25, 0.25, 0.25)
    assert combine([c, u], Formula(weights=(-1.0,), top_k=2), 0).isfinite().all()
    assert combine([c, u], Formula(weights=(-1.0,), top_k=99), 0).isfinite().all()


@pytest.mark.parametrize(("start", "end"), [(0, 0), (0, 4), (3, 7), (5, None), (20, None)])
def test_outside_the_window_the_leader_is_alone(
    model: LlamaForCausalLM, start: int, end: int | None
) -> None:
    """As LlamaGen's `cfg_interval`. Each part is checked alone, after what came before it."""
    formula = Formula(weights=(-2.0,), start=start, end=end, top_k=20)
    got = weighted_generate(model, PROMPT, [NEGATIVE], formula, max_new_tokens=N).token_ids
    for token, chosen in enumerate(got):
        before = got[:token]
        row = next_log_probs(model, PROMPT + before, torch.float32)
        if start <= token < (N if end is None else end):
            negative = next_log_probs(model, NEGATIVE + before, torch.float32)
            row = keep(3.0 * row - 2.0 * negative, row >= row.topk(20).values[-1])
        assert chosen == int(row.argmax())


def test_scales_that_change(model: LlamaForCausalLM) -> None:
    """As in YuE, whose first segments have a larger scale."""
    formula = Formula(scales=((0, 3.0), (4, 1.0), (8, 1.5)))
    assert [formula.weights_at(token)[0] for token in (0, 3, 4, 7, 8, 99)] == [3, 3, 1, 1, 1.5, 1.5]
    got = weighted_generate(model, PROMPT, [NEGATIVE], formula, max_new_tokens=N).token_ids
    for first, last, scale in ((0, 4, 3.0), (4, 8, 1.0), (8, N, 1.5)):
        part = guided_generate(
            model,
            PROMPT + got[:first],
            NEGATIVE + got[:first],
            scale=scale,
            max_new_tokens=last - first,
        )
        assert part.token_ids == got[first:last]


def test_three_streams_in_the_loop(model: LlamaForCausalLM) -> None:
    formula = Formula(weights=(-1.0, 0.5))
    got = weighted_generate(model, PROMPT, [NEGATIVE, [7]], formula, max_new_tokens=N)
    assert got.min_gap > 1e-3
    for token, chosen in enumerate(got.token_ids):
        before = got.token_ids[:token]
        c, n, m = (
            next_log_probs(model, start + before, torch.float32)
            for start in (PROMPT, NEGATIVE, [7])
        )
        assert chosen == int((1.5 * c - n + 0.5 * m).argmax())


def test_a_suffix_follows_all_tokens_of_the_leader(model: LlamaForCausalLM) -> None:
    formula = Formula(scales=((0, 3.0),), suffix=(9, 4), end=N - 2)
    got = weighted_generate(model, PROMPT, [], formula, max_new_tokens=N)
    assert got.min_gap > 1e-3
    for token, chosen in enumerate(got.token_ids):
        before = PROMPT + got.token_ids[:token]
        row = next_log_probs(model, before, torch.float32)
        if token < N - 2:
            row = 3.0 * row - 2.0 * next_log_probs(model, [*before, 9, 4], torch.float32)
        assert chosen == int(row.argmax())


def test_scores_are_the_rows_that_generated_the_text(model: LlamaForCausalLM) -> None:
    formula = Formula(weights=(-1.5, 0.5), top_k=20)
    text = weighted_generate(
        model, PROMPT, [NEGATIVE, [5]], formula, max_new_tokens=N, keep_log_probs=True
    )
    rows = weighted_scores(model, PROMPT, [NEGATIVE, [5]], text.token_ids, formula)
    for row, generated in zip(rows, text.log_probs, strict=True):
        torch.testing.assert_close(row, generated)


def test_scores_with_one_stream_are_the_models_own(model: LlamaForCausalLM) -> None:
    rows = weighted_scores(model, PROMPT, [PROMPT], NEGATIVE, Formula(weights=(0.0,)))
    whole = torch.log_softmax(model(torch.tensor([PROMPT + NEGATIVE])).logits[0].detach(), -1)
    torch.testing.assert_close(torch.stack(rows), whole[len(PROMPT) - 1 : -1])
