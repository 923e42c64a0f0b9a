"""Bodies that are refused, each with the field at fault and words of the sentence.

tests/unit plays them at the functions that read bodies, and tests/serve over HTTP. A new refusal is
a row here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

Json = dict[str, Any]
USER: Json = {"role": "user", "content": "Tell me a story."}


class Bad(NamedTuple):
    """param: the field at fault. words: of the sentence. endpoint: as in requests/endpoints.py, or
    requests/encode/capabilities.py. fields: beside the prompt, the conversation or the input."""

    param: str
    words: str
    endpoint: str
    fields: Json

    def __str__(self) -> str:
        return f"{self.endpoint} {self.fields}"[:60]

    @property
    def is_json(self) -> bool:
        """Whether a client can send it: JSON has no NaN and no infinity."""
        try:
            json.dumps(self.fields, allow_nan=False)
        except ValueError:
            return False
        return True


def bad(param: str, words: str, endpoint: str = "completion", **fields: Any) -> Bad:
    return Bad(param, words, endpoint, fields)


def each(param: str, words: str, *all_fields: Json, endpoint: str = "completion") -> list[Bad]:
    """Several bodies that are refused with the same sentence."""
    return [Bad(param, words, endpoint, fields) for fields in all_fields]


# --- guidance -------------------------------------------------------------------------------------

IDS, SCORED = "negative_prompt_token_ids", "guidance_score_tokens"
SUFFIX = "negative_suffix_token_ids"


def _ids(value: Any) -> Json:
    return {"guidance_scale": 2, "negative_prompt_ids": value}


def _suffixed(value: Any) -> Json:
    return {"guidance_scale": 2, SUFFIX: value}


def _stream(**fields: Any) -> Json:
    """One follower, of which `fields` may take something away (None) or add it."""
    entry = {"weight": 1, "prompt": "a", **fields}
    return {"guidance_streams": [{name: x for name, x in entry.items() if x is not None}]}


def _schedule(*entries: Any) -> Json:
    return {"guidance_schedule": list(entries)}


VALUES: Sequence[Bad] = [
    *each(
        "guidance_scale",
        "must be a number, not",
        {"guidance_scale": "1.5"},
        {"guidance_scale": True},
        {"guidance_scale": [2]},
        {"cfg_scale": "2"},
    ),
    *each(
        "guidance_scale",
        "must be finite",
        *({"guidance_scale": value} for value in (math.nan, math.inf, -math.inf, 10**400)),
    ),
    bad("cfg_scale", "send only one", guidance_scale=2, cfg_scale=2),
    bad("guidance_scale", "send only one", cfg_scale=2, guidance_scale=3),
    bad("negative_prompt", "must be a string, not a number", guidance_scale=1, negative_prompt=7),
    bad("negative_prompt", "must be a string, not a list", guidance_scale=2, negative_prompt=["x"]),
    *each(IDS, "is empty", _ids([]), _ids([]) | {"guidance_scale": 1}),
    bad(IDS, "must be a list of token ids, not a string", **_ids("12")),
    bad(IDS, "must be a list of token ids, not an object", **_ids({"1": 2})),
    bad(IDS, "[1] is -1: token ids of this model are at least 0", **_ids([3, -1])),
    *each(IDS, "[0] must be an integer, not", _ids([1.0]), _ids([True]), _ids([[1]])),
    bad(IDS, "both given: send only one", **_ids([1]), negative_prompt_token_ids=[1]),
    *each(
        IDS,
        "both given: send only one",
        {"guidance_scale": 2, "negative_prompt": "x", IDS: [1]},
        {"guidance_scale": 1, "negative_prompt": "x", IDS: [1]},
    ),
    # suffixes
    bad("negative_suffix", "is empty", guidance_scale=2, negative_suffix=""),
    bad("negative_suffix", "must be a string, not a list", guidance_scale=2, negative_suffix=[1]),
    bad(SUFFIX, "is empty: leave it out for another negative", **_suffixed([])),
    bad(SUFFIX, "must be a list of token ids", **_suffixed("1")),
    bad(SUFFIX, "both given: send only one", **_suffixed([1]), negative_suffix="x"),
    bad("negative_suffix", "both given: send only one", negative_prompt="", negative_suffix="x"),
    bad("guidance_streams", "of all negatives", **_stream(), negative_suffix="x"),
    bad(SCORED, "a suffix comes behind them", **_suffixed([1]), guidance_score_tokens=2),
    bad(
        "guidance_between",
        "a suffix has the whole conditional stream before it",
        **_suffixed([1]),
        guidance_between={"start_token_id": 1, "end_token_id": 2, "restart_negative": True},
    ),
    # names
    bad("guidance_scal", "Did you mean guidance_scale?", guidance_scal=2),
    bad("Guidance_Scale", "Did you mean guidance_scale?", Guidance_Scale=3),
    bad("negative_promt", "Did you mean negative_prompt?", negative_promt="x"),
    bad("negative_prompts", "Did you mean negative_prompt?", negative_prompts=None),
    bad("cfg", "is not a guidance field of this server", cfg=3),
    bad("negative", "is not a guidance field of this server", negative=None),
    bad("cfg_weight", "guidance_scale = 1 + cfg_weight where 0 means off", cfg_weight=0.5),
    bad("cfg_coef", "guidance_scale = cfg_coef where 1 means off", cfg_coef=3),
    # streams
    bad("guidance_streams", "must be a list of objects", guidance_streams=3),
    bad("guidance_streams", "is empty: leave it out for a plain request", guidance_streams=[]),
    bad("guidance_streams[0]", "must be an object", guidance_streams=[3]),
    bad("guidance_streams[0].weight", "has no weight", **_stream(weight=None)),
    bad("guidance_streams[0].weight", "must be a number", **_stream(weight="1")),
    bad("guidance_streams[0].weight", "must be finite", **_stream(weight=math.inf)),
    bad("guidance_streams[0]", "conditional stream once more", **_stream(prompt=None)),
    bad("guidance_streams[0]", "prompt and token_ids", **_stream(token_ids=[1])),
    bad("guidance_streams[0]", "unknown key 'scale'", **_stream(scale=2)),
    bad("guidance_streams[0].prompt", "must be a string", **_stream(prompt=3)),
    bad("guidance_streams[0].token_ids", "is empty", **_stream(prompt=None, token_ids=[])),
    bad("guidance_streams[0].messages", "is empty", **_stream(prompt=None, messages=[])),
    bad("guidance_streams[0].messages", "must be a list of", **_stream(prompt=None, messages="a")),
    bad(
        "guidance_streams[0].prompt_embeds",
        "must be a tensor of shape",
        **_stream(prompt=None, prompt_embeds={"shape": "ab"}),
    ),
    *each(
        "guidance_streams",
        "has the weights and prompts of all negatives: leave out",
        _stream() | {"guidance_scale": 2},
        _stream() | {"negative_prompt": "a"},
        _stream() | _schedule([0, 2]),
    ),
    # schedules, windows and cuts
    bad("guidance_schedule", "leave out guidance_scale", **_schedule([0, 2]), guidance_scale=3),
    bad("guidance_schedule", "1 to 1024 entries", **_schedule()),
    bad("guidance_schedule", "must be a list of", guidance_schedule=3),
    bad("guidance_schedule", "is no pair", **_schedule(3)),
    bad("guidance_schedule", "must begin at token 0", **_schedule([1, 2])),
    bad("guidance_schedule", "ascend", **_schedule([0, 2], [5, 1], [5, 3])),
    bad("guidance_schedule[0][0]", "must be an integer", **_schedule([0.0, 2])),
    bad("guidance_schedule[0][1]", "must be finite", **_schedule([0, math.nan])),
    bad("guidance_start", "must be 0 or more", guidance_scale=2, guidance_start=-1),
    bad("guidance_start", "must be an integer", guidance_scale=2, guidance_start=True),
    bad("guidance_end", "must be 1 or more", guidance_scale=2, guidance_end=0),
    bad(
        "guidance_end",
        "no token would be guided",
        guidance_scale=2,
        guidance_start=5,
        guidance_end=5,
    ),
    bad("guidance_top_k", "must be 1 or more", guidance_scale=2, guidance_top_k=0),
    bad("guidance_filter_top_k", "an integer", guidance_scale=2, guidance_filter_top_k=1.5),
    bad("guidance_min_p", "above 0 and at most 1", guidance_scale=2, guidance_min_p=0),
    bad("guidance_min_p", "above 0 and at most 1", guidance_scale=2, guidance_min_p=1.5),
    *each(
        "negative_prompt_embeds",
        "must be a tensor of shape",
        {"guidance_scale": 2, "negative_prompt_embeds": {"shape": 5}},
        {"guidance_scale": 2, "negative_prompt_embeds": [[1.0]]},
    ),
    # what means nothing without guidance
    bad("guidance_min_p", "guidance_scale is 1 (off)", guidance_min_p=0.5),
    bad("guidance_start", "guidance_scale is 1 (off)", guidance_start=3),
    bad("guidance_end", "guidance_scale is 1 (off)", guidance_end=3),
    bad("guidance_end", "guidance_scale is 1 (off)", **_schedule([0, 1]), guidance_end=4),
    bad("guidance_top_k", "guidance_scale is 1 (off)", guidance_top_k=3),
    bad("guidance_logprobs", "guidance_scale is 1 (off)", guidance_logprobs=True),
    # scores
    bad(SCORED, "must be 1 or more", guidance_score_tokens=0),
    bad(SCORED, "must be an integer", guidance_score_tokens=True),
    bad(SCORED, "leave out guidance_schedule", guidance_score_tokens=2, **_schedule([0, 2])),
    bad(
        SCORED, "leave out guidance_end", guidance_score_tokens=2, guidance_scale=2, guidance_end=9
    ),
]
"""What GuidanceParams refuses, so in SamplingParams and over HTTP."""

TEXTS_OF_LISTS: Sequence[Bad] = [
    bad("guidance_streams", "must be a list of objects", guidance_streams=text)
    for text in ("[{]", "[" * 100_000)
]
"""Lists as JSON text, which GuidanceParams reads; over HTTP, all of them are refused."""

GUIDED: Json = {"guidance_scale": 2}


def _markers(start: Any, end: Any) -> Json:
    return {"start_token_id": start, "end_token_id": end}


MARKED: Json = _markers(1, 2)
NWCAD: Json = {"name": "nwcad", "max_divergence": 0.1}
BELOW_0: Json = {"max_divergence": -1, "negative_margin": 0, "conditional_margin": 0}
BOTH: Json = {"guidance_scale": 2, "negative_messages": [USER]}
MOVE = "move it to the top level"

GUIDANCE: Sequence[Bad] = [
    bad("negativ_prompt", "Did you mean negative_prompt?", "chat", negativ_prompt="a"),
    bad("guidence_scale", "Did you mean guidance_scale?", guidence_scale=2),
    bad("negative_message", "Did you mean negative_messages?", "chat", negative_message=[USER]),
    bad("logit_processors", "Did you mean logits_processors?", logit_processors=[]),
    bad("guidance_between", "must be an object", guidance_between=3, **GUIDED),
    bad("guidance_between", "send an object", guidance_between="{}", **GUIDED),
    bad("guidance_between", "an unknown key 'end'", guidance_between={"end": 3}, **GUIDED),
    bad("guidance_between.start_token_id", "is missing", guidance_between={}, **GUIDED),
    bad("guidance_between.end_token_id", "0 or more", guidance_between=_markers(1, -1), **GUIDED),
    bad("guidance_between", "are the same", guidance_between=_markers(7, 7), **GUIDED),
    bad("guidance_between", "leave guidance_between out", guidance_between=_markers(1, "b")),
    bad(
        "guidance_between.restart_negative",
        "true or false",
        guidance_between={**_markers(1, 2), "restart_negative": 1},
        **GUIDED,
    ),
    bad(SCORED, "leave out guidance_in", guidance_score_tokens=2, guidance_in="answer", **GUIDED),
    bad("guidance_in", "'thinking' or 'answer'", guidance_in="thought", **GUIDED),
    bad("guidance_in", "both given", guidance_in="answer", guidance_between=MARKED, **GUIDED),
    bad("guidance_min_entropy", "nats, 0 or more", guidance_min_entropy=-1, **GUIDED),
    bad("guidance_rule", "must be an object", guidance_rule=3),
    bad("guidance_rule", "there is no rule 'x': known rules: adacad", guidance_rule={"name": "x"}),
    bad("guidance_rule", "has no parameter 'n'", guidance_rule={"name": "arr", "n": 1}),
    bad("guidance_rule.negative_margin", "nwcad needs", guidance_rule=NWCAD),
    bad("guidance_rule.max_divergence", "from 0 to", guidance_rule={**NWCAD, **BELOW_0}),
    bad("guidance_rule", "has weights", guidance_rule={"name": "arr"}, **_stream()),
    bad("guidance_rule", "send an object", guidance_rule='{"name": "arr"}'),
    bad(
        "guidance_schedule",
        "The rule arr computes",
        guidance_rule={"name": "arr"},
        **_schedule([0, 2]),
    ),
    bad("guidance_scale", "The rule arr computes", guidance_rule={"name": "arr"}, **GUIDED),
    bad("guidance_max_kl", "nats, above 0", guidance_max_kl=0, **GUIDED),
    bad("guidance_max_kl", "leave guidance_max_kl out", guidance_max_kl=1),
    # negatives of conversations
    *each(
        "negative_messages",
        "both given: send only one",
        BOTH | {"negative_prompt": "a"},
        BOTH | {"negative_prompt_ids": [1]},
        endpoint="chat",
    ),
    bad("negative_messages", "send negative_prompt here", **BOTH),
    *each(
        "negative_messages",
        "is empty: leave the field out",
        GUIDED | {"negative_messages": []},
        {"guidance_scale": 1, "negative_messages": []},
        endpoint="chat",
    ),
    bad("negative_messages", "not a string", "chat", **GUIDED, negative_messages="a"),
    bad(
        "negative_messages",
        "move the conversation into a stream's messages",
        "chat",
        **_stream(),
        negative_messages=[USER],
    ),
    # embeddings
    bad(
        "negative_prompt_embeds",
        "send negative_messages with parts of the type prompt_embeds",
        "chat",
        **GUIDED,
        negative_prompt_embeds="AAAA",
    ),
    bad(
        "guidance_streams[0].prompt_embeds",
        "send guidance_streams[0].messages with parts",
        "chat",
        **_stream(prompt=None, prompt_embeds="AAAA"),
    ),
    bad(
        "negative_prompt_embeds",
        "must be a string",
        **GUIDED,
        negative_prompt_embeds={"shape": [1, 2]},
    ),
    # streams
    bad("guidance_streams[0]", "send prompt or token_ids", **_stream(prompt=None, messages=[USER])),
    *each(
        "guidance_streams[0].lora",
        "the name of an adapter, or false",
        *(_stream(lora=lora) for lora in (True, 0, 3, ["a", 1, "/a"], {"name": "a"})),
    ),
    bad("guidance_streams", "is a string: send a JSON list", guidance_streams="[]"),
    bad("guidance_schedule", "is a string: send a JSON list", "chat", guidance_schedule="[[0, 2]]"),
    # places where a field would be ignored
    bad("vllm_xargs", MOVE, vllm_xargs={"guidance_scale": 2}),
    bad("vllm_xargs", MOVE, vllm_xargs={"guidance_streams": "[]"}),
    bad("extra_body", MOVE, "chat", extra_body={"negative_prompt": "a"}),
    bad("extra_body", MOVE, extra_body={"logits_processors": []}),
    bad("extra_args", MOVE, "chat", extra_args={"cfg_scale": 2}),
    bad("parameters", MOVE, "chat", parameters={"guidance_scale": 2}),
    bad("options", MOVE, "chat", options={"negative_prompt": "a"}),
    bad("chat_template_kwargs", MOVE, "chat", chat_template_kwargs={"cfg_scale": 2}),
    bad("begun_token_ids", "is for Python", begun_token_ids=[5]),
    bad("begun_token_ids", "is for Python", "chat", vllm_xargs={"begun_token_ids": [5]}),
    bad("begun_token_ids", "is for Python", "chat", sampling_params={"begun_token_ids": [5]}),
    # what cannot be guided
    bad("use_beam_search", "Beam search cannot be guided", **GUIDED, use_beam_search=True),
    bad(
        "use_beam_search",
        "Beam search cannot be guided",
        **_schedule([0, 2]),
        use_beam_search=True,
    ),
    bad(
        "logits_processors",
        "Beam search does not support",
        logits_processors=[],
        use_beam_search=True,
    ),
    bad("suffix", "cannot be guided", **GUIDED, suffix="z"),
    bad("guidance_scale", "This endpoint cannot be guided", "batch", **GUIDED),
    bad("guidance_scale", "This endpoint cannot be guided", "batch", **_stream()),
    bad("guidance_scale", "This endpoint cannot be guided", "scoring", **GUIDED),
    *(
        bad(
            "guidance_logprobs",
            "use /v1/completions or",
            endpoint,
            **GUIDED,
            guidance_logprobs=True,
        )
        for endpoint in ("messages", "responses")
    ),
    bad(SCORED, "is for /v1/completions", "chat", guidance_score_tokens=3),
    *each(
        SCORED,
        "send echo and logprobs",
        {"guidance_score_tokens": 3},
        GUIDED | {"guidance_score_tokens": 3, "logprobs": 1},
    ),
]
"""What only a body can have, so what is refused over HTTP alone."""

# --- JSON -----------------------------------------------------------------------------------------

NOT_JSON: Sequence[tuple[bytes, str]] = [
    (b"", "not valid JSON"),
    (b'{"prompt": ', "not valid JSON"),
    (b"\xff\xfe", "not valid JSON"),
    (b'{"a": ' + b"9" * 5000 + b"}", "not valid JSON"),
    (b"[1]", "must be a JSON object, not a list"),
    (b"null", "must be a JSON object, not null"),
    (b"3", "must be a JSON object, not a number"),
    (b'"x"', "must be a JSON object, not a string"),
    (b"[" * 100_000, "nested more than 100 deep"),
    (b'{"prompt": ' + b"[" * 900 + b"]" * 900 + b"}", "nested more than 100 deep"),
    (json.dumps({f"guidance_{i}": 1 for i in range(300)}).encode(), "300 fields"),
    (b'{"temperature": NaN}', "NaN is not a finite number"),
    (b'{"temperature": [-Infinity]}', "-Infinity is not a finite number"),
    (b'{"top_p": 1e999}', "1e999 is not a finite number"),
    (b'{"guidance_scale": NaN}', "guidance_scale must be finite"),
    (b'{"guidance_scale": 1e999}', "guidance_scale must be finite"),
    (b'{"cfg_scale": -Infinity}', "guidance_scale must be finite"),
    (b'{"top_k": 9223372036854775808}', "too large: integers must fit 64 bits"),
    (b'{"stop": [{"a": -1000000000000000000000}]}', "too large: integers must fit 64 bits"),
    (b'{"prompt": "\\ud800"}', "half of a surrogate pair"),
]
"""Bodies that are no request, whatever the endpoint."""

# --- encoders -------------------------------------------------------------------------------------


def _input(words: str, *values: Any) -> list[Bad]:
    return each("input", words, *({"input": value} for value in values), endpoint="embeddings")


INPUTS: Sequence[Bad] = [
    *_input("input is missing: send a text", None),
    *_input("input is a number: send a text", 3),
    *_input("input is an object", {"text": "x"}),
    *_input("input is a boolean", True),
    *_input("input is empty: send", "", []),
    *_input("input[1] is empty", ["a", ""]),
    *_input("input[0] has no tokens", [[]]),
    *_input("input[1] has no tokens", [[1], []]),
    *_input("input has 2049 items: send at most 2048", ["x"] * 2049, [[1]] * 2049),
    *_input("input[1] is a number: send texts, or lists of token ids", ["a", 1]),
    *_input("input[0] is a number", [1, "a"]),
    *_input("input[0] is a text and input[1] is a list of token ids: send one kind", ["a", [1]]),
    *_input("input[0] is a boolean", [True, False]),
    *_input("input[0] holds a boolean: token ids are whole numbers", [[1, True]]),
    *_input("input[0] holds a number: token ids are whole numbers", [[1.0]]),
    *_input("input[0] holds a string", [["a", "b"]]),
    *_input("input[0] is null", [None]),
]

_WRONG: dict[str, list[tuple[str, Json]]] = {
    "dimensions": [
        ("was not trained to be cut", {"dimensions": 2}),
        ("dimensions is 0: send a whole number of at least 1", {"dimensions": 0}),
        ("dimensions is a string: send a whole number", {"dimensions": "4"}),
        ("dimensions is a boolean", {"dimensions": True}),
        ("dimensions is a number: send a whole number", {"dimensions": 4.0}),
    ],
    "encoding_format": [
        ("must be float or base64", {"encoding_format": value}) for value in ("hex", ["hex"])
    ],
    "truncate_prompt_tokens": [
        ("or -1", {"truncate_prompt_tokens": value}) for value in (0, 10**6, True)
    ],
    "truncate": [
        ("send only one", {"truncate_prompt_tokens": 4, "truncate": True}),
        ("must be true or false", {"truncate": 1}),
        ("NONE, START or END", {"truncate": "MIDDLE"}),
    ],
    "truncation_side": [
        ("must be left or right", {"truncation_side": value}) for value in ("up", 3)
    ],
    "prompt_name": [("no prompt named 'query': it has none", {"prompt_name": "query"})],
    "prompt": [
        ("prompt is a number", {"prompt": 3}),
        ("send only one", {"prompt": "x", "prompt_name": "y"}),
        ("send texts, or leave it out", {"input": [1, 2], "prompt": "x"}),
    ],
    "normalize": [
        ("normalize is a number: send true or false", {"normalize": 1}),
        ("send only one", {"normalize": True, "use_activation": False}),
    ],
    "messages": [("send the text as input", {"messages": []})],
    "add_special_tokens": [("send token ids instead", {"add_special_tokens": False})],
    "guidance_scale": [("encoders generate none: leave it out", {"guidance_scale": 2})],
    "negative_prompt": [("leave it out", {"negative_prompt": "x"})],
    "cfg": [("leave it out", {"cfg": 1})],
    "guidence_scale": [("leave it out", {"guidence_scale": 2})],
    "cfg_scale": [("leave it out", {"extra_body": {"cfg_scale": 2}})],
}
"""By the field at fault: words, and fields beside a good input."""

ENCODING: Sequence[Bad] = [
    bad(param, words, endpoint, **{"input": "x", **fields})
    for endpoint in ("embeddings", "pooling")
    for param, rows in _WRONG.items()
    for words, fields in rows
]

RERANKS: Sequence[Bad] = [
    Bad(param, words, "rerank", {"query": "q", "documents": ["a"], **fields})
    for param, words, fields in (
        ("documents", "both missing: send documents", {"documents": None}),
        ("documents", "both given: send only one", {"texts": ["a"]}),
        ("query", "query is missing", {"query": None}),
        ("query", "query is empty", {"query": ""}),
        ("query", "query is a list: send a text", {"query": ["q"]}),
        ("documents", "documents is empty", {"documents": []}),
        ("documents", "at most 2048", {"documents": ["a"] * 2049}),
        ("documents", "documents[1] is a number", {"documents": ["a", 3]}),
        ("documents", "is an object without a text", {"documents": [{"title": "a"}]}),
        ("documents", "documents[0] is empty", {"documents": [{"text": ""}]}),
        ("documents", "documents is an object", {"documents": {"text": "a"}}),
        ("texts", "texts[0] is an object", {"documents": None, "texts": [{"text": "a"}]}),
        ("top_n", "top_n is -1", {"top_n": -1}),
        ("return_documents", "send true or false", {"return_documents": "yes"}),
    )
]

SCORES: Sequence[Bad] = [
    bad(
        "text_1",
        "text_1 has 2 texts and text_2 has 3: send one, or as many as text_2",
        "score",
        text_1=["a", "b"],
        text_2=["a", "b", "c"],
    ),
    bad("text_1", "text_1 and text_2 are not both given", "score", text_1="a"),
]
