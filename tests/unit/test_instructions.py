"""benchmarks/instructions: the data, the checkers, and how answers become shares and intervals."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from benchmarks.instructions import checkers, context, prompts
from benchmarks.instructions.answers import Answer, AnswerFile, Request
from benchmarks.instructions.fluency import repetition
from benchmarks.instructions.intervals import bootstrap, paired_difference
from benchmarks.instructions.report import points, tables

PROMPTS = {prompt.name: prompt for prompt in prompts.prompts()}
ITEMS = {item.name: item for item in context.items()}

OBEYED = {
    "one_sentence/0": [
        "Blue light is scattered most.",
        "The air, e.g. over the U.S. coast, scatters 4.5 times more blue light!",
        'They say "it is the air."',
        "Air scatters blue light most",
    ],
    "lower_case/0": ["trees, and 2 birds.", "é vero"],
    "upper_case/0": ["FRESH BREAD! OPEN AT 8."],
    "no_commas/0": ["Take a coat and a map. Bring water too."],
    "json/0": ['{"name": "Ann", "age": 3}', '```json\n{"a": [1, 2]}\n```', ' {"a": {}} '],
    "question/0": ["What for?", "I see. Which kind do you want?", 'You mean "which?"'],
    "title/0": ["<<The Lamp>>\nIt shines.", " <<Title of the Sea>> Waves."],
    "word/0": ["Light a Lantern.", "Put the \u201clantern\u201d out"],
    "language/0": ["Ein Hund ist ein Tier und er lebt mit den Menschen."],
    "language/4": ["Une école est un lieu où les enfants apprennent avec des amis."],
    "language/7": ["Un jardín es un lugar con plantas y flores para la familia."],
    "short/0": ["White.", "It is white."],
    "list/0": ["- water\n- light", "Plants need:\n\n* water\n  * light"],
    "list/5": ["1. ball\n2. net"],
    "begins/0": ["Good question! It pulls.", "\u201cgood question\u201d, said she."],
    "ends/0": ["It is a high hill, and that is all.", 'A hill... And that is "all"!'],
    "persona/0": ["Arrr, boil it.", "Boil the water, matey!"],
    "persona/4": ["Love doth bind thee.", "\u2019Tis a flame."],
    "persona/7": ["Howdy! Build a fire.", "Y\u2019all need a fire."],
}
"""Answers that obey, by prompt. They ended by themselves."""

DISOBEYED = {
    "one_sentence/0": [
        "It scatters. It is blue.",
        "Air.",
        "Two things:\n- air\n- light",
        "1. The air",
    ],
    "lower_case/0": ["trees and Birds", "123"],
    "upper_case/0": ["FRESH BREAd", "8!"],
    "no_commas/0": ["Take a coat, a map and some water.", "A coat."],
    "json/0": ['{"name": "Ann"', '["Ann", 3]', "{}", 'Here: {"name": "Ann"}', "Ann, 3", "3"],
    "question/0": ["What for? Tell me.", "Buy a red one."],
    "title/0": ["The Lamp\nIt shines.", "<<title>>\nIt shines.", "<< >> a", "A tale: <<Lamp>>"],
    "word/0": ["Light a lamp.", "Two lanterns."],
    "language/0": [
        "A dog is an animal that lives with the people.",
        "Ein Hund ist",
        "Un chien est un animal et il vit avec les gens.",
    ],
    "language/4": ["A school is a place where children learn with friends.", "Bonjour!"],
    "language/7": ["Ein Garten ist ein Ort mit Blumen und er ist grün.", "Hola! Jardín."],
    "short/0": ["The snow is white."],
    "list/0": ["- water", "- a\n- b\n- c", "1. water\n2. light", "water - light - air"],
    "list/5": ["1. ball", "1. a\n3. b", "- ball\n- net"],
    "begins/0": ["It pulls. Good question!", "Good questions are rare.", "Good"],
    "ends/0": ["And that is all: a hill.", "A hill, and that was all."],
    "persona/0": ["Pirates drink coffee on a ship.", "Carry yes, array no."],
    "persona/4": ["Shakespeare wrote of love.", "Love is a thigh."],
    "persona/7": ["A cowboy builds a fire.", "Warm up."],
}


def cases(by_prompt):
    return [(name, text) for name, texts in by_prompt.items() for text in texts]


@pytest.mark.parametrize(("name", "text"), cases(OBEYED))
def test_an_answer_that_obeys(name, text):
    assert PROMPTS[name].checker(text, ended=True)


@pytest.mark.parametrize(("name", "text"), cases(DISOBEYED))
def test_an_answer_that_does_not_obey(name, text):
    assert not PROMPTS[name].checker(text, ended=True)


@pytest.mark.parametrize("text", ["", " \n", "?", "```", "...", "\ufffd"])
def test_an_answer_without_a_word_obeys_nothing(text):
    assert not any(prompt.checker(text, ended=True) for prompt in PROMPTS.values())
    assert not any(item.from_passage(text) or item.from_memory(text) for item in ITEMS.values())


def test_which_families_may_be_cut():
    may = {prompt.family for prompt in PROMPTS.values() if prompt.checker.may_be_cut}
    passing = {PROMPTS[n].family for n, text in cases(OBEYED) if PROMPTS[n].checker(text, False)}
    assert passing == may
    assert may == {
        *("lower_case", "upper_case", "no_commas", "word"),
        *("language", "begins", "persona", "title"),
    }


def test_a_part_of_the_prompts_has_all_families():
    assert len({prompt.family for prompt in prompts.prompts(14)}) == 14
    assert {item.family for item in context.items(2)} == {"counterfactual", "invented"}


def test_conversations_differ_in_the_instruction_alone():
    for prompt in PROMPTS.values():
        assert prompt.conditional()[1] == prompt.negative()[1]
        assert prompt.conditional()[0]["content"] == prompt.instruction
        assert prompt.negative()[0]["content"] == "You are a helpful assistant."


@pytest.mark.parametrize("item", ITEMS.values(), ids=lambda item: item.name)
def test_only_the_passage_has_its_answer(item):
    assert item.from_passage(item.passage)
    assert not item.from_memory(item.passage)
    assert not any(checkers.has_phrase(item.passage, word) for word in item.memory)
    assert not item.from_passage(item.question)
    assert not item.from_memory(item.question)
    assert item.passage in item.conditional()[1]["content"]
    assert item.passage not in item.negative()[1]["content"]


def test_answers_of_the_passage_and_of_memory():
    item = ITEMS["counterfactual/0"]
    assert item.from_passage("It is lyon.")
    assert item.from_memory("It is Paris.")
    assert not item.from_memory("Lyon, no longer Paris.")
    assert not item.from_passage("Lyonesse")


def test_repetition_is_the_share_of_4_grams_that_occurred_before():
    assert repetition([1, 2, 3]) is None
    assert repetition([1, 2, 3, 4, 5]) == 0
    assert repetition([7] * 8) == 1 - 1 / 5
    assert repetition([1, 2] * 4) == 1 - 2 / 5


def test_the_interval_of_a_share_is_about_the_normal_one():
    values = [1.0] * 60 + [0.0] * 40
    low, high = bootstrap(values)
    half = 1.96 * math.sqrt(0.6 * 0.4 / 100)
    assert low == pytest.approx(0.6 - half, abs=0.015)
    assert high == pytest.approx(0.6 + half, abs=0.015)
    assert bootstrap(values) == (low, high)
    assert bootstrap([1.0, 1.0]) == (1, 1)


def test_a_paired_difference_knows_that_prompts_are_the_same():
    reference = [0.0, 1.0] * 50
    mean, (low, high) = paired_difference([value + 0.5 for value in reference], reference)
    assert mean == low == high == 0.5
    with pytest.raises(ValueError, match="zip"):
        paired_difference([1.0], [1.0, 2.0])


def answer(prompt, text, scale=1.0, **fields):
    table = "instructions" if prompt in PROMPTS else "context"
    key = f"{prompt} {scale} {text}"
    made = Answer(key, table, prompt, "greedy", scale, 0, text, True, 4, math.log(2), 0.25)
    return replace(made, **fields)


def test_points_count_prompts_once_however_many_samples():
    found = points(
        [
            answer("word/0", "a lantern", mode="sampled"),
            answer("word/0", "a lamp", mode="sampled", sample=1),
            answer("word/1", "a stone", mode="sampled"),
            answer("word/1", "a stone", mode="sampled", sample=1, loss=None, repetition=None),
            answer("word/0", "a lantern", scale=2.0, mode="sampled"),
            answer("word/1", "of marble", scale=2.0, mode="sampled", ended=False),
        ],
        PROMPTS,
    )
    assert [(p["scale"], p["share"], p["prompts"]) for p in found] == [(1, 0.25, 2), (2, 1, 2)]
    assert found[0]["difference"] == 0
    assert found[1]["difference"] == 0.75
    assert found[1]["difference_interval"] == (0.5, 1)
    assert found[1]["families"] == {"word": 1}
    assert found[1]["ended"] == 0.5
    assert found[0]["perplexity_median"] == pytest.approx(2)
    assert found[0]["repetition"] == 0.25


def test_points_of_passages_tell_memory_from_other_answers():
    found = points(
        [
            answer("counterfactual/0", "Paris"),
            answer("counterfactual/1", "Osaka"),
            answer("counterfactual/2", "Turin"),
            answer("counterfactual/3", "Bonn"),
            answer("invented/0", "plum cakes"),
        ],
        ITEMS,
    )
    assert found[0]["share"] == 2 / 5
    assert found[0]["memory"] == 1 / 4
    assert found[0]["families"] == {"counterfactual": 1 / 4, "invented": 1}


def test_tables_name_every_scale_and_family():
    made = [
        answer(name, "a lantern", scale)
        for name in ("word/0", "persona/0")
        for scale in (0.0, 1, 2)
    ]
    text = tables(points(made, PROMPTS))
    assert "| negative alone | 50.0% (0.0% to 100.0%) | +0.0% (+0.0% to +0.0%) | 2.00 |" in text
    assert "| 1 | 50.0% (0.0% to 100.0%) | - |" in text
    assert "| word | 100% | 100% | 100% |" in text
    assert "| persona | 0% | 0% | 0% |" in text


def test_kept_answers_survive_a_line_that_was_cut(tmp_path):
    path = tmp_path / "answers.jsonl"
    first, second = answer("word/0", "ein Wörterbuch"), answer("word/1", "marble")
    AnswerFile(path).add([first])
    with path.open("a", encoding="utf-8") as file:
        file.write('{"key": "cut')
    file = AnswerFile(path)
    assert file.get(first.key) == first
    file.add([second])
    again = AnswerFile(path)
    assert again.get(first.key) == first
    assert again.get(second.key) == second
    assert len(path.read_text(encoding="utf-8").splitlines()) == 3


def test_another_request_has_another_key():
    request = Request("context", "x/0", "greedy", 1.0, 0, [1], [2], 0.0, 32, 0)
    keys = {
        request.key("a"),
        request.key("b"),
        replace(request, scale=2.0).key("a"),
        replace(request, conditional=[3]).key("a"),
        replace(request, max_tokens=80).key("a"),
    }
    assert len(keys) == 5
    assert request.key("a") == replace(request).key("a")


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("42", True),
        ("17 + 25 = 42.", True),
        ("It is 1,042", False),
        ("42 or 43", False),
        ("", False),
    ],
)
def test_the_last_number_of_an_answer_counts(text: str, right: bool) -> None:
    assert checkers.last_number(42)(text, True) is right
    assert not checkers.last_number(42)(text, False)


def test_sums_have_one_right_answer_each() -> None:
    asked = prompts.arithmetic()
    assert len({one.question for one in asked}) == len(asked) == 60
    assert asked[0].checker("The answer is 1,000.", True) is False
    for one in asked:
        a, sign, b = one.question.split("?")[0].split()[2:]
        value = {"+": int(a) + int(b), "-": int(a) - int(b), "x": int(a) * int(b)}[sign]
        assert one.checker(f"It is {value}", True), one.question
