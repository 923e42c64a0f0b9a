"""Whether an answer obeys an instruction. Deterministic, and without a model.

An answer without a word obeys nothing. An answer that `max_tokens` cut off is judged by what there
is of it, if the missing rest could not change the verdict, or could change it only in a way that
the seen part makes unlikely:

- may be cut: lower case, capitals, no commas, a given word, a language, first words, a persona, a
  title at the beginning;
- must have ended by itself: one sentence, JSON, at most N words, lists of exactly N items, last
  words, a question back.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass

STRAIGHT = str.maketrans("\u2018\u2019\u201c\u201d", "''\"\"")
"""Typographic quotes become those of a keyboard."""


@dataclass(frozen=True)
class Checker:
    test: Callable[[str], bool]
    """Gets the answer with straight quotes, without white space around it, with a word or more."""
    may_be_cut: bool
    """Whether an answer that `max_tokens` cut off can obey."""

    def __call__(self, text: str, ended: bool) -> bool:
        """Whether `text` obeys. `ended`: the model ended it, not `max_tokens`."""
        text = text.translate(STRAIGHT).strip()
        return bool(words(text)) and (ended or self.may_be_cut) and self.test(text)


def words(text: str) -> list[str]:
    """Runs of letters and digits. An apostrophe or a hyphen inside joins: "don't" is one word."""
    return re.findall(r"[^\W_]+(?:['-][^\W_]+)*", text)


def has_phrase(text: str, phrase: str) -> bool:
    """Whether the phrase stands in the text as whole words, in any case."""
    return re.search(rf"(?<!\w){re.escape(phrase)}(?!\w)", text, re.IGNORECASE) is not None


# ---- form ----------------------------------------------------------------------------------------

ABBREVIATIONS = re.compile(r"\b(?:e\.g\.|i\.e\.|vs\.|Dr\.|Mr\.|Mrs\.|Ms\.|St\.|(?:[A-Z]\.){2,})")
"""Their dots end no sentence."""
SENTENCE_END = re.compile(r"[.!?…]+[\"')\]*]*(?=\s|$)")


def one_sentence() -> Checker:
    """At least three words on one line, and no end of a sentence but the last character's.

    The last full stop may be missing.
    """

    def test(text: str) -> bool:
        text = ABBREVIATIONS.sub("x", text)
        ends = [match.end() for match in SENTENCE_END.finditer(text)]
        return len(words(text)) >= 3 and "\n" not in text and ends in ([], [len(text)])

    return Checker(test, may_be_cut=False)


def lower_case() -> Checker:
    """At least one letter, and no capital."""
    return Checker(
        lambda text: any(c.islower() for c in text) and not any(c.isupper() for c in text),
        may_be_cut=True,
    )


def upper_case() -> Checker:
    """At least one capital, and no small letter."""
    return Checker(
        lambda text: any(c.isupper() for c in text) and not any(c.islower() for c in text),
        may_be_cut=True,
    )


def without_commas() -> Checker:
    """No comma in at least five words. Fewer words hardly ever need one."""
    return Checker(lambda text: "," not in text and len(words(text)) >= 5, may_be_cut=True)


def json_object() -> Checker:
    """One JSON object with at least one key, and nothing else but a code fence around it."""

    def test(text: str) -> bool:
        fenced = re.fullmatch(r"```(?:json)?\s*(.*?)\s*```", text, re.DOTALL)
        try:
            value = json.loads(fenced[1] if fenced else text)
        except ValueError:
            return False
        return isinstance(value, dict) and bool(value)

    return Checker(test, may_be_cut=False)


def at_most_words(most: str) -> Checker:
    """At most that many words; `most` is a number in digits."""
    return Checker(lambda text: len(words(text)) <= int(most), may_be_cut=False)


def bullets(count: str) -> Checker:
    """Exactly that many lines that begin with `-`, `*` or `•`. Other lines do not count."""

    def test(text: str) -> bool:
        return len(re.findall(r"^\s*[-*•]\s+\S", text, re.MULTILINE)) == int(count)

    return Checker(test, may_be_cut=False)


def numbered(count: str) -> Checker:
    """Lines that begin with `1.`, `2.` and so on up to the count. Other lines do not count."""

    def test(text: str) -> bool:
        found = re.findall(r"^\s*(\d+)[.)]\s+\S", text, re.MULTILINE)
        return found == [str(i) for i in range(1, int(count) + 1)]

    return Checker(test, may_be_cut=False)


def title() -> Checker:
    """Begins with a title in double angle brackets that is not the instruction's example."""

    def test(text: str) -> bool:
        found = re.match(r"<<([^<>\n]+)>>", text)
        return found is not None and words(found[1].lower()) not in ([], ["title"])

    return Checker(test, may_be_cut=True)


# ---- words ---------------------------------------------------------------------------------------


def contains_word(word: str) -> Checker:
    """The word itself, in any case. Its plural is another word."""
    return Checker(lambda text: has_phrase(text, word), may_be_cut=True)


def begins_with(phrase: str) -> Checker:
    """Case, kinds of quotes and marks in front do not matter."""
    wanted = words(phrase.lower())
    return Checker(lambda text: words(text.lower())[: len(wanted)] == wanted, may_be_cut=True)


def ends_with(phrase: str) -> Checker:
    """Case and marks behind do not matter."""
    wanted = words(phrase.lower())
    return Checker(lambda text: words(text.lower())[-len(wanted) :] == wanted, may_be_cut=False)


def asks_back() -> Checker:
    """Ends with a question mark. Closing quotes behind it do not matter."""
    return Checker(lambda text: text.rstrip("\"')*").endswith("?"), may_be_cut=False)


# ---- language and voice --------------------------------------------------------------------------

STOP_WORDS = {
    "German": "der das den dem des ein eine einer einen einem und oder aber nicht ist sind war wird"
    " werden mit von für auf zu zum zur im als auch sich ich du er sie es wir ihr wenn dass wie nur"
    " sehr kann haben hat bei nach aus um durch über man einfach ihre sein",
    "French": "le la les un une des du de et ou mais ne pas est sont était avec pour dans sur par"
    " que qui ce cette ces il elle nous vous je tu au aux en plus comme très peut être ont sa ses"
    " son leur se",
    "Spanish": "el la los las un una unos unas y o pero no es son era con para en por que se su sus"
    " lo al del de como más muy puede ser está este esta ella nosotros yo tú te le les ha han",
    "English": "the a an and or but not is are was be with of for on to in as at by it its this"
    " that these you we they he she i can have has from your their which when how will",
}
"""Words that are frequent in any text of a language. No language shares one with English."""
LEAST_STOP_WORDS = 0.2
"""In prose more than a third of the words are stop words."""


def in_language(language: str) -> Checker:
    """At least five words, and a fifth of them or more are stop words of the language.

    English's stop words must be fewer.
    """

    def share(tokens: list[str], of: str) -> float:
        return sum(token in STOP_WORDS[of].split() for token in tokens) / len(tokens)

    def test(text: str) -> bool:
        tokens = re.findall(r"[^\W\d_]+", text.lower())
        if len(tokens) < 5:
            return False
        own = share(tokens, language)
        return own >= LEAST_STOP_WORDS and own > share(tokens, "English")

    return Checker(test, may_be_cut=True)


VOICES = {
    "pirate": r"arr+|argh|aye|ahoy|matey|mateys|ye|yer|avast|hearties|scallywags?|landlubbers?"
    r"|shiver me|yo[ -]ho|me lads?|me crew|me ship",
    "Shakespeare": r"thou|thee|thy|thine|hath|doth|dost|hast|'tis|'twas|forsooth"
    r"|prithee|verily|methinks|hither|thither|whence|alas",
    "cowboy": r"howdy|y'all|partner|pardner|reckon|yee-?haw|ain't|fixin|cowpoke|giddy-?up"
    r"|buckaroo|yonder|folks|darn|mighty fine",
}
"""What a voice says and others do not. Its own name is not among them: a plain answer may tell of
pirates."""


def speaks_like(persona: str) -> Checker:
    """At least one mark of the voice, as a whole word."""
    marks = re.compile(rf"(?<!\w)(?:{VOICES[persona]})(?!\w)", re.IGNORECASE)
    return Checker(lambda text: marks.search(text) is not None, may_be_cut=True)


# ---- arithmetic ----------------------------------------------------------------------------------


def last_number(value: int) -> Checker:
    """The last number of the answer is `value`. Commas between thousands do not matter."""

    def test(text: str) -> bool:
        found = re.findall(r"-?\d+(?:\.\d+)?", re.sub(r"(?<=\d),(?=\d{3})", "", text))
        return bool(found) and float(found[-1]) == value

    return Checker(test, may_be_cut=False)
