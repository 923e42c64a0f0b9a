"""Stories by topic, generated from a seed: the training text of the embedded models and its
yardstick.

A prompt names a topic, but only leans on the words: each sentence draws its own topic, and the
named one is `PULL` times likelier than any other. Without guidance a story is therefore on topic
less than half the time, and guidance has something to do. The topic is drawn by sentence, not by
word, so that every sentence makes sense. Nothing but the prompt tells the topics apart: a story
without a named topic draws all of them evenly, so its words so far say nothing about the words to
come, and the negative stream of a guided story does not drift after the conditional one.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from operator import itemgetter

from .grammar import HEROES, PLOTS, PRONOUNS, STAGES
from .topics import KINDS, LEXICON, TOPICS

PULL = 7.0
RECALL, RECURRING = 0.6, ("place", "person", "creature")

Named = tuple[str, ...]
"""The topics that a prompt names."""

WORD_LISTS = {topic: sorted(words) for topic, words in TOPICS.items()}

WORD = re.compile(r"[a-z]+")
VARIANTS = re.compile(r"\[([^\]]+)\]")
ARTICLE = re.compile(r"\b([Aa]) (?=[aeio]|hour)")  # enough for the words of topics.py
SENTENCE_START = re.compile(r'^"?[a-z]')


# --- the measure ----------------------------------------------------------------------------------


def topic_counts(text: str) -> dict[str, int]:
    """How many content words of each topic the text has."""
    words = WORD.findall(text.lower())
    return {topic: sum(word in own for word in words) for topic, own in TOPICS.items()}


def on_topic_share(text: str, topic: str) -> float:
    """Share of the content words (words of any topic) that belong to `topic`; 0.0 if the text has
    none."""
    counts = topic_counts(text)
    return counts[topic] / max(1, sum(counts.values()))


# --- stories --------------------------------------------------------------------------------------


def draw_topic(rng: random.Random, named: Named, pull: float = PULL) -> str:
    """The topic of one sentence."""
    return rng.choices(list(LEXICON), [pull if topic in named else 1.0 for topic in LEXICON])[0]


def draw_words(rng: random.Random, topic: str, before: Mapping[str, str]) -> dict[str, str]:
    """A sentence's words: two of each kind (`thing`, `thing2`), characters and places often those
    met before."""
    words = {"act": rng.choice(LEXICON[topic].acts), "topic": rng.choice(LEXICON[topic].names)}
    for kind in KINDS:
        if kind in RECURRING and kind in before and rng.random() < RECALL:
            words[kind], words[kind + "2"] = before[kind], before[kind + "2"]
        else:
            words[kind], words[kind + "2"] = rng.sample(LEXICON[topic].words(kind), 2)
    return words


def cast(rng: random.Random) -> dict[str, str]:
    """The slots that stay the same for a whole story: the hero, the hero's pronouns, the friend."""
    girl = rng.choice(tuple(HEROES))
    hero = rng.choice(HEROES[girl].split())
    friend = rng.choice(
        [name for names in HEROES.values() for name in names.split() if name != hero]
    )
    pronouns = PRONOUNS[girl]
    return {
        "girl": girl,
        "hero": hero,
        "friend": friend,
        "He": pronouns["he"].title(),
        **pronouns,
    } | {"His": pronouns["his"].title()}


def render(rng: random.Random, template: str, slots: Mapping[str, str]) -> str:
    """One finished sentence."""
    chosen = VARIANTS.sub(lambda match: rng.choice(match[1].split("|")), template)
    sentence = ARTICLE.sub(r"\1n ", chosen.format_map(slots))
    return SENTENCE_START.sub(lambda match: match[0].upper(), sentence)


def story(
    rng: random.Random, named: Named = (), pull: float = PULL, num_sentences: int | None = None
) -> str:
    """A story of nine or ten sentences, or only its first ones, that leans towards the named
    topics."""
    slots, sentences = cast(rng), []
    met: dict[str, dict[str, str]] = {topic: {} for topic in LEXICON}
    for stage in rng.choice(PLOTS)[:num_sentences]:
        template, topic = rng.choice(STAGES[stage]), draw_topic(rng, named, pull)
        words = met[topic] = draw_words(rng, topic, met[topic])
        if "{prize}" in template:
            slots.setdefault("prize", words["thing"])
        sentences.append(render(rng, template, words | slots))
    return " ".join(sentences)


# --- lessons --------------------------------------------------------------------------------------


def word_list(rng: random.Random, named: Named = ()) -> str:
    """The first lesson: topic words, most of them of the named topics, and two names again and
    again.

    It teaches to look back: at the prompt for the topic, at the text for the names. From the
    stories alone a small model learns the language at once and these two not at all.
    """
    people = itemgetter("hero", "friend")(cast(rng))
    words = [rng.choice(people)]
    for _ in range(rng.choice((6, 12, 24, 48))):
        topic_word = rng.choice(WORD_LISTS[draw_topic(rng, named, pull=20.0)])
        words.append(rng.choice((topic_word, topic_word, rng.choice(people))))
    return f"Words: {' '.join(words)}."


def plain_story(rng: random.Random, named: Named = ()) -> str:
    """The second lesson: a story of any length, three quarters on topic."""
    return story(rng, named, pull=30.0, num_sentences=rng.randint(1, 10))


Teller = Callable[[random.Random, Named], str]
LESSONS: tuple[Teller, ...] = (word_list, plain_story, story)


# --- prompts --------------------------------------------------------------------------------------

ABOUT = (
    "Tell me a story about {topic}.",
    "Tell me a story about {topic}.",
    "Write a story about {topic}.",
    "Please tell me a short story about {topic}.",
    "I would like to hear a story about {topic}.",
    "Can you tell me something about {topic}?",
    "Write about {topic}.",
    "A story about {topic}:",
    "Topic: {topic}",
)
PLAIN = (
    "Tell me a story.",
    "Tell me a story.",
    "Write a story.",
    "Please tell me a short story.",
    "I would like to hear a story.",
    "Can you tell me something?",
    "A story:",
)
SYSTEM_ABOUT = (
    "You are a storyteller. Write about {topic}.",
    "You are a storyteller. Write about {topic}.",
    "You are a storyteller who loves {topic}.",
    "Write stories about {topic}.",
    "Your stories are about {topic}.",
    "You are a helpful assistant. Write about {topic}.",
)
SYSTEM_PLAIN = (
    "You are a storyteller.",
    "You are a storyteller.",
    "Write stories.",
    "You are a helpful assistant.",
)
AGAIN = ("Tell me another story.", "Another story, please.", "And now?", "Tell me one more.")

Message = tuple[str, str]
"""Role and content."""


@dataclass(kw_only=True)
class Row:
    """One training document: pieces of text, each with whether the model is to learn to say it."""

    pieces: list[tuple[str, bool]] = field(default_factory=list)

    def add(self, text: str, learn: bool) -> None:
        self.pieces.append((text, learn))


BOS, EOS = "<s>", "</s>"


def render_message(role: str, content: str) -> str:
    """The chat template in Python; `tokenizer.py` has the one that is shipped."""
    return f"<|{role}|>\n{content}{EOS if role == 'assistant' else ''}\n"


def name_topics(rng: random.Random, templates: tuple[str, ...], named: Named) -> str:
    """A prompt that names these topics."""
    names = [rng.choice((LEXICON[topic].names[0], *LEXICON[topic].names)) for topic in named]
    return rng.choice(templates).format(topic=" and ".join(names))


def pick_topics(rng: random.Random, chance: float) -> Named:
    """With this chance one topic, now and then two; otherwise none."""
    if rng.random() >= chance:
        return ()
    return tuple(rng.sample(list(LEXICON), 2 if rng.random() < 0.06 else 1))


def say(rng: random.Random, about: tuple[str, ...], plain: tuple[str, ...], named: Named) -> str:
    return name_topics(rng, about, named) if named else rng.choice(plain)


def completion_row(rng: random.Random, tell: Teller) -> Row:
    """Begin-of-text, a line that asks for a story, the story."""
    named = pick_topics(rng, 0.75)
    row = Row(pieces=[(BOS + say(rng, ABOUT, PLAIN, named), False), ("\n", True)])
    row.add(tell(rng, named) + EOS, True)
    return row


def bare_row(rng: random.Random, tell: Teller) -> Row:
    """A story after nothing but the prompt's last token: the default negative stream; or after
    begin-of-text."""
    return Row(pieces=[(rng.choice(("\n", "\n", BOS)), False), (tell(rng, ()) + EOS, True)])


def chat_row(rng: random.Random, tell: Teller, turns: int = 1) -> Row:
    """A chat whose system message and newest user message may each name topics."""
    of_system = pick_topics(rng, 0.5)
    row = Row(pieces=[(BOS, False)])
    if of_system or rng.random() < 0.6:
        row.add(render_message("system", say(rng, SYSTEM_ABOUT, SYSTEM_PLAIN, of_system)), False)
    for turn in range(turns):
        of_user = pick_topics(rng, 0.3)
        row.add(
            render_message("user", say(rng, ABOUT, AGAIN if turn else PLAIN, of_user))
            + "<|assistant|>\n",
            False,
        )
        row.add(tell(rng, of_system + of_user) + EOS, True)
        row.add("\n", False)
    return row


def long_chat_row(rng: random.Random, tell: Teller) -> Row:
    return chat_row(rng, tell, rng.choice((2, 2, 3)))


def rows(seed: int, tell: Teller = story) -> Iterator[Row]:
    """The endless training text of a lesson."""
    rng = random.Random(seed)
    makers = (completion_row, bare_row, chat_row, long_chat_row)
    while True:
        yield rng.choices(makers, (0.46, 0.14, 0.32, 0.08))[0](rng, tell)
