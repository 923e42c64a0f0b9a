"""Attacks by grammars and by incompatible options: findings 3 and 11."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

from tools.hostile.attempt import Attempt, attack, json_bytes, nested

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
ASK = {"prompt": "Once", "max_tokens": 8, "temperature": 0}
ANSWERED = (200, 400, 429, 503, 504)
"""503 and 504 are allowed, because compilation has a deadline."""


def schema(properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "json": {"type": "object", "properties": properties, "additionalProperties": False, **more}
    }


def deep_schema(depth: int) -> dict[str, Any]:
    inner: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        inner = {
            "type": "object",
            "properties": {"a": inner, "b": {"type": "array", "items": {"type": "string"}}},
        }
    return {"json": inner}


def mutual(num: int) -> dict[str, Any]:
    """Return schemas that consist of references only. They form a cycle."""
    defs = {f"d{i}": {"$ref": f"#/$defs/d{(i + 1) % num}"} for i in range(num)}
    return {"json": {"$defs": defs, "$ref": "#/$defs/d0"}}


def exponential(depth: int) -> str:
    rules = [f'r{i} ::= r{i + 1} r{i + 1} | "a" r{i + 1}' for i in range(depth)]
    return "\n".join(["root ::= r0", *rules, f'r{depth} ::= "b" | "bb"'])


def grammars() -> dict[str, dict[str, Any]]:
    """Return values of structured_outputs, by name."""
    many = [f"choice number {i}" for i in range(100_000)]
    alternatives = "|".join(f"word{i}x*" for i in range(5000))
    return {
        "choice of 100,000": {"choice": many},
        "choice of 10,000": {"choice": many[:10_000]},
        "enum of 100,000": {"json": {"enum": many}},
        "20,000 properties": schema({f"p{i}": {"type": "string"} for i in range(20_000)}),
        "2,000 required properties": schema(
            {f"p{i}": {"type": "string"} for i in range(2000)},
            required=[f"p{i}" for i in range(2000)],
        ),
        "schema 200 deep": deep_schema(200),
        "regex of 1 MB": {"regex": "(abc|abd)" * 110_000},
        "regex of alternatives": {"regex": f"({alternatives})+"},
        "nested repeats": {"regex": "((((a{1,90}){1,90}){1,90}){1,90}){1,90}"},
        "nested stars": {"regex": "(((((a*)*)*)*)*b)*" * 40},
        "repeat of a million": {"regex": "(abc|de[fgh]+){1000000}"},
        "left recursion": {"grammar": 'root ::= root "a" | "a"'},
        "hidden left recursion": {"grammar": 'root ::= e root "b" | "c"\ne ::= "" | e'},
        "root ::= root": {"grammar": "root ::= root"},
        "mutual recursion": {"grammar": "root ::= a\na ::= b\nb ::= a"},
        "exponential grammar": {"grammar": exponential(60)},
        "big repeat": {"grammar": 'root ::= ("a" | "b"){1,5000000}'},
        "grammar of 50,000 rules": {"grammar": "\n".join(["root ::= r0", *many_rules(50_000)])},
        "lark": {
            "grammar": 'start: expr\nexpr: expr "+" expr | NUMBER\nNUMBER: /[0-9]+/\n%ignore /[ ]+/'
        },
        "lark, ambiguous": {"grammar": "start: a*\n" + 'a: a a | "x" a | "x"'},
        "whitespace pattern": {
            "json": {"type": "object"},
            "whitespace_pattern": "((\\s*)*\\n*)*" * 50,
        },
        "whitespace pattern, ill-formed": {"json": {"type": "object"}, "whitespace_pattern": "(("},
        "$ref to itself": {"json": {"$ref": "#"}},
        "mutually recursive $ref": mutual(2),
        "ring of 1,000 $ref": mutual(1000),
        "pattern in a schema": schema({"a": {"type": "string", "pattern": "(a+)+" * 200}}),
        "maxItems of 10 million": {
            "json": {"type": "array", "items": {"type": "string"}, "maxItems": 10**7}
        },
        "minLength of 10 million": {"json": {"type": "string", "minLength": 10**7}},
        "structural tag": {
            "structural_tag": '{"type": "structural_tag", "format": {"type": "any_text"}}' * 2
        },
    }


def many_rules(num: int) -> list[str]:
    return [f'r{i} ::= "a{i}" r{i + 1} | "b{i}"' for i in range(num)] + [f'r{num} ::= "z"']


@attack(3, limit_s=200)
async def heavy_grammars(attempt: Attempt) -> None:
    """Send grammars that compile for a long time or never end, one after another.

    They have large choices, enums, properties, regexes, repeats, recursion, lark or whitespace
    patterns. Each must be answered, be refused with 400, or be ended by a deadline. Grammars of
    other clients must be served.
    """
    for name, grammar in grammars().items():
        body = json_bytes(ASK | {"structured_outputs": grammar})
        await attempt.expect(name, COMPLETIONS, body, *ANSWERED, limit_s=20)


FEW = (
    "choice of 100,000",
    "enum of 100,000",
    "20,000 properties",
    "regex of 1 MB",
    "root ::= root",
    "left recursion",
)


@attack(3, bounded=True)
async def few_grammars(attempt: Attempt) -> None:
    """Send six of these grammars at once.

    Each must be answered, be refused with 400, or be ended by a deadline.
    """
    known = grammars()

    async def ask(number: int) -> None:
        body = json_bytes(ASK | {"structured_outputs": known[FEW[number]]})
        await attempt.expect(FEW[number], COMPLETIONS, body, *ANSWERED, limit_s=20)

    await attempt.together(len(FEW), ask)


@attack(3)
async def grammars_left(attempt: Attempt) -> None:
    """Send the same grammars, two at a time, plain and guided, from clients that leave after 1 s.

    The server must free at once what these requests held.
    """
    for name, grammar in grammars().items():
        body = json_bytes(ASK | {"structured_outputs": grammar, "stream": len(name) % 2 == 0})
        guided = json_bytes(ASK | {"structured_outputs": grammar, "guidance_scale": 2})

        def leave(i: int, both: tuple[bytes, bytes] = (body, guided)) -> Awaitable[None]:
            return attempt.leave(COMPLETIONS, both[i], 1.0)

        await attempt.together(2, leave)


Sent = dict[str, tuple[str, bytes]]
"""Path and body, by name."""


def deep_bodies() -> Sent:
    found: Sent = {}
    for depth in (50, 900):
        lists, objects = nested(depth), b'{"a":' * depth + b"1" + b"}" * depth
        for name in (
            "prompt",
            "metadata",
            "stop",
            "logit_bias",
            "vllm_xargs",
            "tools",
            "response_format",
            "user",
        ):
            for kind, value in (("lists", lists), ("objects", objects)):
                body = b'{"prompt":"x","max_tokens":1,"%s":%s}' % (name.encode(), value)
                found[f"{name}: {depth} {kind}"] = (COMPLETIONS, body)
        found[f"input: {depth} lists"] = ("/v1/embeddings", b'{"input":%s}' % lists)
        found[f"messages: {depth} lists"] = (CHAT, b'{"messages":%s}' % lists)
        found[f"content: {depth} lists"] = (
            CHAT,
            b'{"messages":[{"role":"user","content":%s}]}' % lists,
        )
        found[f"tokens: {depth} lists"] = ("/detokenize", b'{"tokens":%s}' % lists)
    return found


def odd_pairs() -> dict[str, dict[str, Any]]:
    """Return incompatible fields, and fields that no engine here supports."""
    grammar, word = (
        {"structured_outputs": {"regex": "[a-z]{3}"}},
        {"structured_outputs": {"choice": ["abc"]}},
    )
    budget = {"logits_processors": [{"name": "section_budget", "max_tokens": 2, "end": "."}]}
    gate = {"logits_processors": [{"name": "vocabulary_gate", "characters": "Q"}]}
    found: dict[str, dict[str, Any]] = {}
    for value in ("x", 1, [1], {"do_remote_prefill": True}):
        found[f"kv_transfer_params {value!r} in vllm_xargs"] = {
            "vllm_xargs": {"kv_transfer_params": value}
        }
        found[f"kv_transfer_params {value!r}"] = {"kv_transfer_params": value}
        found[f"ec_transfer_params {value!r}"] = {"ec_transfer_params": value}
    return found | {
        "allowed_token_ids, grammar": grammar | {"allowed_token_ids": [300, 301]},
        "allowed_token_ids, grammar, guided": grammar
        | {"allowed_token_ids": [300], "guidance_scale": 2},
        "section_budget, grammar": grammar | budget,
        "section_budget, allowed_token_ids": budget | {"allowed_token_ids": [300, 301]},
        "vocabulary_gate, grammar": grammar | gate,
        "bad_words, grammar": word | {"bad_words": ["abc", "a", "ab"]},
        "logit_bias, grammar": grammar | {"logit_bias": {str(i): -100 for i in range(1000)}},
        "min_tokens, grammar": word | {"min_tokens": 8},
        "stop_token_ids, grammar": word | {"stop_token_ids": [300]},
        "empty choice": {"structured_outputs": {"choice": [""]}},
        "two grammars": {"structured_outputs": {"choice": ["a"], "regex": "a"}},
        "response_format, grammar": grammar | {"response_format": {"type": "json_object"}},
        "thinking_token_budget": {"thinking_token_budget": 3},
        "prompt_logprobs, stream": {"prompt_logprobs": 3, "stream": True},
        "prompt_embeds": {"prompt_embeds": "AAAA"},
        "logprob_token_ids": {"logprob_token_ids": [10**9]},
        "stream_options, whole": {"stream_options": {"include_usage": True}},
    }


def odd_chats() -> dict[str, dict[str, Any]]:
    image = [{"type": "image_url", "image_url": {"url": "x"}}]
    return {
        "tool_choice without tools": {"tool_choice": "required"},
        "image": {"messages": [{"role": "user", "content": image}]},
    }


def client_errors() -> Sent:
    """Return requests that once were answered with 500, and similar ones."""
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8}
    found = deep_bodies()
    found |= {name: (COMPLETIONS, json_bytes(ASK | fields)) for name, fields in odd_pairs().items()}
    return found | {name: (CHAT, json_bytes(chat | fields)) for name, fields in odd_chats().items()}


@attack(11, bounded=True)
async def client_errors_as_500(attempt: Attempt) -> None:
    """Send requests with client errors that once were reported as server errors.

    They have fields nested 50 and 900 deep, transfer parameters, or options that are incompatible
    with a grammar or with each other. Each must be refused with a 4xx status, or be served.
    """
    for name, (path, body) in client_errors().items():
        await attempt.expect(name, path, body, 200, 400, 404, 422, 429, limit_s=20)
