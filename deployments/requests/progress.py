"""How far an answer is: what another replica needs to go on with it.

vLLM's serving classes word a stream as a function of the outputs that they read: which tokens came,
of which choices, and in which parts. So a replica that lets its serving class read the same outputs
again words the same events again, and its parsers and counters are where they were. The ingress
keeps these outputs for each stream (`Told`), and sends them to another replica if the first one is
lost (`Begun`). Clients never see them. An answer that is not streamed goes on in the same way, and
nothing of it has been sent. Imports neither vllm nor ray.
"""

from __future__ import annotations

import copy
import re
import zlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

from deployments.requests.usage import OutputCounts

MOST_TOKENS = 2**17
"""Output tokens of all choices of a stream that are kept. A longer one is not moved."""

_END_OF_EVENT = "\n\n"
_OF_ONE_REPLICA = re.compile(
    r'"(?P<name>created|created_at)":(?P<time>\d+)'
    r'|"(?:resp|msg|rs|fc|fco|ctc|call|call_\d+|tool|chatcmpl-tool|mcp|mcpo|ws)[_-][0-9a-f]{16}"'
    r'|(?<="id":)"[0-9A-Za-z]{9}"'  # a tool call in Mistral's way
    r'|(?<="signature":)"[0-9a-f]{32}"'  # of reasoning in /v1/messages
)
"""What differs between two replicas that word the same event: their clocks, and random ids. Quotes
in a model's text are escaped, so this cannot be a part of it."""


class Part(NamedTuple):
    """What one output has of one choice: some of its tokens, in the order of the text.

    token_ids: as `pack` makes them.
    finish_reason, stop_reason: vLLM's; None while the choice goes on.
    """

    choice: int
    token_ids: bytes
    finish_reason: str | None = None
    stop_reason: int | str | None = None


Output: TypeAlias = tuple[Part, ...]


def pack(token_ids: list[int]) -> bytes:
    return array("I", token_ids).tobytes()


def unpack(packed: bytes) -> list[int]:
    tokens = array("I")
    tokens.frombytes(packed)
    return tokens.tolist()


class Outputs:
    """Outputs in order, in 16 bytes for each part and 4 for each of its tokens.

    As tuples, those of a stream that gets its tokens one by one would be nine times as large.
    """

    def __init__(self, outputs: Sequence[Output] = ()) -> None:
        self._words = array("I")  # of each output: parts; of each part: choice, end, length, tokens
        self._ends: list[tuple[str, int | str | None]] = []
        self.num_tokens = 0
        self.extend(outputs)

    def extend(self, outputs: Sequence[Output]) -> None:
        for output in outputs:
            self._words.append(len(output))
            for part in output:
                self._add(part)

    def _add(self, part: Part) -> None:
        if part.finish_reason is not None:
            self._ends.append((part.finish_reason, part.stop_reason))
        length = len(part.token_ids) // self._words.itemsize
        end = 0 if part.finish_reason is None else len(self._ends)
        self._words.extend((part.choice, end, length))
        self._words.frombytes(part.token_ids)
        self.num_tokens += length

    def __iter__(self) -> Iterator[Output]:
        words, at = self._words, 0
        while at < len(words):
            parts, at = [], at + 1
            for _ in range(words[at - 1]):
                choice, end, length = words[at : at + 3]
                at += 3 + length
                how = self._ends[end - 1] if end else (None, None)
                parts.append(Part(choice, words[at - length : at].tobytes(), *how))
            yield tuple(parts)

    def __bool__(self) -> bool:
        """Whether anything was told."""
        return bool(self._words)

    def copy(self) -> Outputs:
        same = Outputs()
        same._words, same._ends, same.num_tokens = self._words[:], self._ends[:], self.num_tokens
        return same


@dataclass(frozen=True, slots=True)
class Progress:
    """What a replica tells with a chunk.

    outputs: those that vLLM's serving class has read since the chunk before.
    counts: of the engine's work at that time.
    model: the fingerprint of what the replica computes with
        (generator/moving/model_fingerprint.py), in the first chunk of a stream; empty in the
        others.
    """

    outputs: tuple[Output, ...]
    counts: OutputCounts
    model: str = ""


def told_together(told: Sequence[Progress | None]) -> Progress | None:
    """What several chunks in a row tell together, at least one; None if one of them tells nothing.

    A part that is missing cannot be made up for by what follows.
    """
    known = [progress for progress in told if progress is not None]
    if len(known) < len(told):
        return None
    outputs = tuple(output for progress in known for output in progress.outputs)
    model = next((progress.model for progress in known if progress.model), "")
    return replace(known[-1], outputs=outputs, model=model)


@dataclass(frozen=True, slots=True)
class Begun:
    """A stream that another replica has begun, for one that goes on with it.

    model: the fingerprint of what that replica computes with. One with another must not go on.
    """

    outputs: Outputs
    counts: OutputCounts
    model: str = ""

    def tokens_of(self, choice: int) -> list[int]:
        """The tokens of a choice, in order."""
        own = (part for output in self.outputs for part in output if part.choice == choice)
        return [token for part in own for token in unpack(part.token_ids)]


class OfOneReplica:
    """What the events of one replica have of their own, and a number for all else in them.

    created: when the stream was created, as its first events say. None before that.
    ids: the random ids of its items, in the order in which they come.
    checksum: of the events so far, whichever replica worded them.
    """

    def __init__(self) -> None:
        self.created: str | None = None
        self.ids: dict[str, int] = {}
        self.checksum = 0

    def read(self, text: str) -> None:
        """Note the next events."""
        words = _OF_ONE_REPLICA.sub(self._take, text)
        self.checksum = zlib.crc32(words.encode(), self.checksum)

    def _take(self, found: re.Match[str]) -> str:
        if found["time"] is None:
            self.ids.setdefault(found[0], len(self.ids))
        elif self.created is None:
            self.created = found["time"]
        return ""

    def worded_by(self, other: OfOneReplica, text: str) -> str:
        """The next events of this replica as the other one would word them."""
        theirs = list(other.ids)

        def translated(found: re.Match[str]) -> str:
            self._take(found)
            if found["time"] is None:
                number = self.ids[found[0]]
                return theirs[number] if number < len(theirs) else found[0]
            is_own = found["time"] == self.created and other.created is not None
            return f'"{found["name"]}":{other.created}' if is_own else found[0]

        return _OF_ONE_REPLICA.sub(translated, text)


class Told:
    """What the client of one stream has, and what the engine did for it.

    checks_texts: whether a replica that words the same events must use the same characters. Events
        with logprobs differ, because those of earlier tokens are not known any more.
    """

    def __init__(self, checks_texts: bool = True) -> None:
        self.events = 0
        self._checks_texts = checks_texts
        self._outputs = Outputs()
        self._counts: OutputCounts | None = None
        self._model = ""
        self._words = OfOneReplica()
        self._can_move = True

    @property
    def num_kept_tokens(self) -> int:
        """Output tokens that are kept, of all choices."""
        return self._outputs.num_tokens

    def note(self, text: str, progress: Progress | None) -> None:
        """Note events that the client gets now, and the outputs behind them.

        progress: None if the replica cannot tell (any more).
        """
        self.events += text.count(_END_OF_EVENT)
        self._words.read(text)
        if progress is None:
            self._forget()
        elif self._can_move:
            self._outputs.extend(progress.outputs)
            self._counts = progress.counts
            self._model = progress.model or self._model
            if self._outputs.num_tokens > MOST_TOKENS:
                self._forget()

    def note_heartbeat(self, progress: Progress | None) -> None:
        """Note what a heartbeat tells of an answer that is not streamed.

        Before the engine has the request, heartbeats tell nothing, and those of streams never do.
        """
        if progress is not None or self:
            self.note("", progress)

    def _forget(self) -> None:
        self._can_move, self._outputs = False, Outputs()

    def __bool__(self) -> bool:
        return self._counts is not None

    def begun(self) -> Begun | None:
        """What another replica must know. None if the stream cannot be moved.

        Of a stream that has events in front of its first token, it may have no outputs.
        """
        if not self._can_move or self._counts is None:
            return None
        return Begun(self._outputs.copy(), self._counts, self._model)

    def unseen(self) -> Unseen:
        """Takes from another replica's events those that the client has."""
        return Unseen(self.events, copy.deepcopy(self._words), self._checks_texts)


class Unseen:
    """The events of a replica that went on with a stream, without those that the client has.

    events: how many it has.
    words: what these have of the replica that worded them.
    checks_texts: whether the events that are dropped must have the same characters.
    """

    def __init__(self, events: int, words: OfOneReplica, checks_texts: bool) -> None:
        self._left, self._words, self._checks_texts = events, words, checks_texts
        self._theirs = OfOneReplica()

    def of(self, text: str) -> str:
        """The part of `text` that the client does not have, with the ids and times that it knows.

        Raises ValueError if it has other events than this replica words.
        """
        if self._left:
            text = self._after_known(text)
        return self._theirs.worded_by(self._words, text)

    def _after_known(self, text: str) -> str:
        end = 0
        while self._left and (found := text.find(_END_OF_EVENT, end)) >= 0:
            end = found + len(_END_OF_EVENT)
            self._left -= 1
        self._theirs.read(text[:end])
        differs = self._theirs.checksum != self._words.checksum
        if not self._left and self._checks_texts and differs:
            raise ValueError("another replica words the stream in another way")
        return text[end:]
