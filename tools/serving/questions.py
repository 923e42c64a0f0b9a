"""Questions that have exactly one right answer, in the words of four APIs.

They are greedy, or sampled with a seed. They are for the model of configs/stories.yaml.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

PROMPTS = (
    "Once upon a time",
    "A story about the sea.",
    "The little dog",
    "In the garden there was",
    "One day a girl",
)
MODEL = "stories"
GUIDANCE = {"guidance_scale": 2.0, "negative_prompt": "A story about the farm."}
BETWEEN_CHOICES = "\n----\n"


class Api(NamedTuple):
    """How one API words a request and its answer.

    field, limit: the names of the prompt and of the most tokens in a body.
    last: how the last event of a stream begins.
    may_go_on: whether a body can ask for a text that goes on behind its end.
    """

    path: str
    field: str
    limit: str
    last: tuple[str, ...]
    may_go_on: bool = True

    def body(self, prompt: str, tokens: int) -> dict[str, Any]:
        given = [{"role": "user", "content": prompt}] if self.field == "messages" else prompt
        body = {"model": MODEL, self.field: given, self.limit: tokens, "temperature": 0}
        return body | ({"ignore_eos": True} if self.may_go_on else {})

    def text_of(self, answer: dict[str, Any]) -> str:
        """The text of an answer in one piece; that of all choices, one after another."""
        if "choices" in answer:
            choices = sorted(answer["choices"], key=lambda choice: int(choice["index"]))
            return BETWEEN_CHOICES.join(_words(choice, "message") for choice in choices)
        items = answer.get("output", [answer])
        return "".join(part["text"] for item in items for part in item["content"])

    def pieces_of(self, event: dict[str, Any]) -> list[tuple[int, str]]:
        """The texts that an event of a stream brings, each with the number of its choice."""
        if "choices" in event:
            return [(one["index"], _words(one, "delta")) for one in event["choices"]]
        if event["type"] == "content_block_delta":
            return [(0, str(event["delta"]["text"]))]
        return [(0, str(event["delta"]))] if event["type"] == "response.output_text.delta" else []


def _words(choice: dict[str, Any], field: str) -> str:
    """The text of a choice, and the arguments of its tool calls."""
    if "text" in choice:
        return str(choice["text"])
    said = choice[field]
    calls = (one["function"].get("arguments") or "" for one in said.get("tool_calls") or ())
    return (said.get("content") or "") + "".join(calls)


DONE = ("data: [DONE]",)
COMPLETIONS = Api("/v1/completions", "prompt", "max_tokens", DONE)
CHATS = Api("/v1/chat/completions", "messages", "max_tokens", DONE)
APIS = (
    COMPLETIONS,
    CHATS,
    Api("/v1/messages", "messages", "max_tokens", ("event: message_stop",), False),
    Api(
        "/v1/responses",
        "input",
        "max_output_tokens",
        ("event: response.completed", "event: response.incomplete"),
        False,
    ),
)


@dataclass(frozen=True, eq=False)
class Question:
    """A request that has exactly one right answer.

    more: fields of its body, beside those of its API and of guidance.
    """

    prompt: str
    guided: bool
    tokens: int
    api: Api = COMPLETIONS
    more: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_sampled(self) -> bool:
        """Whether its answer is one only with its seed, and without speculation."""
        return "seed" in self.more

    def body(self, stream: bool) -> dict[str, Any]:
        body = self.api.body(self.prompt, self.tokens)
        guidance = GUIDANCE if self.guided else {}
        return {**body, "stream": stream, **guidance, **self.more}


_TEXT = {"type": "string", "maxLength": 120}
SCHEMA = {
    "type": "object",
    "properties": {"who": _TEXT, "what": _TEXT},
    "required": ["who", "what"],
    "additionalProperties": False,
}
JSON = {"type": "json_schema", "json_schema": {"name": "story", "schema": SCHEMA}}
TOOL = {"type": "function", "function": {"name": "tell", "parameters": SCHEMA}}


SEVERAL = [
    {"weight": -0.5, "prompt": "A story about the farm."},
    {"weight": -0.3, "prompt": "The king of the hill had a"},
]
OF_ALL_KINDS: dict[str, tuple[Api, bool, dict[str, Any]]] = {
    "JSON": (CHATS, True, {"response_format": JSON, "ignore_eos": False}),
    "plain JSON": (CHATS, False, {"response_format": JSON, "ignore_eos": False}),
    "tool": (
        CHATS,
        True,
        {
            "tools": [TOOL],
            "tool_choice": {"type": "function", "function": {"name": "tell"}},
            "ignore_eos": False,
        },
    ),
    "three choices": (COMPLETIONS, True, {"n": 3, "temperature": 0.8, "seed": 7}),
    "plain choices": (CHATS, False, {"n": 3, "temperature": 0.8, "seed": 7}),
    "log-probabilities": (COMPLETIONS, True, {"logprobs": 2}),
    "stop": (COMPLETIONS, True, {"stop": [". T", ". H", ". S"], "min_tokens": 100}),
    "window": (COMPLETIONS, True, {"guidance_start": 20, "guidance_end": 120}),
    "gate": (COMPLETIONS, True, {"guidance_min_entropy": 1.0}),
    "penalty": (CHATS, True, {"repetition_penalty": 1.2}),
    "several streams": (COMPLETIONS, False, {"guidance_streams": SEVERAL}),
}
"""Kinds of requests: their API, whether they have the usual guidance, and what else they ask."""

QUESTIONS = tuple(
    Question(p, guided, n) for p in PROMPTS for guided in (True, False) for n in (40, 160)
)
OF_ALL_APIS = tuple(
    Question(p, guided, 160, api) for api in APIS for p in PROMPTS[:2] for guided in (True, False)
)
OF_EVERY_KIND = OF_ALL_APIS + tuple(
    Question(PROMPTS[2], guided, 160, api, more) for api, guided, more in OF_ALL_KINDS.values()
)
