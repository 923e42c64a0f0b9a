"""What is wrong with a file, and in which line."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import yaml

Place = tuple[str | int, ...]
"""The keys and positions that lead to a part of the file, from its top."""

_QUOTED = re.compile(r"`([^`]+)`")


@dataclass(frozen=True)
class Problem:
    """said: one sentence. at: the part of the file that it is about, as far as that is known."""

    said: str
    at: Place = field(default=(), kw_only=True)

    def __str__(self) -> str:
        return self.said


class Lines:
    """The line of each part of a YAML text. A part that is an alias has the line of its parent.

    root: of the text's nodes. None stands for a text without any.
    """

    def __init__(self, root: yaml.Node | None) -> None:
        self._lines: dict[Place, int] = {}
        self._words: dict[Place, str] = {}
        if root is not None:
            self._add(root, (), root, set())

    def _add(self, node: yaml.Node, place: Place, told: yaml.Node, seen: set[int]) -> None:
        """told: the node whose line is the part's: its key, if it has one."""
        self._lines[place] = told.start_mark.line + 1
        if id(node) in seen:
            return
        seen.add(id(node))
        if isinstance(node, yaml.ScalarNode):
            self._words[place] = node.value
        elif isinstance(node, yaml.SequenceNode):
            for at, item in enumerate(node.value):
                self._add(item, (*place, at), item, seen)
        elif isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                if isinstance(key, yaml.ScalarNode):
                    self._add(value, (*place, key.value), key, seen)

    def told(self, path: Path, problems: Iterable[Problem]) -> list[str]:
        """Each sentence behind `FILE:LINE:`, from top to bottom.

        What is missing as a whole has no line, and comes last, behind `FILE:`.
        """
        found = [(self.of(problem), problem) for problem in problems]
        found.sort(key=lambda pair: math.inf if pair[0] is None else pair[0])
        return [f"{path}:{'' if line is None else f'{line}:'} {said}" for line, said in found]

    def of(self, problem: Problem) -> int | None:
        """The line of the part; inside it, that of the first thing which the sentence quotes."""
        place = problem.at
        while place and place not in self._lines:
            place = place[:-1]
        if not place and problem.at:
            return None
        inside = next(self._quoted(problem.said, place), place)
        return self._lines[inside] if inside else None

    def _quoted(self, said: str, place: Place) -> Iterator[Place]:
        """The parts below a place whose key or whose text a sentence quotes."""
        below = [part for part in self._lines if len(part) > len(place) and _begins(part, place)]
        for word in _QUOTED.findall(said):
            keys = tuple(word.split("."))
            for part in below:
                if part[-len(keys) :] == keys or self._words.get(part) == word:
                    yield part


def _begins(part: Place, place: Place) -> bool:
    return part[: len(place)] == place
