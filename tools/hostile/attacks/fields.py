"""The material of the fuzz: all fields of all routes, valid values and invalid ones.

The fields are those of vLLM's CompletionRequest, ChatCompletionRequest, TokenizeCompletionRequest,
TokenizeChatRequest and DetokenizeRequest, of deployments/requests/encode, and of guidance.
"""

from __future__ import annotations

from typing import Any

from tools.hostile.attempt import nested

ODD: list[Any] = [None, True, False, 0, -1, 3, 1.5, -0.0, 1e308, 2**31, 2**63, 10**30]
ODD += ["", "x", "é😀", "\ud800", "\x00", " " * 999]
ODD += [[], {}, [[]], [None], ["a", 1], [{}], {"a": {"b": []}}, [1, "a", None], [-1], [2**40]]
ODD += [[[1, 2], [3]], {"": 0}]
"""Values that few fields take."""


def names(text: str) -> list[str]:
    """Return the words of `text`."""
    return text.split()


GENERATE_FIELDS = names(
    """prompt messages guidance_scale cfg_scale negative_prompt negative_messages stream n
negative_prompt_token_ids temperature top_p top_k min_p seed stop logprobs echo
logit_bias stream_options presence_penalty repetition_penalty min_tokens stop_token_ids
bad_words allowed_token_ids prompt_logprobs response_format structured_outputs tools
tool_choice vllm_xargs priority request_id cache_salt truncate_prompt_tokens model
top_logprobs ignore_eos add_special_tokens chat_template chat_template_kwargs suffix
add_generation_prompt continue_final_message documents user best_of max_tokens"""
)
"""Fields that clients send most. They are chosen more often."""

SAMPLING = names(
    """add_special_tokens allowed_token_ids bad_words cache_salt ec_transfer_params echo
frequency_penalty ignore_eos include_stop_str_in_output kv_transfer_params length_penalty
logit_bias logprob_token_ids logprobs max_tokens min_p min_tokens mm_payload model n
presence_penalty priority prompt_logprobs repetition_detection repetition_penalty request_id
response_format return_mm_kwargs return_token_ids return_token_offsets
return_tokens_as_token_ids routed_experts_prompt_start seed session_id skip_special_tokens
spaces_between_special_tokens stop stop_token_ids stream stream_interval stream_options
structured_outputs temperature thinking_token_budget top_k top_p truncate_prompt_tokens
truncation_side use_beam_search user vllm_xargs watermarking best_of logits_processors timeout
metadata store service_tier extra_body extra_args sampling_params guided_json guided_regex"""
)
GUIDANCE = names(
    """guidance_scale cfg_scale negative_prompt negative_prompt_token_ids negative_prompt_ids
guidance_logprobs negative_messages guidance_start guidence_scale cfg_weight"""
)
COMPLETION = ["prompt", "prompt_embeds", "suffix", *SAMPLING, *GUIDANCE]
CHAT = [
    *names(
        """messages add_generation_prompt chat_template chat_template_kwargs continue_final_message
documents include_reasoning max_completion_tokens media_io_kwargs mm_processor_kwargs
parallel_tool_calls reasoning_effort return_prompt_text tool_choice tools top_logprobs"""
    ),
    *SAMPLING,
    *GUIDANCE,
]
TOKENIZE = names(
    """model prompt messages add_special_tokens return_token_strs add_generation_prompt
continue_final_message chat_template chat_template_kwargs media_io_kwargs mm_processor_kwargs
tools"""
)
DETOKENIZE = ["model", "tokens"]
RESPONSES = names(
    """input instructions max_output_tokens tools tool_choice text reasoning include metadata model
parallel_tool_calls previous_response_id background store stream temperature top_p top_logprobs
truncation user conversation prompt max_tool_calls service_tier cache_salt request_id stop seed
logit_bias vllm_xargs enable_response_messages structured_outputs allowed_token_ids"""
)
MESSAGES = names(
    """messages max_tokens metadata model stop_sequences stream system temperature thinking
tool_choice tools top_k top_p output_config chat_template_kwargs kv_transfer_params"""
)
ENCODERS = names(
    """model input encoding_format dimensions normalize use_activation truncate
truncate_prompt_tokens truncation_side truncation_direction prompt prompt_name user task
messages add_special_tokens timeout priority query
documents texts inputs top_n return_documents
return_text raw_scores text_1 text_2 queries items data_1 data_2 guidance_scale vllm_xargs
extra_body"""
)

ENCODER = {"model": "all-MiniLM-L6-v2"}
USER = [{"role": "user", "content": "Tell me a story."}]

ROUTES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "/v1/completions": ({"prompt": "Once", "max_tokens": 3}, [*COMPLETION, *GENERATE_FIELDS]),
    "/v1/chat/completions": ({"messages": USER, "max_tokens": 3}, [*CHAT, *GENERATE_FIELDS]),
    "/tokenize": ({"prompt": "Once"}, TOKENIZE),
    "/detokenize": ({"tokens": [300, 301]}, DETOKENIZE),
    "/v1/embeddings": (ENCODER | {"input": "A dog."}, ENCODERS),
    "/v1/rerank": (ENCODER | {"query": "a dog", "documents": ["a cat"]}, ENCODERS),
    "/v2/rerank": (ENCODER | {"query": "a dog", "documents": ["a cat"]}, ENCODERS),
    "/rerank": (ENCODER | {"query": "a dog", "texts": ["a cat"]}, ENCODERS),
    "/v1/score": (ENCODER | {"text_1": "a dog", "text_2": "a cat"}, ENCODERS),
    "/score": (ENCODER | {"text_1": "a dog", "text_2": ["a cat"]}, ENCODERS),
    "/pooling": (ENCODER | {"input": "A dog."}, ENCODERS),
    "/v1/classify": (ENCODER | {"input": "A dog."}, ENCODERS),
    "/classify": (ENCODER | {"input": "A dog."}, ENCODERS),
    "/embed_sparse": (ENCODER | {"inputs": "A dog."}, ENCODERS),
    "/v2/embed": (ENCODER | {"texts": ["A dog."]}, ENCODERS),
    "/": (ENCODER | {"inputs": "A dog."}, ENCODERS),
    "/embed": (ENCODER | {"inputs": "A dog."}, ENCODERS),
    "/embed_all": (ENCODER | {"inputs": "A dog."}, ENCODERS),
    "/predict": (ENCODER | {"inputs": "A dog."}, ENCODERS),
    "/similarity": (
        ENCODER | {"inputs": {"source_sentence": "A dog.", "sentences": ["A cat."]}},
        ENCODERS,
    ),
    "/v1/responses": ({"input": "Once", "max_output_tokens": 3}, [*RESPONSES, *GUIDANCE]),
    "/v1/messages": ({"messages": USER, "max_tokens": 3}, [*MESSAGES, *GUIDANCE]),
    "/v1/chat/completions/batch": ({"messages": [USER], "max_tokens": 3}, CHAT),
    "/generative_scoring": (
        {"query": "Once", "items": ["a"], "label_token_ids": [300]},
        ["query", "items", "label_token_ids", "apply_softmax", "item_first", *SAMPLING],
    ),
    "/invocations": ({"prompt": "Once", "max_tokens": 3}, [*COMPLETION, *ENCODERS]),
    "/v1/messages/count_tokens": ({"messages": USER}, MESSAGES),
    "/v1/completions/render": ({"prompt": "Once"}, COMPLETION),
    "/v1/chat/completions/render": ({"messages": USER}, CHAT),
    "/v1/responses/render": ({"input": "Once"}, RESPONSES),
    "/v1/messages/render": ({"messages": USER, "max_tokens": 3}, MESSAGES),
}
"""For each POST route, a valid body, and fields that it or a similar route knows."""

READ = (
    "/v1/models",
    "/health",
    "/ready",
    "/metrics",
    "/",
    "/no-such",
    "/v1/no/such",
    "/docs",
    "/openapi.json",
    "/v1",
)
"""Paths that take no body."""

RAW: list[bytes] = [
    b"NaN",
    b"-Infinity",
    b"1e999",
    b"1e-999",
    b"-0",
    b"9" * 400,
    b"1." + b"3" * 400,
    b'"\\ud800"',
]
RAW += [
    nested(30),
    nested(900),
    nested(20_000),
    b'{"a":' * 900 + b"1" + b"}" * 900,
    b'"' + b"x" * 200_000 + b'"',
]
RAW += [
    b"[" + b"1," * 20_000 + b"1]",
    b"[" + b'"a",' * 3000 + b'"b"]',
    b'"\\u0000"',
    b'{"a":1,"a":[2]}',
]
RAW += [b"{" + b",".join(b'"k%d":1' % i for i in range(3000)) + b"}"]
"""JSON text that is sent unchanged: text that json.dumps does not write, and large values."""

LONG: list[tuple[bytes, int]] = [
    (b"1", 150_000),
    (b"1.5", 150_000),
    (b"null", 20_000),
    (b"[]", 20_000),
    (b"[1]", 20_000),
    (b"{}", 12_000),
    (b'"a"', 30_000),
    (b'["a","b"]', 12_000),
    (b'{"role":"user","content":"a"}', 6_000),
    (b'[{"role":"user","content":"a"}]', 6_000),
    (b'{"role":"user","content":[{"type":"text","text":"a"}]}', 6_000),
    (b'{"type":"text","text":"a"}', 6_000),
    (b'{"type":"function_call","call_id":"a","name":"f","arguments":"{}"}', 6_000),
    (b'{"type":"function","function":{"name":"f"}}', 6_000),
    (b'{"token_ids":[300],"weight":0.1}', 6_000),
]
"""Entries of long lists, with a number of them that may be within the bounds of a body."""

VALID: list[Any] = [
    *ODD,
    1,
    2,
    5,
    20,
    128,
    0.5,
    2.0,
    "2",
    "2.0",
    "1e3",
    "auto",
    "none",
    "required",
    "left",
    "right",
]
VALID += [
    "json",
    "float",
    "base64",
    "stories",
    "all-MiniLM-L6-v2",
    "A story about the sea.",
    [300],
    [[300, 301]],
]
VALID += [
    USER,
    [{"role": "system", "content": ""}, *USER],
    [{"role": "user", "content": [{"type": "text"}]}],
]
VALID += [
    {"role": "user", "content": None},
    [{"role": "tool", "content": "x"}],
    [{"role": "assistant"}],
]
VALID += [
    {"type": "json_object"},
    {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}},
]
VALID += [
    {"regex": "[a-z]{3}"},
    {"choice": ["a", "b"]},
    {"json": {"type": "integer"}},
    {"grammar": "root ::= root"},
]
VALID += [
    {"json": "{"},
    {"regex": "("},
    {"choice": []},
    {"choice": "a"},
    {"json": None, "regex": None},
    {"structural_tag": ""},
]
VALID += [
    {"include_usage": True},
    {"include_usage": 3},
    {"kv_transfer_params": "x"},
    {"guidance_scale": 2},
]
VALID += [{"5": 100}, {"5": "x"}, {"-1": 3}, {"99999999": 1.5}, {"x": 1}]
VALID += [
    [{"name": "section_budget", "max_tokens": 1, "end": "."}],
    [{"name": "no_repeat_ngram", "n": "2"}],
]
VALID += [
    [{"name": "vocabulary_gate", "characters": "["}],
    [{"type": "function", "function": {"name": "f"}}],
]
VALID += [
    [{"type": "function"}],
    {"type": "function", "function": {"name": "f"}},
    "{{ 1/0 }}",
    "{% for x in range(9**9) %}",
]
VALID += [
    {"do_remote_decode": True},
    {"max_pattern_size": 3},
    {"enable_thinking": []},
    ["a cat", {"text": "a dog"}],
]

HEADERS: list[dict[str, str]] = [{}] * 12
HEADERS += [
    {"content-type": kind}
    for kind in ("text/plain", "multipart/form-data", "", "application/json; charset=x")
]
HEADERS += [
    {"content-encoding": "gzip"},
    {"content-encoding": "br"},
    {"authorization": "Bearer"},
    {"x-api-key": "é"},
]
HEADERS += [{"x-request-timeout": value} for value in ("0", "nan", "-1", "1e9", "x", "0.001")]
HEADERS += [{"x-request-id": value} for value in ("a b", "x" * 3000, "../../etc", "same", "same")]
HEADERS += [
    {"x-session-id": "s" * 5000},
    {"traceparent": "00-x-y-01"},
    {"accept": "text/event-stream"},
]
HEADERS += [
    {f"x-odd-{number}": "v" * 20 for number in range(60)},
    {"cookie": "a=b; " * 600},
    {"origin": "http://evil.example"},
    {"expect": "100-continue"},
    {"connection": "close, upgrade", "upgrade": "websocket"},
    {"x-forwarded-for": "10.6.6.6, x, \u00e9"},
    {"x-forwarded-proto": "gopher"},
    {"accept-encoding": "gzip, br, x"},
    {"range": "bytes=0-1"},
    {"if-none-match": "*"},
    {"serve_multiplexed_model_id": "m" * 300},
    {"content-type": "application/json;charset=utf-16"},
    {"x-request-timeout": "9" * 300},
    {"tracestate": "a=" + "b" * 3000, "baggage": "k=v" * 500},
]
METHODS = ("POST",) * 100 + ("GET", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS")
DAMAGE = (
    b"",
    b"\xff",
    b"{",
    b"}",
    b'"',
    b"[",
    b",",
    b"NaN",
    b"1e999",
    b"\x00",
    b"\\",
    b"\xc3\x28",
    b"null",
    b'\\ud800"',
)
