"""What xgrammar would compile, written for llguidance.

vLLM prefers xgrammar, which computes the masks of a grammar when it compiles it. That takes seconds
where a schema counts characters or has many properties, and the more so the larger the vocabulary
is. llguidance computes each mask when it is needed, so it compiles the same in milliseconds. It
differs in three ways, which this module makes up for:

- xgrammar allows no properties that a schema does not name, unless the schema says that it does.
- llguidance reads no structural tags of today's format. They are written as a Lark grammar.
- In its grammars, text never matches a token that was added to the vocabulary, such as
  `<tool_call>`, so these may also stand by their ids.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from cfg_core.grammars.schemas import closed
from cfg_core.vllm_plugin.grammar_helper.lark_text import (
    ANY,
    JsonWhitespace,
    NotExpressibleError,
    escaped,
    parsed,
    unknown,
)
from cfg_core.vllm_plugin.grammar_helper.xml_parameters import MARKS, parameters


def added_tokens(tokenizer: Any) -> dict[str, int]:
    """The tokens that were added to a tokenizer's vocabulary, but for its end of texts.

    They are found by their texts.
    """
    added = getattr(tokenizer, "added_tokens_decoder", None) or {}
    return {
        str(token): int(id_)
        for id_, token in added.items()
        if str(token) and id_ != tokenizer.eos_token_id
    }


def fields_for_guidance(
    fields: Mapping[str, Any], added: Mapping[str, int], white: JsonWhitespace | None = None
) -> dict[str, Any]:
    """The fields of StructuredOutputsParams with which llguidance does what xgrammar would do.

    Raises NotExpressibleError.
    added: see `added_tokens`.
    """
    white = white or JsonWhitespace()
    try:
        if fields.get("json") is not None:
            return {**fields, "json": json.dumps(white.of(closed(parsed(fields["json"]))))}
        if fields.get("json_object") and white.most is not None:
            return {**fields, "json_object": None, "json": json.dumps(white.of({"type": "object"}))}
        if fields.get("structural_tag") is not None:
            lark = _Lark(added, white).of_tag(parsed(fields["structural_tag"]))
            return {**fields, "structural_tag": None, "grammar": lark}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise NotExpressibleError("It is not valid.") from None
    return dict(fields)


class _Lark:
    """Writes a structural tag as a Lark grammar of llguidance: rules, one after another."""

    def __init__(self, added: Mapping[str, int], white: JsonWhitespace) -> None:
        self._added, self._white = added, white
        self._rules: list[str] = []
        texts = sorted(added, key=len, reverse=True)
        self._splitter = re.compile("|".join(map(re.escape, texts)) if texts else r"(?!)")

    def of_tag(self, tag: Mapping[str, Any]) -> str:
        """The grammar of a whole structural tag. Raises NotExpressibleError or what dicts raise."""
        format_ = _legacy(tag) if "structures" in tag else tag["format"]
        start = self._format(format_, last=True)
        return "\n".join(["%llguidance {}", f"start: {start}", *self._rules]) + "\n"

    def _format(self, format_: Mapping[str, Any], last: bool) -> str:
        """A format as an expression in parentheses.

        last: whether nothing follows, so that free text may end it.
        """
        kind = format_["type"]
        if kind in ("any_text", "triggered_tags") and not last:
            raise unknown(f"{kind} before another format")
        writers: dict[str, Callable[[Mapping[str, Any], bool], str]] = {
            "any_text": self._any_text,
            "const_string": lambda f, _: self._literal(f["value"]),
            "json_schema": lambda f, _: self._schema(f),
            "or": self._or,
            "optional": lambda f, last: f"({self._format(f['content'], last)})?",
            "plus": lambda f, _: f"({self._format(f['content'], False)})+",
            "star": lambda f, _: f"({self._format(f['content'], False)})*",
            "regex": _digits,
            "repeat": self._repeat,
            "sequence": self._sequence,
            "tag": lambda f, last: self._tag(f, last),
            "tags_with_separator": self._separated,
            "triggered_tags": self._triggered,
        }
        if kind not in writers:
            raise unknown(kind)
        return writers[kind](format_, last)

    def _rule(self, body: str, lazy: bool = False) -> str:
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{'[lazy]' if lazy else ''}: {body}")
        return name

    def _text(self, excludes: Iterable[str]) -> str:
        """A terminal for free text without the strings `excludes`."""
        name, words = f"T{len(self._rules)}", " | ".join(json.dumps(word) for word in excludes)
        self._rules.append(f"{name}: {ANY}" + (f" & ~({ANY} ({words}) {ANY})" if words else ""))
        return name

    def _literal(self, text: str) -> str:
        """A string, in which added tokens may also stand by their ids."""
        parts, at = [], 0
        for found in self._splitter.finditer(text):
            parts += [json.dumps(text[at : found.start()])] if found.start() > at else []
            parts.append(f"({self._id(found)} | {json.dumps(found.group())})")
            at = found.end()
        parts += [json.dumps(text[at:])] if at < len(text) or not parts else []
        return " ".join(parts)

    def _id(self, found: re.Match[str]) -> str:
        return f"<[{self._added[found.group()]}]>"

    def _free(self, excludes: Iterable[str], ends: Iterable[str] = ()) -> tuple[str, str]:
        """Free text: what it may begin with, and the terminal that ends it.

        It may have added tokens but for those in `excludes`, and those that begin one of `ends`.
        """
        text, words = self._text(excludes), [*excludes, *ends]
        ids = sorted(id_ for token, id_ in self._added.items() if not _begins(words, token))
        if not ids:
            return "", text
        return f"({text} <[{','.join(map(str, ids))}]>)*", text

    def _up_to(self, excludes: Iterable[str], ends: Iterable[str]) -> str:
        """Free text up to the first of `ends`, included."""
        before, text = self._free(excludes, ends)
        ways = [self._rule(f"{text} ({' | '.join(map(json.dumps, ends))})", lazy=True)]
        for end in ends:
            found = self._splitter.search(end)
            if found and found.start():
                raise unknown("free text that ends with text and a token")
            if found:
                rest = end[found.end() :]
                ways.append(f"{text} {self._id(found)}" + (f" {self._literal(rest)}" * bool(rest)))
        return f"{before} ({' | '.join(ways)})"

    def _any_text(self, format_: Mapping[str, Any], last: bool) -> str:
        _check_unbounded(format_)
        return " ".join(self._free(format_.get("excludes") or ()))

    def _or(self, format_: Mapping[str, Any], last: bool) -> str:
        return "(" + " | ".join(self._format(f, last) for f in format_["elements"]) + ")"

    def _sequence(self, format_: Mapping[str, Any], last: bool) -> str:
        *most, end = format_["elements"]
        return " ".join([*(self._format(f, False) for f in most), self._format(end, last)])

    def _repeat(self, format_: Mapping[str, Any], last: bool) -> str:
        most = "" if format_["max"] < 0 else int(format_["max"])
        return f"({self._format(format_['content'], False)}){{{int(format_['min'])},{most}}}"

    def _tag(self, tag: Mapping[str, Any], last: bool, opened: str = "") -> str:
        """A tag. Its first characters `opened` have been written already."""
        if not isinstance(tag["begin"], str):
            raise unknown("a tag that begins with a token")
        begin, ends = tag["begin"].removeprefix(opened), _ends(tag["end"])
        opening = self._literal(begin) if begin else ""
        if tag["content"]["type"] == "any_text" and any(ends):
            _check_unbounded(tag["content"])
            return f"{opening} {self._up_to(tag['content'].get('excludes') or (), ends)}"
        content = self._format(tag["content"], last and not any(ends))
        if not any(ends):
            return f"{opening} {content}"
        write = self._after_space if _style(tag["content"]) in MARKS else self._literal
        return f"{opening} {content} ({' | '.join(map(write, ends))})"

    def _after_space(self, text: str) -> str:
        """A string after white space, of which its own first characters may be a part."""
        found = self._splitter.search(text)
        at = len(text) if found is None else found.start()
        if at == 0:
            raise unknown("XML marks that a token follows")
        rest = f" {self._literal(text[at:])}" if text[at:] else ""
        return f"/{self._white.space}{escaped(text[:at])}/{rest}"

    def _schema(self, format_: Mapping[str, Any]) -> str:
        """A JSON schema: JSON inline, or parameters between XML marks."""
        schema, style = format_["json_schema"], _style(format_)
        if format_.get("any_order") or format_.get("excludes"):
            raise unknown("a schema in any order, or with excluded strings")
        if style in MARKS:
            up_to, lazy = lambda end: self._up_to((), [end]), partial(self._rule, lazy=True)
            return parameters(schema, style, up_to, lazy, self._white)
        if style != "json" or schema is False:
            raise unknown(f"a schema in the style {style}")
        ours = {} if schema is True else closed(schema)
        return f"%json {json.dumps(self._white.of(ours, format_.get('max_whitespace_cnt')))}"

    def _separated(self, format_: Mapping[str, Any], last: bool) -> str:
        tag = self._rule(" | ".join(self._tag(tag, False) for tag in format_["tags"]))
        more = "" if format_.get("stop_after_first") else self._more(format_["separator"], tag)
        return f"({tag} {more})" + ("" if format_.get("at_least_one") else "?")

    def _more(self, separator: str, tag: str) -> str:
        return f"({self._literal(separator)} {tag})*" if separator else f"{tag}*"

    def _triggered(self, format_: Mapping[str, Any], last: bool) -> str:
        """Free text in which each trigger must begin one of its tags."""
        excludes = format_.get("excludes") or ()
        tags = self._rule(" | ".join(self._alternatives(format_, excludes)))
        first = " | ".join(self._tag(tag, False) for tag in format_["tags"])
        once = bool(format_.get("stop_after_first"))
        rest = " ".join(self._free(excludes, format_["triggers"]))
        if format_.get("at_least_one"):
            return f"({first})" if once else f"({first}) {tags}* {rest}"
        return f"({tags} | {rest})" if once else f"{tags}* {rest}"

    def _alternatives(self, format_: Mapping[str, Any], excludes: Iterable[str]) -> Iterable[str]:
        """For each trigger, free text that ends with it, and the rest of its tags."""
        for trigger in format_["triggers"]:
            tags = [tag for tag in format_["tags"] if str(tag["begin"]).startswith(trigger)]
            if tags:
                rests = " | ".join(self._tag(tag, False, trigger) for tag in tags)
                yield f"{self._up_to(excludes, [trigger])} ({rests})"


def _style(format_: Mapping[str, Any]) -> str:
    """How a schema's values are written; "" for other formats."""
    return str(format_.get("style", "json")) if format_["type"] == "json_schema" else ""


def _begins(words: Iterable[str], token: str) -> bool:
    """Whether a token begins one of the words."""
    return any(word.startswith(token) for word in words)


def _digits(format_: Mapping[str, Any], last: bool) -> str:
    """A number, the only regular expression that cannot run into what follows it.

    llguidance reads as much as a regular expression matches, and never gives characters back.
    """
    if format_["pattern"] != r"\d+":
        raise unknown("a regular expression")
    return "/[0-9]+/"


def _check_unbounded(text: Mapping[str, Any]) -> None:
    if text.get("max_tokens") is not None or text.get("max_chars") is not None:
        raise unknown("a bound on free text")


def _ends(end: Any) -> list[str]:
    """The texts that may end a tag. None begins another one, which llguidance would not see."""
    ends = [end] if isinstance(end, str) else end
    if not isinstance(ends, list):
        raise unknown("a tag that ends with a token")
    if any(one != other and other.startswith(one) for one in ends for other in ends):
        raise unknown("two ends of a tag of which one begins the other")
    return ends


def _legacy(tag: Mapping[str, Any]) -> dict[str, Any]:
    """A structural tag of the old format in today's."""
    return {
        "type": "triggered_tags",
        "triggers": tag["triggers"],
        "tags": [
            {
                "begin": item["begin"],
                "content": {"type": "json_schema", "json_schema": parsed(item["schema"])},
                "end": item["end"],
            }
            for item in tag["structures"]
        ],
    }
