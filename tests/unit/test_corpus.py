"""The generator of the embedded model's training text.

The text is reproducible from its seed, and its topics can be counted. The tests need the standard
library only. `models/training` is a folder of scripts. It is put on the path here, as when one of
the scripts runs.
"""

from __future__ import annotations

import random
import re
from itertools import islice, pairwise

import corpus
import fluency
import grammar
import pytest
import topics


def stories(num: int, *named: str) -> list[str]:
    rng = random.Random(7)
    return [corpus.story(rng, named) for _ in range(num)]


def pooled_share(texts: list[str], topic: str) -> float:
    return corpus.on_topic_share(" ".join(texts), topic)


def test_the_same_seed_gives_the_same_rows():
    assert list(islice(corpus.rows(3), 50)) == list(islice(corpus.rows(3), 50))
    assert list(islice(corpus.rows(3), 50)) != list(islice(corpus.rows(4), 50))


def test_no_word_belongs_to_two_topics_or_two_kinds():
    words = [
        word
        for topic in topics.LEXICON.values()
        for kind in topics.KINDS
        for word in topic.words(kind)
    ]
    assert len(words) - len(set(words)) == 0
    assert all(corpus.WORD.fullmatch(word) for word in words)


def test_there_are_enough_topics_and_words():
    assert len(corpus.TOPICS) >= 8
    assert min(map(len, corpus.TOPICS.values())) >= 30


def test_the_fixed_text_of_the_grammar_is_neutral():
    templates = " ".join(template for stage in grammar.STAGES.values() for template in stage)
    fixed = re.sub(r"\{\w+\}", " ", templates) + " ".join(grammar.HEROES.values())
    assert sum(corpus.topic_counts(fixed).values()) == 0


@pytest.mark.parametrize("topic", topics.LEXICON)
def test_acts_use_their_own_topics_words_only(topic: str):
    for act in topics.LEXICON[topic].acts:
        assert corpus.on_topic_share(act, topic) == 1.0, act


def test_every_stage_of_a_plot_has_sentences():
    assert {stage for plot in grammar.PLOTS for stage in plot} == set(grammar.STAGES)


def test_share_counts_content_words_only():
    assert (
        corpus.on_topic_share("The Whale and the pirate saw a tractor; nobody else did.", "sea")
        == 2 / 3
    )
    assert corpus.on_topic_share("Nothing at all.", "sea") == 0.0


@pytest.mark.parametrize("topic", topics.LEXICON)
def test_a_named_topic_shifts_the_words_slightly(topic: str):
    """300 stories, about 3000 sentence draws: the bounds are five standard deviations or more from
    0.44 and 0.1."""
    assert 0.38 < pooled_share(stories(300, topic), topic) < 0.50
    assert 0.06 < pooled_share(stories(300), topic) < 0.14


def test_a_story_without_a_topic_does_not_settle_on_one():
    """Neighbouring sentences share a topic no more often than chance (one in ten; bound: over five
    sigma)."""
    rng = random.Random(1)
    drawn = [corpus.draw_topic(rng, ()) for _ in range(20_000)]
    same = sum(a == b for a, b in pairwise(drawn)) / len(drawn)
    assert 0.085 < same < 0.115


def test_stories_are_finished_sentences():
    for text in stories(200, "space"):
        assert not re.search(r"[\[\]{}|_]", text), text
        assert text[0].isupper()
        assert text.endswith(".")
        assert not re.search(r"\b[Aa] ([aeio]|hour)", text), text
        assert not re.search(r"\b[Aa]n (?!hour)[^aeio]", text), text


def test_every_story_is_grammatical_and_noise_is_not():
    assert all(fluency.grammatical_share(text) == 1.0 for text in stories(20, "music"))
    assert fluency.grammatical_share("Once upon a whale the the sea.") == 0.0


def test_the_first_lesson_is_topic_words_and_two_names():
    words = (
        corpus.word_list(random.Random(2), ("farm",))
        .removeprefix("Words: ")
        .removesuffix(".")
        .split()
    )
    names = {word for word in words if word[0].isupper()}
    assert len(names) == 2, words
    assert sum(corpus.topic_counts(" ".join(words)).values()) == sum(
        word not in names for word in words
    )


def test_the_second_lesson_shifts_the_words_more_than_the_last():
    rng = random.Random(1)
    assert pooled_share([corpus.plain_story(rng, ("farm",)) for _ in range(200)], "farm") > 0.65


@pytest.mark.parametrize("tell", corpus.LESSONS)
def test_each_lesson_follows_from_its_seed(tell: corpus.Teller):
    assert list(islice(corpus.rows(3, tell), 20)) == list(islice(corpus.rows(3, tell), 20))


def test_rows_learn_stories_and_not_prompts():
    for row in islice(corpus.rows(5), 300):
        learned = [text for text, learn in row.pieces if learn and text != "\n"]
        assert learned
        assert all(text.endswith(corpus.EOS) for text in learned)
        assert not any(corpus.BOS in text or "<|" in text for text in learned)


def test_chats_may_name_a_topic_in_either_message():
    rng = random.Random(2)
    prompts = [corpus.chat_row(rng, corpus.story).pieces for _ in range(400)]
    systems = "".join(
        text for pieces in prompts for text, _ in pieces if text.startswith("<|system|>")
    )
    users = "".join(text for pieces in prompts for text, _ in pieces if text.startswith("<|user|>"))
    for topic in topics.LEXICON.values():
        assert topic.names[0] in systems
        assert topic.names[0] in users


def test_two_topics_may_be_named():
    texts = stories(300, "sea", "castle")
    assert pooled_share(texts, "sea") > 0.25
    assert pooled_share(texts, "castle") > 0.25
