"""Prompts as embeddings, in leaders and followers: guided text equals the formula on
transformers' logits. Chatterbox's negative is the prompt with the text's embeddings zeroed.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.engine.engines import ROOMY, Engine, plain, tokens
from tests.engine.oracle import random_ids
from tests.engine.tiny_models import build

NEW_TOKENS = 12
LEAST_GAP = 5e-4
"""Least gap between the two best tokens of a step: 8 times what rounding can change."""
SEED = 0
"""Of the prompts. With it, no step of any request has a smaller gap."""


class Model:
    """transformers' model, as a function of embeddings [T, hidden size]."""

    def __init__(self, folder: Path) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._table = self._model.get_input_embeddings().weight.detach()

    def of(self, ids: tuple[int, ...]) -> torch.Tensor:
        """The embeddings of tokens."""
        return self._table[list(ids)].clone()

    def drawn(self, length: int, seed: int) -> torch.Tensor:
        """Embeddings that are no tokens'."""
        generator = torch.Generator().manual_seed(seed)
        scale = float(self._table.std())
        return torch.randn(length, self._table.shape[1], generator=generator) * scale

    @torch.inference_mode()
    def generate(
        self, prompts: list[torch.Tensor], weights: list[float], start: int = 0, end: int = 999
    ) -> list[int]:
        """Greedy tokens of the weighted sum, between start and end; outside, of the first."""
        output: list[int] = []
        for step in range(NEW_TOKENS):
            rows = [self._log_probs(prompt, output) for prompt in prompts]
            blend = sum(w * row for w, row in zip(weights, rows, strict=True))
            assert isinstance(blend, torch.Tensor)
            best = (blend if start <= step < end else rows[0]).topk(2)
            assert best.values[0] - best.values[1] > LEAST_GAP
            output.append(int(best.indices[0]))
        return output

    def _log_probs(self, prompt: torch.Tensor, output: list[int]) -> torch.Tensor:
        inputs = torch.cat([prompt, self.of(tuple(output))])[None]
        logits = self._model(inputs_embeds=inputs, use_cache=False).logits[0, -1]
        return torch.log_softmax(logits.float(), -1)


class Case(NamedTuple):
    """A request, and what its streams read."""

    prompt: dict[str, Any]
    fields: dict[str, Any]
    streams: list[torch.Tensor]
    weights: list[float]


def cases_of(model: Model) -> dict[str, Case]:
    rng = random.Random(SEED)
    ids, other = random_ids(rng, 58), random_ids(rng, 21)
    a, b = model.drawn(60, 10 * SEED + 1), model.drawn(28, 10 * SEED + 2)
    zeroed = torch.cat([torch.zeros(20, a.shape[1]), a[20:]])
    are_tokens = [i % 3 == 0 for i in range(len(ids))]
    of_ids = model.of(ids)
    places = torch.tensor(are_tokens)[:, None]
    mixed = torch.where(places, of_ids, model.drawn(len(ids), 10 * SEED + 3))
    mixed_prompt = {
        "prompt_embeds": mixed.masked_fill(places, 0),
        "prompt_token_ids": [t * is_token for t, is_token in zip(ids, are_tokens, strict=True)],
        "prompt_is_token_ids": are_tokens,
    }
    of_a, of_tokens = {"prompt_embeds": a}, {"prompt_token_ids": list(ids)}
    pair = [2.0, -1.0]
    by_ids = {"guidance_scale": 2, "negative_prompt_token_ids": list(other)}
    with_b = {"guidance_scale": 2, "negative_prompt_embeds": b}
    own = {"guidance_streams": [{"lora": False, "weight": -1}]}
    three = [
        {"prompt_embeds": b, "weight": -0.5},
        {"token_ids": list(other), "weight": -0.25},
    ]
    return {
        "the leader": Case(of_a, by_ids, [a, model.of(other)], pair),
        "the follower": Case(of_tokens, with_b, [of_ids, b], pair),
        "both": Case(of_a, with_b, [a, b], pair),
        "Chatterbox": Case(of_a, {**with_b, "negative_prompt_embeds": zeroed}, [a, zeroed], pair),
        "three streams": Case(
            of_tokens,
            {"guidance_streams": three},
            [of_ids, b, model.of(other)],
            [1.75, -0.5, -0.25],
        ),
        "mixed": Case(mixed_prompt, with_b, [mixed, b], pair),
        "mixed, last token": Case(
            mixed_prompt, {"guidance_scale": 2}, [mixed, model.of(ids[-1:])], pair
        ),
        "the leader's own": Case(of_a, own, [a, a], pair),
        "the mixed leader's own": Case(mixed_prompt, own, [mixed, mixed], pair),
    }


class Bench(NamedTuple):
    folder: Path
    model: Model
    cases: dict[str, Case]
    want: dict[str, list[int]]
    plain: dict[str, list[int]]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """A folder of its own: vLLM adds a token to its tokenizer, which it keeps for the folder."""
    folder = build("llama", tmp_path_factory.mktemp("embeddings"))
    model = Model(folder)
    cases = cases_of(model)
    want = {name: model.generate(case.streams, case.weights) for name, case in cases.items()}
    unguided = {name: model.generate(case.streams[:1], [1.0]) for name, case in cases.items()}
    changed = [name for name in cases if want[name] != unguided[name]]
    assert changed == [name for name in cases if "own" not in name]
    return Bench(folder, model, cases, want, unguided)


def run(engine: Engine, prompts: list[dict[str, Any]], params: list[Any]) -> list[Any]:
    outputs: list[Any] = engine.llm.generate(prompts, params, use_tqdm=False)
    engine.assert_idle()
    return outputs


def guided(case: Case, **options: Any) -> Any:
    return plain(**{"extra_args": case.fields, "max_tokens": NEW_TOKENS, **options})


def all_guided(engine: Engine, bench: Bench) -> dict[str, list[int]]:
    prompts = [case.prompt for case in bench.cases.values()]
    outputs = run(engine, prompts, [guided(case) for case in bench.cases.values()])
    return dict(zip(bench.cases, tokens(outputs), strict=True))


# Engines with embeddings read vLLM's state of the process, so no two are alive at a time: these
# tests come before the engine that the others share.


def test_without_the_option_embeddings_are_refused(bench: Bench) -> None:
    engine, case = Engine(bench.folder, **ROOMY), bench.cases["the follower"]
    try:
        with pytest.raises(ValueError, match="start it with enable_prompt_embeds"):
            run(engine, [case.prompt], [guided(case)])
    finally:
        engine.close()


def test_tight_and_mixed_with_plain_requests(bench: Bench) -> None:
    """Chunks of 16 tokens, and groups are preempted. Followers return with their output."""
    engine = Engine(
        bench.folder,
        num_gpu_blocks_override=9,
        max_num_batched_tokens=16,
        max_num_seqs=16,
        enable_prompt_embeds=True,
    )
    try:
        cases = list(bench.cases.values())
        prompts = [case.prompt for case in cases for _ in "ab"]
        params = [p for case in cases for p in (guided(case), plain(max_tokens=NEW_TOKENS))]
        with engine.whole_preemptions():
            got = tokens(run(engine, prompts, params))
        assert got[::2] == list(bench.want.values())
        assert got[1::2] == list(bench.plain.values())
        assert engine.stats()["group_preemptions"] > 0
    finally:
        engine.close()


@pytest.fixture(scope="module")
def roomy(bench: Bench) -> Iterator[Engine]:
    engine = Engine(bench.folder, **ROOMY, enable_prompt_embeds=True)
    yield engine
    engine.close()


def test_in_one_batch_and_from_the_prefix_cache(roomy: Engine, bench: Bench) -> None:
    assert all_guided(roomy, bench) == bench.want
    before = roomy.stats()["solo_rows"]
    assert all_guided(roomy, bench) == bench.want
    assert roomy.stats()["solo_rows"] == before == 0


def test_equal_shapes_share_no_cache(roomy: Engine, bench: Bench) -> None:
    """Embeddings have no token ids, so only their values tell prompts apart."""
    one, two = bench.model.drawn(64, 8), bench.model.drawn(64, 9)
    for a, b in ((one, two), (two, one)):
        case = Case(
            {"prompt_embeds": a}, {"guidance_scale": 2, "negative_prompt_embeds": b}, [], []
        )
        want = bench.model.generate([a, b], [2.0, -1.0])
        assert tokens(run(roomy, [case.prompt], [guided(case)])) == [want]


@pytest.mark.parametrize("name", ["both", "mixed", "the follower"])
def test_windows_make_followers_later(roomy: Engine, bench: Bench, name: str) -> None:
    case = bench.cases[name]
    want = bench.model.generate(case.streams, case.weights, 5, 11)
    fields = {**case.fields, "guidance_start": 5, "guidance_end": 11}
    (output,) = run(roomy, [case.prompt], [guided(case, extra_args=fields)])
    assert list(output.outputs[0].token_ids) == want


def test_several_choices(roomy: Engine, bench: Bench) -> None:
    case = bench.cases["both"]
    (output,) = run(roomy, [case.prompt], [guided(case, n=2, temperature=1.0, top_k=1)])
    assert [list(x.token_ids) for x in output.outputs] == [bench.want["both"]] * 2


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another width": ({"negative_prompt_embeds": torch.zeros(3, 5)}, "of shape \\[tokens, "),
    "no floats": ({"negative_prompt_embeds": torch.zeros(3, 64, dtype=torch.int64)}, "floating"),
    "one dimension": ({"negative_prompt_embeds": torch.zeros(64)}, "must be a tensor of shape"),
    "empty": ({"negative_prompt_embeds": torch.zeros(0, 64)}, "must be a tensor of shape"),
    "no tensor": ({"negative_prompt_embeds": 5}, "must be a tensor of shape"),
    "empty text": ({"negative_prompt_embeds": ""}, "is empty"),
    "no base64": ({"negative_prompt_embeds": "!"}, "must be the base64"),
    "no file of torch": ({"negative_prompt_embeds": "AAAA"}, "must be the base64"),
    "too long": ({"negative_prompt_embeds": torch.zeros(1, 64).expand(10**9, 64)}, "the context"),
    "two negatives": (
        {"negative_prompt_embeds": torch.zeros(3, 64), "negative_prompt": "x"},
        "both given",
    ),
    "scored": (
        {"negative_prompt_embeds": torch.zeros(3, 64), "guidance_score_tokens": 2},
        "not prompt embeddings",
    ),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_refused(roomy: Engine, name: str) -> None:
    fields, sentence = REFUSED[name]
    scored = {"prompt_logprobs": 0} if name == "scored" else {}
    params = plain(extra_args={"guidance_scale": 2, **fields}, **scored)
    with pytest.raises(ValueError, match=sentence):
        run(roomy, [{"prompt_token_ids": [5, 6, 7, 8]}], [params])


def test_a_prompt_of_embeddings_has_no_last_token(roomy: Engine, bench: Bench) -> None:
    prompt = bench.cases["the leader"].prompt
    with pytest.raises(ValueError, match="no last token"):
        run(roomy, [prompt], [plain(extra_args={"guidance_scale": 2})])
