"""Grammars in the engine core.

Which backend compiles them, what an aborted or failed one leaves behind, and how failures are
reported.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from cfg_core.errors import REQUEST_FAULT
from tests.engine.engines import Engine, plain

pytestmark = pytest.mark.slow
MULTIPLES = {"type": "number", "multipleOf": 2}
"""xgrammar refuses it; under `auto` llguidance compiles it."""
SECRET = "velvet_marmalade_7"


@pytest.fixture(scope="module")
def engine(model_folder: Callable[[str], Path]) -> Iterator[Engine]:
    engine = Engine(
        model_folder("llama"), max_model_len=512, num_gpu_blocks_override=256, max_num_seqs=16
    )
    yield engine
    engine.close()


def structured(fields: dict[str, Any], **options: Any) -> Any:
    from vllm.sampling_params import StructuredOutputsParams

    return plain(
        structured_outputs=StructuredOutputsParams(**fields),
        ignore_eos=False,
        **{"max_tokens": 40, **options},
    )


def ask(engine: Engine, fields: dict[str, Any], **options: Any) -> Any:
    (output,) = engine.generate([[5, 6, 7]], [structured(fields, **options)])
    return output.outputs[0]


def reason_of(engine: Engine, fields: dict[str, Any], **options: Any) -> str:
    """The error that a client gets if the engine ends its request."""
    answer = ask(engine, fields, **options)
    assert answer.finish_reason == "error"
    assert isinstance(answer.stop_reason, str)
    return answer.stop_reason


def test_each_request_has_the_backend_that_was_chosen_for_it(engine: Engine) -> None:
    """Stock vLLM compiles all grammars with the backend of its first request."""
    choice = ask(engine, {"choice": ["red", "blue"]})
    assert (choice.text in ("red", "blue"), choice.finish_reason) == (True, "stop")
    number = ask(engine, {"json": MULTIPLES}, logit_bias=None)
    patterns = ask(
        engine, {"json": {"type": "object", "patternProperties": {"^a$": {"type": "boolean"}}}}
    )
    assert number.finish_reason in ("stop", "length")
    assert float(number.text) % 2 == 0 if number.finish_reason == "stop" else True
    assert patterns.finish_reason in ("stop", "length")
    manager = engine.scheduler.structured_output_manager
    assert {"xgrammar", "guidance"} <= set(manager._backends._made)


def digits_of(engine: Engine) -> list[int]:
    tokenizer = engine.llm.get_tokenizer()
    return [
        token for token in range(len(tokenizer)) if re.fullmatch("[0-9]", tokenizer.decode([token]))
    ]


def test_allowed_tokens_within_a_grammar_are_served_to_its_end(engine: Engine) -> None:
    """vLLM's mask of allowed tokens forbids the tokens that end a text.

    Without our change, the request failed where the grammar requires the end.
    """
    digits = digits_of(engine)
    answer = ask(engine, {"regex": "[0-9a-f]{3}"}, allowed_token_ids=digits)
    assert (answer.finish_reason, re.fullmatch("[0-9]{3}", answer.text) is not None) == (
        "stop",
        True,
    )


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 1.0, "top_p": 0.5, "top_k": 5}], ids=["greedy", "sampled"]
)
def test_a_text_without_any_allowed_token_is_reported(
    engine: Engine, options: dict[str, Any]
) -> None:
    """After two digits, neither of the two masks is empty, but together they allow no token.

    The other requests of the batch continue.
    """
    digits = digits_of(engine)
    params = [
        structured({"regex": "[0-9]{2}[x-z]"}, allowed_token_ids=digits, **options),
        plain(max_tokens=5),
    ]
    broken, fine = engine.generate([[5, 6, 7], [5, 6, 7]], params)
    told = broken.outputs[0].stop_reason
    assert broken.outputs[0].finish_reason == "error"
    assert told.startswith(REQUEST_FAULT)
    assert "allowed_token_ids" in told
    assert len(fine.outputs[0].token_ids) == 5


@pytest.mark.parametrize("grammar", ["root ::= root", "root ::= a\na ::= root"])
def test_a_grammar_that_no_text_matches_is_reported(engine: Engine, grammar: str) -> None:
    assert reason_of(engine, {"grammar": grammar}).startswith(REQUEST_FAULT)


def test_a_grammar_that_becomes_slow_ends_its_request(engine: Engine) -> None:
    """The grammar is ambiguous, and its cost grows with the cube of the length.

    It passes any short trial.
    """
    letter = engine.llm.get_tokenizer().encode("a", add_special_tokens=False)[-1]
    started = time.monotonic()
    told = reason_of(
        engine,
        {"grammar": 'root ::= (root root root root)? "a"?'},
        logit_bias={letter: 100.0},
        max_tokens=400,
    )
    assert "too slow" in told
    assert time.monotonic() - started < 60


def test_a_grammar_that_llguidance_gives_up_ends_its_request(engine: Engine) -> None:
    """Stock vLLM lets the text end there, without a word."""
    nested = {"type": "string", "pattern": "^([a-z]{1,100}){1,100}$", "maxLength": 9000}
    letter = engine.llm.get_tokenizer().encode("a", add_special_tokens=False)[-1]
    told = reason_of(engine, {"json": nested}, logit_bias={letter: 100.0}, max_tokens=400)
    assert told.startswith(REQUEST_FAULT)
    assert "too complex" in told


def test_a_failed_compilation_ends_one_request_and_names_no_pattern(
    engine: Engine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(engine, {"choice": ["red"]})
    backend = engine.scheduler.structured_output_manager._backends.get("xgrammar")
    logging.getLogger("vllm").propagate = True

    def compile_grammar(kind: Any, spec: str, stop_token_ids: Any = None) -> Any:
        raise ValueError(f"cannot read {spec}")

    monkeypatch.setattr(backend, "compile_grammar", compile_grammar)
    with caplog.at_level(logging.DEBUG):
        told = reason_of(engine, {"regex": SECRET})
    assert told.startswith(REQUEST_FAULT)
    assert SECRET not in told
    assert SECRET not in caplog.text


def test_slow_compilations_do_not_delay_others_and_aborted_ones_leave_the_queue(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(engine, {"choice": ["red"]})
    manager = engine.scheduler.structured_output_manager
    backend, release = manager._backends.get("xgrammar"), threading.Event()
    original, begun = backend.compile_grammar, []

    def compile_grammar(kind: Any, spec: str, stop_token_ids: Any = None) -> Any:
        if "slow" in spec:
            begun.append(spec)
            release.wait(30)
        return original(kind, spec, stop_token_ids=stop_token_ids)

    monkeypatch.setattr(backend, "compile_grammar", compile_grammar)
    llm = engine.llm.llm_engine
    try:
        for i in range(3):
            llm.add_request(
                f"slow{i}", {"prompt_token_ids": [5, 6]}, structured({"regex": f"slow{i}"})
            )
        llm.add_request("quick", {"prompt_token_ids": [5, 6]}, structured({"choice": ["red"]}))
        assert finished(llm, "quick") == "stop"  # four threads at least
        for i in range(3, 12):
            llm.add_request(
                f"slow{i}", {"prompt_token_ids": [5, 6]}, structured({"regex": f"slow{i}"})
            )
        futures = [r.structured_output_request._grammar for r in engine.scheduler.requests.values()]
        llm.abort_request([f"slow{i}" for i in range(12)])
        llm.step()
        assert all(isinstance(future, Future) for future in futures)
        assert (
            sum(future.cancelled() for future in futures)
            >= len(futures) - manager.executor._max_workers
        )
        assert manager.executor._work_queue.qsize() == 0 or all(
            f.done() or f.running() for f in futures
        )
    finally:
        release.set()
    deadline = time.monotonic() + 20
    while llm.has_unfinished_requests() and time.monotonic() < deadline:
        llm.step()
    assert len(begun) <= manager.executor._max_workers
    engine.assert_idle()


def finished(llm: Any, request_id: str) -> str | None:
    """The finish reason of a request, within half a minute."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        for output in llm.step():
            if output.request_id == request_id and output.finished:
                return str(output.outputs[0].finish_reason)
    return None


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"choice": ["x"] * 100_000}, "100000 entries"),
        ({"json": {"enum": [str(i) for i in range(100_000)]}}, "entries in one"),
        (
            {"json": {"type": "object", "properties": {f"p{i}": {} for i in range(20_000)}}},
            "properties",
        ),
        ({"regex": "a" * 10**6}, "characters"),
        ({"grammar": "root ::= " + "(" * 5000 + '"a"' + ")" * 5000}, "levels"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_sizes_beyond_the_bounds_are_refused_at_once(
    engine: Engine, fields: dict[str, Any], words: str
) -> None:
    started = time.monotonic()
    with pytest.raises(ValueError, match=words):
        engine.generate([[5, 6, 7]], [structured(fields)])
    assert time.monotonic() - started < 2


SECTION = {"logits_processors": [{"name": "section_budget", "max_tokens": 1, "end": "b"}]}
GATE = {"logits_processors": [{"name": "vocabulary_gate", "characters": "a-z"}]}


@pytest.mark.parametrize(
    "options",
    [{"fields": {"choice": ["red"]}}, {"allowed_token_ids": [20, 21, 22]}],
    ids=["grammar", "allowed_token_ids"],
)
def test_a_forcing_processor_is_refused_where_a_mask_may_forbid_its_tokens(
    engine: Engine, options: dict[str, Any]
) -> None:
    fields = options.pop("fields", None)
    params = (
        structured(fields, extra_args=SECTION) if fields else plain(extra_args=SECTION, **options)
    )
    with pytest.raises(ValueError, match="section_budget forces tokens"):
        engine.generate([[5, 6, 7]], [params])


def test_a_forcing_processor_is_served_where_all_its_tokens_are_allowed(engine: Engine) -> None:
    end = engine.llm.get_tokenizer().encode("b", add_special_tokens=False)
    params = plain(extra_args=SECTION, allowed_token_ids=[*end, 20, 21], max_tokens=2 + len(end))
    (output,) = engine.generate([[5, 6, 7]], [params])
    assert list(output.outputs[0].token_ids[1 : 1 + len(end)]) == end


def test_a_processor_that_contradicts_a_mask_is_not_a_fault_of_the_engine(engine: Engine) -> None:
    told = reason_of(engine, {"regex": "[0-9]{4}"}, extra_args=GATE)
    assert told.startswith(REQUEST_FAULT)
    assert "vocabulary_gate" in told
