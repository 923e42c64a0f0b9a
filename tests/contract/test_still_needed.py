"""What we change inside other packages is still needed: read from the installed versions.

Each row of the tables says what holds while it is needed (`Row.needed_while`). If a test fails
here, the other package has perhaps mended a fault or got a hook: read it, and delete the row if the
change is not needed any more. Faults of vLLM have tests in test_stock_faults.py.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.sampling_params import BeamSearchParams, SamplingParams
from vllm.tokenizers import get_tokenizer
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.sample.logits_processor import LogitsProcessor, build_logitsprocs

from cfg_core.patching import NO_WAY, load, stock
from tests.contract.left_out import RUNS_RAY_LLM
from tests.contract.replacements import ROWS
from tests.contract.syntax import calls

ROOT = Path(__file__).parents[2]
CALLS = sorted({row.needed_while for row in ROWS if " calls " in row.needed_while})
MESSAGES = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well,"}]


def stock_of(target: str) -> Any:
    """The original at the target of the row that ends so."""
    (row,) = [row for row in ROWS if row.target.endswith(target)]
    return stock(row)


# --- the rows ------------------------------------------------------------------------------------


def functions_of(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_row_says_how_to_notice_that_it_can_go() -> None:
    for row in ROWS:
        file, _, test = row.needed_while.partition("::")
        if test:
            assert test in functions_of(ROOT / file), row.target
        else:
            assert " calls " in row.needed_while or row.needed_while == NO_WAY, row.target


def test_every_test_of_this_file_is_that_of_a_row() -> None:
    named = {row.needed_while.partition("::")[2] for row in ROWS}
    tests = {name for name in functions_of(Path(__file__)) if name.startswith("test_")}
    assert {name for name in tests - named if not name.startswith("test_every_")} == set()


@pytest.mark.parametrize(
    "needed", [name for name in CALLS if RUNS_RAY_LLM or not name.startswith("ray.llm")]
)
def test_every_function_still_calls_what_we_replace(needed: str) -> None:
    """Else it may have a hook: what it calls can be chosen, or is not called any more."""
    target, _, name = needed.partition(" calls ")
    (row, *_) = [row for row in ROWS if row.needed_while == needed]
    function = stock(row) if row.target == target else load(target)
    written = [ast.unparse(part) for node in calls(function) for part in (node, node.func)]
    assert any(text == name or text.startswith(f"{name}.") for text in written)


# --- hooks that may appear -----------------------------------------------------------------------


def test_an_output_has_no_field_for_extensions() -> None:
    types = inspect.get_annotations(EngineCoreOutput)
    free = {name for name, of in types.items() if any(word in str(of) for word in ("Any", "dict"))}
    assert free == {"kv_transfer_params", "ec_transfer_params"}


def test_a_beam_search_has_no_extra_arguments() -> None:
    assert "extra_args" not in BeamSearchParams.__struct_fields__


def test_the_prefix_cache_is_read_whole_or_not_at_all() -> None:
    types = inspect.get_annotations(SamplingParams)
    found = {name: str(of) for name, of in types.items() if "prefix_cache" in name}
    assert found == {"skip_reading_prefix_cache": "bool | None"}


def test_logits_processors_do_not_run_with_drafts() -> None:
    config: Any = SimpleNamespace(speculative_config=object())
    with pytest.raises(ValueError, match="speculative decoding"):
        build_logitsprocs(config, None, False, False, [LogitsProcessor])


def test_uvicorn_has_no_other_bounds() -> None:
    parameters = inspect.signature(uvicorn.Config).parameters
    assert {name for name in parameters if name.startswith(("limit_", "timeout_", "h11_"))} == {
        "limit_concurrency",
        "limit_max_requests",
        "limit_max_requests_jitter",
        "timeout_keep_alive",
        "timeout_notify",
        "timeout_graceful_shutdown",
        "timeout_worker_healthcheck",
        "h11_max_incomplete_event_size",
    }


# --- what the other package does today -----------------------------------------------------------


def test_a_token_is_decoded_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = get_tokenizer(str(ROOT / "models" / "stories"))
    decoded, decode = [], tokenizer.decode

    def counted(ids: Any, *args: Any, **kwargs: Any) -> Any:
        decoded.append(ids)
        return decode(ids, *args, **kwargs)

    monkeypatch.setattr(tokenizer, "decode", counted)
    stock_of("convert_ids_list_to_tokens")(tokenizer, [5, 5])
    assert decoded == [[5], [5]]


def test_a_chat_with_echo_asks_for_scores_of_the_prompt() -> None:
    request = ChatCompletionRequest(messages=MESSAGES, echo=True, logprobs=True, top_logprobs=2)
    made = stock_of("ChatCompletionRequest.to_sampling_params")(request, 5, {})
    assert made.prompt_logprobs == 2


def test_a_message_of_the_assistant_is_not_continued() -> None:
    request = AnthropicMessagesRequest(model="m", max_tokens=5, messages=MESSAGES)
    convert = stock_of("to_chat_completion_request").__func__
    made = convert(AnthropicServingMessages, request)
    assert (made.add_generation_prompt, made.continue_final_message) == (True, False)


def test_uvicorn_sends_chunks_whatever_the_version() -> None:
    written: list[bytes] = []
    cycle = RequestResponseCycle(
        scope={"type": "http", "method": "GET", "http_version": "1.0", "path": "/"},
        transport=SimpleNamespace(write=written.append, is_closing=lambda: False),
        flow=SimpleNamespace(write_paused=False),
        logger=None,
        access_logger=None,
        access_log=False,
        default_headers=[],
        message_event=asyncio.Event(),
        expect_100_continue=False,
        keep_alive=False,
        on_response=lambda: None,
    )
    asyncio.run(cycle.send({"type": "http.response.start", "status": 200}))
    assert b"transfer-encoding: chunked" in b"".join(written)
