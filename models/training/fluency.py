"""How much of a text the story grammar could have said: the measure of whether strong guidance
still speaks English."""

from __future__ import annotations

import re
from functools import cache

from .grammar import HEROES, STAGES
from .topics import KINDS, LEXICON

SLOT = re.compile(r"\\\{(\w+)\\\}")
VARIANTS = re.compile(r"\\\[(.+?)\\\]")


def one_of(words: set[str]) -> str:
    return "(?:" + "|".join(sorted(map(re.escape, words), key=len, reverse=True)) + ")"


@cache
def slot_pattern(slot: str) -> str:
    """What may stand in a slot, whatever the topic."""
    if slot in ("hero", "friend"):
        return one_of({name for names in HEROES.values() for name in names.split()})
    if slot == "act":
        return one_of({act for topic in LEXICON.values() for act in topic.acts})
    if slot == "topic":
        return one_of({name for topic in LEXICON.values() for name in topic.names})
    kind = "thing" if slot == "prize" else slot.rstrip("2")
    if kind in KINDS:
        return one_of({word for topic in LEXICON.values() for word in topic.words(kind)})
    return {"he": "s?he", "him": "hi[ms]|her", "his": "his|her", "girl": "girl|boy"}[
        slot.lower()
    ].join(("(?:", ")"))


def template_pattern(template: str) -> str:
    escaped = re.escape(template).replace(r"\ ", " ")
    variants = VARIANTS.sub(lambda match: "(?:" + match[1].replace(r"\|", "|") + ")", escaped)
    articles = re.sub(r"\b([Aa]) ", r"\1n? ", variants)
    return SLOT.sub(lambda match: slot_pattern(match[1]), articles)


@cache
def any_sentence() -> re.Pattern[str]:
    templates = [template for stage in STAGES.values() for template in stage]
    return re.compile("|".join(map(template_pattern, templates)), re.IGNORECASE)


def grammatical_share(text: str) -> float:
    """Share of the text, by letters, that is whole sentences of the grammar with every slot filled
    rightly."""
    rest = any_sentence().sub("", text)
    return 1 - num_letters(rest) / max(1, num_letters(text))


def num_letters(text: str) -> int:
    return sum(map(str.isalpha, text))
