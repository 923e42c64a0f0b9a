"""The executable specification of guided decoding, without a cache and without batching.

It runs one plain forward pass per stream and token. All faster code in this project must give the
same tokens as this loop. It is written to be read. It shares no code with what it checks, so it
does not import `cfg_core.blend`.

    conditional stream  c = prompt            + the tokens generated so far
    negative stream     n = negative prompt   + the same tokens
    guided              g = log p(. | n) + scale * (log p(. | c) - log p(. | n))

`guided_generate` does this. `weighted_generate` is the general case: any number of streams with
weights that sum to 1, guidance in a window of the output only, scales that change, cuts, and a
negative that is the conditional stream with a suffix.
`weighted_scores` gives the log-probabilities of a text that is known.

Source: Sanchez et al., "Stay on topic with Classifier-Free Guidance", arXiv 2306.17806, equation 7.
`UnbatchedClassifierFreeGuidanceLogitsProcessor` of Hugging Face transformers, which
`generate(guidance_scale=..., negative_prompt_ids=...)` uses, gives the same numbers. The unit tests
compare the two.

Shapes: T tokens in a stream, V token ids in the vocabulary, N generated tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

FORBIDDEN = -math.inf

Processor = Callable[[Tensor, list[int], list[int]], Tensor]
"""A function (guided scores [V], prompt ids, output ids so far) -> scores [V].

It gets the guided scores only, never those of the streams.
"""


class CausalLM(Protocol):
    """Anything that can be called like a Hugging Face causal language model without a cache."""

    def __call__(self, input_ids: Tensor) -> Any:
        """Return an object whose `logits` are [1, T, V], for `input_ids` [1, T] int64.

        Row t of the logits predicts the token after token t.
        """


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a token is chosen from the scores.

    uniforms: N numbers in [0, 1), one for each token. The same numbers give the same text. Without
        them the most likely token is chosen (greedy decoding).
    temperature: divides the scores after the processors. Greedy decoding ignores it.
    """

    uniforms: Sequence[float] | None = None
    temperature: float = 1.0


GREEDY = Sampling()


@dataclass(frozen=True, kw_only=True)
class Generation:
    """The generated tokens, and how clear each choice was.

    The smallest of `gaps` bounds the rounding error under which a different implementation still
    gives the same greedy tokens.
    """

    token_ids: list[int]
    log_probs: list[Tensor] = field(repr=False)
    """N rows [V]: the guided distribution before processors and temperature.

    It is empty unless `keep_log_probs` was set.
    """
    gaps: list[float] = field(repr=False)
    """N differences between the two highest scores after the processors."""

    @property
    def min_gap(self) -> float:
        return min(self.gaps, default=math.inf)


@torch.inference_mode()
def guided_generate(
    model: CausalLM,
    prompt: Sequence[int],
    negative: Sequence[int] | None = None,
    *,
    scale: float,
    max_new_tokens: int,
    eos_token_id: int | None = None,
    sampling: Sampling = GREEDY,
    processors: Sequence[Processor] = (),
    dtype: torch.dtype = torch.float32,
    keep_log_probs: bool = False,
) -> Generation:
    """Continue `prompt` under guidance away from `negative` (by default the prompt's last token).

    dtype: the blend is computed in it (float32 or float64).
    scale: 1 is plain decoding.
    keep_log_probs: whether to fill `Generation.log_probs`.

    The loop ends after `max_new_tokens`, or after `eos_token_id`, which is then the last token of
    the result.
    """
    return weighted_generate(
        model,
        prompt,
        [list(prompt)[-1:] if negative is None else negative],
        Formula(scales=((0, scale),)),
        max_new_tokens=max_new_tokens,
        eos_token_id=eos_token_id,
        sampling=sampling,
        processors=processors,
        dtype=dtype,
        keep_log_probs=keep_log_probs,
    )


@dataclass(frozen=True, kw_only=True)
class Formula:
    """How the distributions of a leader and its followers become the one that is sampled.

    weights: one for each follower. The leader's is 1 minus their sum.
    scales: (first output token, scale), ascending: instead of the weights, with one follower. From
        that token on, the leader's weight is the scale and the follower's is 1 - scale.
    start, end: the output tokens that are guided, from 0, `end` left out. None: to the end of the
        text. The others are the leader's alone, without cuts.
    top_k, min_p: cuts. Only tokens that the leader alone has among its k most likely ones, or with
        at least this share of its most likely one's probability, may be sampled (VCD, arXiv
        2311.16922, calls the second the adaptive plausibility constraint).
    filter_top_k: the reverse. The leader's own distribution is sampled, among the k tokens that
        the streams together find most likely (as in Dia).

    max_kl: a trust region, in nats. The streams' push away from the leader is made smaller until
        KL(sampled || leader) is at most this. It comes before the cuts.
    min_entropy: nats. A token is guided only where the leader's entropy is at least this.
    rule: what computes the scale of each token of a pair, by its name and parameters (see
        `rule_scale`). `scales` are those that it reads.
    between: a start and an end token. Of the window, only the tokens after a start token of the
        prompt or the output are guided, up to the end token, which is guided itself.
    restart: whether each follower has only the output after the last start token in it.
    suffix: instead of followers, one negative: all tokens of the leader, and these.

    Tokens that are as likely as the k-th count among the k.
    """

    weights: tuple[float, ...] = ()
    scales: tuple[tuple[int, float], ...] = ()
    start: int = 0
    end: int | None = None
    top_k: int | None = None
    min_p: float | None = None
    filter_top_k: int | None = None
    max_kl: float | None = None
    min_entropy: float | None = None
    rule: Mapping[str, Any] | None = None
    between: tuple[int, int] | None = None
    restart: bool = False
    suffix: tuple[int, ...] = ()

    def guides(self, token: int) -> bool:
        """Whether the output token of this number, from 0, is guided."""
        return self.start <= token and (self.end is None or token < self.end)

    def guides_after(self, prompt: Sequence[int], output: Sequence[int]) -> bool:
        """Whether the token after these is guided."""
        marked = [token for token in (*prompt, *output) if token in (self.between or ())]
        is_inside = self.between is None or marked[-1:] == [self.between[0]]
        return is_inside and self.guides(len(output))

    def output_of_followers(self, output: Sequence[int]) -> list[int]:
        """What each follower has of the output behind its own prompt."""
        if self.between is None or not self.restart or self.between[0] not in output:
            return list(output)
        return list(output[len(output) - list(reversed(output)).index(self.between[0]) :])

    def negatives(self, starts: Sequence[list[int]], output: list[int]) -> list[list[int]]:
        """The tokens of each negative before the next token.

        starts: what each stream begins with, the leader first.
        """
        if self.suffix:
            return [[*starts[0], *output, *self.suffix]]
        shared = self.output_of_followers(output)
        return [[*start, *shared] for start in starts[1:]]

    def weights_at(self, token: int) -> tuple[float, ...]:
        """The weights of all streams for this output token, the leader's first."""
        scale = next((s for first, s in reversed(self.scales) if first <= token), None)
        if scale is not None:
            return (scale, 1.0 - scale)
        return (1.0 - sum(self.weights), *self.weights)


@torch.inference_mode()
def weighted_generate(
    model: CausalLM,
    prompt: Sequence[int],
    followers: Sequence[Sequence[int]],
    formula: Formula,
    *,
    max_new_tokens: int,
    eos_token_id: int | None = None,
    sampling: Sampling = GREEDY,
    processors: Sequence[Processor] = (),
    dtype: torch.dtype = torch.float32,
    keep_log_probs: bool = False,
) -> Generation:
    """Continue `prompt` and all `followers` with the same tokens. Options: see `guided_generate`.

    followers: the token ids that each of them begins with.
    """
    starts = [list(prompt), *map(list, followers)]
    output: list[int] = []
    log_probs: list[Tensor] = []
    gaps: list[float] = []
    while len(output) < max_new_tokens and (not output or output[-1] != eos_token_id):
        guided = next_log_probs(model, starts[0] + output, dtype)
        if formula.guides_after(starts[0], output):
            others = [
                next_log_probs(model, tokens, dtype) for tokens in formula.negatives(starts, output)
            ]
            guided = combine([guided, *others], formula, len(output))
        scores = guided
        for process in processors:
            scores = process(scores.clone(), starts[0], output)
        gaps.append(top_gap(scores))
        if keep_log_probs:
            log_probs.append(torch.log_softmax(guided, dim=-1))
        output.append(choose(scores, sampling, step=len(output)))
    return Generation(token_ids=output, log_probs=log_probs, gaps=gaps)


@torch.inference_mode()
def weighted_scores(
    model: CausalLM,
    context: Sequence[int],
    followers: Sequence[Sequence[int]],
    continuation: Sequence[int],
    formula: Formula,
    *,
    dtype: torch.dtype = torch.float32,
) -> list[Tensor]:
    """Return the guided log-probabilities before each token of `continuation`: rows of [V].

    context, followers: what each stream has before the continuation.
    """
    rows = []
    for i in range(len(continuation)):
        before = list(continuation[:i])
        streams = [
            next_log_probs(model, [*start, *before], dtype) for start in (context, *followers)
        ]
        rows.append(torch.log_softmax(combine(streams, formula, i), dim=-1))
    return rows


@torch.inference_mode()
def plain_generate(model: CausalLM, prompt: Sequence[int], *, max_new_tokens: int) -> Generation:
    """Continue `prompt` greedily without guidance, with one stream.

    Tests compare `guided_generate` at `scale` 1 with it.
    """
    output: list[int] = []
    gaps: list[float] = []
    for _ in range(max_new_tokens):
        scores = next_log_probs(model, [*prompt, *output], torch.float32)
        gaps.append(top_gap(scores))
        output.append(choose(scores, GREEDY, step=len(output)))
    return Generation(token_ids=output, log_probs=[], gaps=gaps)


def next_log_probs(model: CausalLM, token_ids: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return log p(next token | token_ids), [V] in `dtype`.

    The model reads the whole stream again in each call.
    """
    logits: Tensor = model(torch.tensor([list(token_ids)])).logits
    return torch.log_softmax(logits[0, -1].to(dtype), dim=-1)


def guide(conditional: Tensor, negative: Tensor, scale: float) -> Tensor:
    """Return `negative + scale * (conditional - negative)`, [V] each.

    The result is unnormalised log-probabilities. A token that the conditional stream forbids (-inf)
    stays forbidden whatever the scale. A token that only the negative stream forbids has no defined
    difference, so it keeps the conditional's log-probability.
    """
    guided = negative + scale * (conditional - negative)
    guided = torch.where(negative == FORBIDDEN, conditional, guided)
    return guided.masked_fill(conditional == FORBIDDEN, FORBIDDEN)


def weigh(streams: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Return the weighted sum of log-probabilities [V] each; the first stream is the leader.

    It is written as differences from the first follower, as `guide` is, which it equals for two
    streams. A follower that forbids a token has the leader's log-probability there, and a token
    that the leader forbids stays forbidden.
    """
    leader = streams[0]
    followers = [torch.where(row == FORBIDDEN, leader, row) for row in streams[1:]]
    total = guide(leader, followers[0], weights[0])
    for row, weight in zip(followers[1:], weights[2:], strict=True):
        total = total + weight * (row - followers[0])
    return total.masked_fill(leader == FORBIDDEN, FORBIDDEN)


def combine(streams: Sequence[Tensor], formula: Formula, token: int) -> Tensor:
    """Return the scores [V] of the output token of this number, from the rows of all streams."""
    leader = streams[0]
    weights = formula.weights_at(token)
    if formula.rule is not None:
        scale = rule_scale(formula.rule, leader, streams[1], weights[0])
        weights = (scale, 1.0 - scale)
    guided = weigh(streams, weights)
    if (formula.max_kl, formula.min_entropy) != (None, None):
        push = torch.where(leader == FORBIDDEN, 0.0, guided - leader)
        guided = leader + strength(leader, push, formula) * push
    if formula.top_k is not None:
        guided = guided.masked_fill(leader < kth_highest(leader, formula.top_k), FORBIDDEN)
    if formula.min_p is not None:
        least = leader.max() + math.log(formula.min_p)
        guided = guided.masked_fill(leader < least, FORBIDDEN)
    if formula.filter_top_k is not None:
        dropped = guided < kth_highest(guided, formula.filter_top_k)
        return leader.masked_fill(dropped | (guided == FORBIDDEN), FORBIDDEN)
    return guided


def strength(leader: Tensor, push: Tensor, formula: Formula) -> float:
    """Return how much of `push` [V] is added to the leader's log-probabilities [V], in [0, 1].

    The divergence grows with it, so bisection finds the largest that is allowed.
    """
    if formula.min_entropy is not None and entropy(leader) < formula.min_entropy:
        return 0.0
    low, high = 0.0, 1.0
    limit = math.inf if formula.max_kl is None else formula.max_kl
    if divergence(leader + push, leader) <= limit:
        return high
    for _ in range(50):
        middle = (low + high) / 2
        if divergence(leader + middle * push, leader) <= limit:
            low = middle
        else:
            high = middle
    return low


def rule_scale(
    rule: Mapping[str, Any], conditional: Tensor, negative: Tensor, scale: float
) -> float:
    """Return the scale that a rule gives a token, from the pair's log-probabilities [V].

    scale: that of the request, for rules that read it.
    """
    apart = js_divergence(conditional, negative)
    if rule["name"] == "adacad":
        return 1 + apart + float(rule.get("offset", 0))
    if rule["name"] == "arr":
        share = min(1.0, apart / math.log(2))
        return 1 + share if conditional.max() > negative.max() else 1 - share
    if rule["name"] == "nwcad":
        if apart <= rule["max_divergence"] and margin(negative) >= rule["negative_margin"]:
            return 0.0
        return 1.0 if margin(conditional) >= rule["conditional_margin"] else scale
    raise ValueError(f"no rule {rule['name']}")


def js_divergence(log_p: Tensor, log_q: Tensor) -> float:
    """Return the Jensen-Shannon divergence in nats of log-probabilities [V]."""
    p, q = log_p.double().exp(), log_q.double().exp()
    middle = ((p + q) / 2).log()
    return (divergence(log_p, middle) + divergence(log_q, middle)) / 2


def margin(log_p: Tensor) -> float:
    """Return the probability of the most likely token less that of the second."""
    first, second = log_p.double().exp().topk(2).values.tolist()
    return float(first - second)


def divergence(scores: Tensor, leader: Tensor) -> float:
    """Return KL(softmax(scores) || leader) in nats. leader: log-probabilities [V]."""
    log_p = torch.log_softmax(scores.double(), dim=-1)
    terms = log_p.exp() * (log_p - leader.double())
    return float(terms.masked_fill(log_p == FORBIDDEN, 0.0).sum())


def entropy(log_p: Tensor) -> float:
    """Return the entropy in nats of log-probabilities [V]."""
    terms = log_p.double().exp() * log_p.double()
    return -float(terms.masked_fill(log_p == FORBIDDEN, 0.0).sum())


def kth_highest(scores: Tensor, k: int) -> Tensor:
    """Return the k-th highest of `scores` [V], or the lowest if there are fewer."""
    return scores.topk(min(k, len(scores))).values[-1]


def choose(scores: Tensor, sampling: Sampling, step: int) -> int:
    """Choose one token id from `scores` [V].

    Greedy decoding takes the highest score, and the first of equal ones. Otherwise the cumulative
    distribution is inverted at the uniform number of this step.
    """
    if sampling.uniforms is None:
        return int(scores.argmax())
    probs = torch.softmax(scores.double() / sampling.temperature, dim=-1)
    return invert(probs, sampling.uniforms[step])


def invert(probs: Tensor, uniform: float) -> int:
    """Return the first token whose cumulative probability exceeds `uniform` in [0, 1).

    probs: [V] float64.
    """
    cumulated = probs.cumsum(dim=-1)
    exceeding = (cumulated > uniform * cumulated[-1]).nonzero()
    last_possible = probs.nonzero()[-1]  # if rounding makes the product equal to the sum
    return int(exceeding[0] if len(exceeding) else last_possible)


def draw_uniforms(num_tokens: int, generator: torch.Generator) -> list[float]:
    """Draw `num_tokens` float64 numbers in [0, 1), which depend on `generator` alone."""
    drawn: list[float] = torch.rand(num_tokens, generator=generator, dtype=torch.float64).tolist()
    return drawn


def top_gap(scores: Tensor) -> float:
    """Return the highest minus the second highest of `scores` [V]; inf if one token is allowed."""
    first, second = scores.topk(2).values.tolist()
    return float(first - second)
