"""The life of a logits processor.

It sees each token once and in order. It is made anew if tokens are taken back. It is closed once. A
faulty one fails only its own request.
"""

from __future__ import annotations

import random
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cfg_core.errors import ConfigError, RequestError
from cfg_core.logits_processors.base import (
    EngineInfo,
    LogitsProcessor,
    LogitsProcessorFactory,
    SequenceInfo,
)
from cfg_core.logits_processors.config import check_config
from cfg_core.logits_processors.registry import Registry
from cfg_core.logits_processors.sequences import ProcessorTable

VOCAB = 50


class Letters:
    """A tokenizer of single letters: token i is chr(32 + i)."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(c) - 32 for c in text]

    def batch_decode(self, ids: list[list[int]]) -> list[str]:
        return ["".join(chr(32 + i) for i in row) for row in ids]


ENGINE = EngineInfo(VOCAB, Letters, end_token_ids=(2,))


class Witness(LogitsProcessor):
    """Remembers what it saw, and forbids token `len(seen) % VOCAB`."""

    made: ClassVar[list[Witness]] = []

    def __init__(self, fault: str = "", at: int = 0) -> None:
        self.seen: list[int] = []
        self.closed, self.calls, self.fault, self.at = 0, 0, fault, at
        Witness.made.append(self)

    def __call__(self, scores: torch.Tensor) -> Any:
        if self.fault and len(self.seen) >= self.at:
            if self.fault == "raise":
                raise RuntimeError("on purpose")
            return {
                "shape": scores[:-1],
                "type": [0.0],
                "integers": scores.long(),
                "nan": scores * float("nan"),
                "nothing": torch.full_like(scores, -torch.inf),
            }[self.fault]
        scores[len(self.seen) % VOCAB] = -torch.inf
        return scores

    def accept(self, token: int) -> None:
        assert not self.closed
        self.seen.append(token)

    def snapshot(self) -> list[int]:
        return list(self.seen)

    def restore(self, state: list[int]) -> None:
        self.seen = state

    def close(self) -> None:
        self.closed += 1


class WitnessFactory(LogitsProcessorFactory):
    def make(self, sequence: SequenceInfo, *, fault: str = "", at: int = 0) -> LogitsProcessor:
        if fault == "make":
            raise RuntimeError("cannot")
        return Witness(fault, at)


class StrangeFactory(WitnessFactory):
    def check(self) -> None:
        raise LookupError("'nothing'")


def deep(levels: int) -> list[Any]:
    inner: list[Any] = []
    for _ in range(levels):
        inner = [inner]
    return inner


@pytest.fixture
def registry() -> Registry:
    Witness.made = []
    config = {"witness": f"{__name__}:WitnessFactory", "strange": f"{__name__}:StrangeFactory"}
    return Registry.load(config, ENGINE)


@pytest.fixture
def table(registry: Registry) -> ProcessorTable:
    return ProcessorTable(registry.make)


ASKED = [{"name": "witness"}]
A, B = SequenceInfo("a", (1, 2)), SequenceInfo("b", (3,))


def rows(n: int = 1) -> list[torch.Tensor]:
    return list(torch.zeros(n, VOCAB))


def forbidden(row: torch.Tensor) -> list[int]:
    return (row == -torch.inf).nonzero().flatten().tolist()


def test_each_sequence_has_its_own_and_sees_each_token_once(table: ProcessorTable) -> None:
    for length in range(4):
        for sequence in (A, B):
            (row,) = rows()
            table.process(sequence, ASKED, list(range(10, 10 + length)), [row])
            assert forbidden(row) == [length]
    assert [w.seen for w in Witness.made] == [[10, 11, 12]] * 2
    table.forget(["a", "unknown"])
    assert [w.closed for w in Witness.made] == [1, 0]
    table.close()
    assert [w.closed for w in Witness.made] == [1, 1]


def test_rows_of_drafts_see_the_drafts_before_them_and_leave_no_trace(
    table: ProcessorTable,
) -> None:
    three = rows(3)
    table.process(A, ASKED, [7], three, drafts=[8, 9])
    assert [forbidden(row) for row in three] == [[1], [2], [3]]
    (last,) = rows()
    table.process(A, ASKED, [7], [last], drafts=[8, 9], first=2)
    assert forbidden(last) == [3]
    table.process(A, ASKED, [7, 8, 5], rows())
    assert [w.seen for w in Witness.made] == [[7, 8, 5]]


def test_tokens_that_were_taken_back_make_it_anew(table: ProcessorTable) -> None:
    table.process(A, ASKED, [7, 8, 9], rows())
    table.process(A, ASKED, [7, 4], rows())
    first, second = Witness.made
    assert (first.closed, second.closed) == (1, 0)
    assert second.seen == [7, 4]


@pytest.mark.parametrize("fault", ["raise", "shape", "type", "integers", "nan", "nothing", "make"])
def test_a_fault_is_reported_and_fails_only_its_own_request(
    table: ProcessorTable, fault: str
) -> None:
    asked = [{"name": "witness"}, {"name": "witness", "fault": fault, "at": 1}]
    table.process(A, asked, [], rows())
    mine, other = rows(2)
    table.process(A, asked, [5], [mine])
    table.process(B, ASKED, [5], [other])
    assert forbidden(mine) == []
    assert forbidden(other) == [1]
    failures = table.take_failures()
    assert list(failures) == ["a"]
    assert failures["a"].row == 0
    assert "'witness'" in failures["a"].reason
    table.process(A, asked, [5, 6], [mine])
    # Reported again until the scheduler has ended the request.
    assert (forbidden(mine), table.take_failures()) == ([], failures)
    table.forget(["a", "b"])
    assert all(w.closed == 1 for w in Witness.made)
    table.process(A, ASKED, [], [mine])  # a new request of the same name
    assert forbidden(mine) == [0]


@pytest.mark.parametrize("first", [0, 2, 3])
def test_a_fault_after_drafts_is_reported_with_its_row_and_ends_nothing(
    table: ProcessorTable, first: int
) -> None:
    """Only the verification of the drafts decides whether the row is used."""
    asked = [{"name": "witness", "fault": "raise", "at": 3}]
    some = rows(4 - first)
    table.process(A, asked, [5], some, drafts=[6, 7, 8], first=first)
    assert {k: f.row for k, f in table.take_failures().items()} == {"a": max(first, 2)}
    assert [forbidden(row) for row in some] == [[1], [2], [], []][first:]
    (row,) = rows()
    table.process(A, asked, [5, 9], [row])
    assert (forbidden(row), table.take_failures()) == ([2], {})
    table.process(A, asked, [5, 9, 9], [row])
    assert table.take_failures()["a"].row == 0


def test_forbidden_tokens_stay_forbidden(table: ProcessorTable) -> None:
    class Allow(LogitsProcessor):
        def __call__(self, scores: torch.Tensor) -> torch.Tensor:
            return torch.ones_like(scores)

    table = ProcessorTable(lambda asked, sequence: [("allow", Allow())])
    (row,) = rows()
    row[7] = -torch.inf
    table.process(A, [], [], [row])
    assert forbidden(row) == [7]


@given(st.integers(0, 10**6))
def test_any_course_of_drafts_and_retractions_ends_with_the_sequence(seed: int) -> None:
    rng = random.Random(seed)
    Witness.made = []
    table = ProcessorTable(lambda asked, sequence: [("witness", Witness())])
    output: list[int] = []
    for _ in range(rng.randrange(1, 20)):
        drafts = [rng.randrange(VOCAB) for _ in range(rng.randrange(4))]
        some = rows(len(drafts) + 1)
        table.process(A, ASKED, output, some, drafts)
        assert [forbidden(row) for row in some] == [
            [(len(output) + i) % VOCAB] for i in range(len(some))
        ]
        kept = rng.randrange(len(drafts) + 1)
        output = output + drafts[:kept] + [rng.randrange(VOCAB)]
        if rng.random() < 0.1:
            output = output[: rng.randrange(len(output) + 1)]
    table.process(A, ASKED, output, rows())
    assert Witness.made[-1].seen == output
    table.close()
    assert all(w.closed == 1 for w in Witness.made)


# --- what a request may ask for


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ("witness", "must be a list"),
        ([3], "logits_processors.0. must be an object"),
        ([{"n": 3}], 'such as {"name"'),
        ([{"name": "no_repeat_ngramm", "n": 3}], "did you mean `no_repeat_ngram`"),
        ([{"name": "no_repeat_ngram"}], "missing a required.* 'n'"),
        ([{"name": "no_repeat_ngram", "n": 3, "m": 4}], "unexpected keyword argument 'm'"),
        ([{"name": "no_repeat_ngram", "n": 0}], "n must be an integer of at least 1"),
        ([{"name": "no_repeat_ngram", "n": True}], "n must be an integer"),
        ([{"name": "no_repeat_ngram", "n": 65}], "at most 64"),
        ([{"name": "section_budget", "max_tokens": -1, "end": "x"}], "max_tokens"),
        ([{"name": "section_budget", "max_tokens": 1, "end": ""}], "end must be text"),
        (
            [{"name": "section_budget", "max_tokens": 1, "end": "x" * 1001}],
            "of 1 to 1000 characters",
        ),
        (
            [{"name": "section_budget", "max_tokens": 1, "end": "x", "start": 3}],
            "start must be text",
        ),
        ([{"name": "section_budget", "max_tokens": 10**30, "end": "x"}], "within 64 bits"),
        ([{"name": "no_repeat_ngram", "n": float("nan")}], "finite numbers"),
        ([{"name": "no_repeat_ngram", "n": deep(2000)}], "nested at most 8 deep"),
        ([{"name": "vocabulary_gate", "characters": "a\ud800"}], "arguments must be text"),
        ([{"name": "n" * 10**6}], "no logits processor with a name of 1000000 characters"),
        ("[" * 100000, "must be a list"),
        ('[{"name": "section_budget", "max_tokens": 1' + "0" * 40 + "}]", "within 64 bits"),
        ([{"name": "strange"}], "LookupError: 'nothing'"),
        ([{"name": "vocabulary_gate", "characters": "a]|(.*)*["}], "without brackets"),
        ([{"name": "vocabulary_gate", "characters": "z-a"}], "not a valid character class"),
        ([{"name": "vocabulary_gate", "characters": "\u4e2d"}], "this model has no token"),
        ([{"name": "witness"}] * 17, "at most 16"),
    ],
)
def test_bad_arguments_are_refused_with_a_sentence(
    registry: Registry, asked: Any, words: str
) -> None:
    with pytest.raises(RequestError, match=words):
        registry.read(asked)


def test_json_text_is_read_too(registry: Registry) -> None:
    assert registry.read('[{"name": "no_repeat_ngram", "n": 3}]') == [
        {"name": "no_repeat_ngram", "n": 3}
    ]


@pytest.mark.parametrize("config", [["a:b"], {"x": 3}, {"x": {"limit": 3}}, {"x": "no_colon"}])
def test_a_malformed_configuration_is_refused(config: Any) -> None:
    with pytest.raises(ConfigError, match="logits_processors"):
        check_config(config)


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("nowhere.at.all:X", "cannot be loaded"),
        (f"{__name__}:Nothing", "cannot be loaded"),
        (f"{__name__}:Witness", "is not a subclass of LogitsProcessorFactory"),
        ({"factory": f"{__name__}:WitnessFactory", "limit": 3}, "limit"),
    ],
)
def test_a_factory_that_cannot_be_loaded_is_refused(entry: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Registry.load({"x": entry}, ENGINE)


# --- the shipped processors


def play(
    registry: Registry, asked: list[dict[str, Any]], num_tokens: int, seed: int, draft_rate: float
) -> list[int]:
    """Sample random allowed tokens, with and without drafts in between."""
    registry.read(asked)
    table, rng = ProcessorTable(registry.make), random.Random(seed)
    output: list[int] = []
    while len(output) < num_tokens:
        drafts = [rng.randrange(VOCAB) for _ in range(3)] if rng.random() < draft_rate else []
        some = rows(len(drafts) + 1)
        table.process(A, asked, output, some, drafts)
        assert table.take_failures() == {}
        for draft, row in zip([*drafts, None], some, strict=True):
            allowed = (row > -torch.inf).nonzero().flatten().tolist()
            output.append(draft if draft in allowed else rng.choice(allowed))
            if output[-1] != draft:
                break
    return output


@pytest.mark.parametrize("draft_rate", [0.0, 0.5])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_no_ngram_comes_twice(registry: Registry, n: int, draft_rate: float) -> None:
    for seed in range(20):
        output = play(registry, [{"name": "no_repeat_ngram", "n": n}], 40, seed, draft_rate)
        ngrams = [tuple(output[i : i + n]) for i in range(len(output) - n + 1)]
        assert len(set(ngrams)) == len(ngrams)


@pytest.mark.parametrize("draft_rate", [0.0, 0.5])
def test_a_section_ends_within_its_budget(registry: Registry, draft_rate: float) -> None:
    asked = [{"name": "section_budget", "max_tokens": 4, "start": "<", "end": "/>"}]
    for seed in range(20):
        text = Letters().batch_decode([play(registry, asked, 400, seed, draft_rate)])[0]
        assert text.count("<") >= 2
        while "<" in text:
            _, text = text.split("<", 1)
            assert "/>" in text[: 4 + 2] or len(text) < 4 + 2
            _, _, text = text.partition("/>")


def test_a_section_that_starts_with_the_output(registry: Registry) -> None:
    asked = [{"name": "section_budget", "max_tokens": 3, "end": "/>"}]
    for seed in range(10):
        text = Letters().batch_decode([play(registry, asked, 10, seed, 0.3)])[0]
        assert "/>" in text[: 3 + 2]


def test_only_tokens_of_these_characters(registry: Registry) -> None:
    asked = [{"name": "vocabulary_gate", "characters": "0-9 "}]
    text = Letters().batch_decode([play(registry, asked, 200, 1, 0.3)])[0]
    assert set(text) == set('0123456789 "')  # " is token 2, the end of a sequence here
