"""The state of a chat: the conversation, and how it is guided. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from cfg_core.keys import nearest
from cfg_serve.errors import CommandError

Message = dict[str, str]

HELP = """\
/scale 1 1.5 2    the scale; several: answers side by side, and the last one stays
/negative TEXT    the system message of the negative stream; without TEXT, none
/system TEXT      the system message; it begins a new conversation
/again            the last question once more, with what is set now
/reset            begin a new conversation
/show             what is set
/quit             end (also Ctrl-D)"""


@dataclass(frozen=True)
class Session:
    """What the next question is sent with. turns: questions and answers, in turn."""

    model: str
    system: str = ""
    negative: str = ""
    scales: tuple[float, ...] = (1.5,)
    max_tokens: int = 300
    turns: tuple[str, ...] = ()

    def bodies(self, question: str) -> list[dict[str, Any]]:
        """The request for each scale."""
        return [self._body(question, scale) for scale in self.scales]

    def _body(self, question: str, scale: float) -> dict[str, Any]:
        guidance: dict[str, Any] = {} if scale == 1 else {"guidance_scale": scale}
        if guidance and self.negative:
            guidance["negative_prompt"] = self.negative
        return {
            "model": self.model,
            "messages": [*self._messages(), {"role": "user", "content": question}],
            "max_tokens": self.max_tokens,
            "stream": True,
            **guidance,
        }

    def _messages(self) -> list[Message]:
        first = [{"role": "system", "content": self.system}] if self.system else []
        roles = ("user", "assistant")
        return first + [
            {"role": roles[at % 2], "content": text} for at, text in enumerate(self.turns)
        ]

    def answered(self, question: str, answer: str) -> Session:
        return replace(self, turns=(*self.turns, question, answer))

    def shown(self) -> str:
        scales = " ".join(f"{scale:g}" for scale in self.scales)
        return (
            f"model {self.model}; scale {scales}; system {self.system or '(none)'!r}; negative"
            f" {self.negative or '(none)'!r}; {len(self.turns) // 2} answers so far"
        )


@dataclass(frozen=True)
class Step:
    """What a line asks for. say: text to show. question: to send, if there is one."""

    session: Session
    say: str = ""
    question: str = ""
    ends: bool = False


def step(session: Session, line: str) -> Step:
    """What to do with a line. Raises CommandError for a command that is none, or is ill-formed."""
    line = line.strip()
    if not line.startswith("/"):
        return Step(session, question=line)
    name, _, rest = line[1:].partition(" ")
    if name not in _COMMANDS:
        known = [f"/{command}" for command in _COMMANDS]
        hint = nearest(f"/{name}", known, "commands")
        raise CommandError(f"there is no command /{name}: {hint}")
    return _COMMANDS[name](session, rest.strip())


def _scale(session: Session, rest: str) -> Step:
    try:
        scales = tuple(float(part) for part in rest.replace(",", " ").split())
    except ValueError:
        raise CommandError(f"{rest!r} is no list of numbers: /scale 1 1.5 2") from None
    if not scales:
        return Step(session, say=session.shown())
    changed = replace(session, scales=scales)
    return Step(changed, say=changed.shown())


def _negative(session: Session, rest: str) -> Step:
    changed = replace(session, negative=rest)
    return Step(changed, say=changed.shown())


def _system(session: Session, rest: str) -> Step:
    changed = replace(session, system=rest, turns=())
    return Step(changed, say=changed.shown())


def _again(session: Session, _: str) -> Step:
    if not session.turns:
        raise CommandError("there is no question yet: type one.")
    return Step(replace(session, turns=session.turns[:-2]), question=session.turns[-2])


def _reset(session: Session, _: str) -> Step:
    return Step(replace(session, turns=()), say="A new conversation begins.")


_COMMANDS: dict[str, Callable[[Session, str], Step]] = {
    "scale": _scale,
    "negative": _negative,
    "system": _system,
    "again": _again,
    "reset": _reset,
    "show": lambda session, _: Step(session, say=session.shown()),
    "help": lambda session, _: Step(session, say=HELP),
    "quit": lambda session, _: Step(session, ends=True),
}
