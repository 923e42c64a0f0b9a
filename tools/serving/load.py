"""Clients that know the right answers, and record the outcome and the times of each request.

The requests are those of questions.py, guided or plain, streamed or not. The right texts are
requested before any fault is injected.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from dataclasses import dataclass, field

import httpx

from tools.serving.questions import BETWEEN_CHOICES, QUESTIONS, Question


@dataclass
class Outcome:
    """The result of one request, as the client saw it. Times are those of time.monotonic().

    kind: right, wrong, lost (the answer ended without an error but is not complete), new (nobody
        knew the right answer), or the error that the client got.
    first: time of the first byte of the body.
    pause: the longest time between two lines of a stream.
    """

    question: Question
    stream: bool
    started: float
    kind: str = "lost"
    first: float | None = None
    pause: float = 0.0
    ended: float = 0.0
    detail: str = ""


@dataclass
class Load:
    """The requests of `clients` concurrent clients, and their outcomes."""

    url: str
    clients: int
    questions: tuple[Question, ...] = QUESTIONS
    answers: dict[tuple[Question, bool], str] = field(default_factory=dict)
    outcomes: list[Outcome] = field(default_factory=list)
    timeout_s: float = 240.0

    async def learn(self) -> None:
        """Ask each question once, one after another. These are the right answers.

        A stream has its own: vLLM writes the arguments of a tool call anew, but streams them as
        the model wrote them. Raises AssertionError for an error.
        """
        async with httpx.AsyncClient(base_url=self.url, timeout=self.timeout_s) as client:
            await self.learn_with(client)

    async def learn_with(self, client: httpx.AsyncClient) -> None:
        """As `learn`, with a client that the caller has made."""
        for question in self.questions:
            for stream in (False, True):
                outcome = await self.ask(client, question, stream)
                assert outcome.kind == "new", (question, outcome)

    async def run(self, stop: asyncio.Event, seed: int = 0) -> None:
        """Let all clients ask random questions until `stop` is set."""
        rng = random.Random(seed)
        async with httpx.AsyncClient(base_url=self.url, timeout=self.timeout_s) as client:

            async def ask_on() -> None:
                while not stop.is_set():
                    outcome = await self.ask(client, rng.choice(self.questions), rng.random() < 0.7)
                    self.outcomes.append(outcome)
                    if outcome.kind != "right":
                        await asyncio.sleep(0.5)

            await asyncio.gather(*(ask_on() for _ in range(self.clients)))

    async def ask(self, client: httpx.AsyncClient, question: Question, stream: bool) -> Outcome:
        outcome = Outcome(question, stream, time.monotonic())
        try:
            await (self._streamed if stream else self._whole)(client, question, outcome)
        except httpx.HTTPError as error:
            outcome.kind, outcome.detail = "connection", repr(error)
        outcome.ended = time.monotonic()
        return outcome

    async def _whole(self, client: httpx.AsyncClient, question: Question, outcome: Outcome) -> None:
        answer = await client.post(question.api.path, json=question.body(False))
        outcome.first = time.monotonic()
        if answer.status_code != 200:
            outcome.kind, outcome.detail = str(answer.status_code), answer.text[:200]
            return
        self._judge(outcome, question.api.text_of(answer.json()))

    async def _streamed(
        self, client: httpx.AsyncClient, question: Question, outcome: Outcome
    ) -> None:
        api, body = question.api, question.body(True)
        async with client.stream("POST", api.path, json=body) as answer:
            if answer.status_code != 200:
                outcome.kind = str(answer.status_code)
                outcome.detail = (await answer.aread()).decode()[:200]
                return
            texts, done, last, numbers = dict[int, str](), False, None, list[int]()
            async for line in answer.aiter_lines():
                now = time.monotonic()
                outcome.first = outcome.first or now
                outcome.pause, last = max(outcome.pause, now - (last or now)), now
                if line.startswith("event: error"):
                    outcome.kind = "error event"
                elif line.startswith(api.last):
                    done = True
                elif line.startswith("data: ") and outcome.kind == "error event":
                    outcome.detail = json.loads(line[6:])["error"]["message"]
                elif line.startswith("data: {"):
                    event = json.loads(line[6:])
                    for choice, piece in api.pieces_of(event):
                        texts[choice] = texts.get(choice, "") + piece
                    numbers += [event["sequence_number"]] if "sequence_number" in event else []
        if outcome.kind == "error event":
            outcome.kind = "lost" if done else outcome.kind
        elif done:
            self._judge(outcome, BETWEEN_CHOICES.join(texts[choice] for choice in sorted(texts)))
        if numbers != list(range(len(numbers))):
            outcome.kind, outcome.detail = "wrong", f"events {numbers[-20:]}"

    def _judge(self, outcome: Outcome, text: str) -> None:
        right = self.answers.get((outcome.question, outcome.stream))
        if right is None:
            self.answers[outcome.question, outcome.stream] = text
            outcome.kind = "new"
            return
        outcome.kind = "right" if text == right else "lost" if right.startswith(text) else "wrong"
        if outcome.kind != "right":
            outcome.detail = f"{text[-60:]!r} for {right[-60:]!r}"

    def count(self) -> Counter[str]:
        return Counter(outcome.kind for outcome in self.outcomes)
