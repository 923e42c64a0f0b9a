"""Trials of grammars in a process that can be killed.

Tested are the verdicts, the deadline, fairness, and that nothing is left behind.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import re
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from cfg_core.errors import OverloadedError, RequestError
from cfg_core.grammars.trials import GrammarLimits

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]
HERE = Path(__file__).resolve().parent
LIMITS = GrammarLimits(cpu_s=1.5, json_whitespace=None)
SOON_S = 6.0
"""Seconds within which each of these grammars has its verdict."""
REFUSED_S = 30.0
"""The same for what is refused, because a trial ends by the CPU time that it took."""
SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}}


@pytest.fixture(scope="module")
async def sandbox(model_folder: Callable[[str], Path]) -> AsyncIterator[Any]:
    from cfg_core.vllm_plugin.frontend.grammar_sandbox import GrammarSandbox

    OTHERS.update(psutil.Process().children(recursive=True))
    sandbox = GrammarSandbox(config_of(model_folder("llama")), limits=LIMITS)
    await sandbox.start()
    yield sandbox
    sandbox.close()
    await until(lambda: not children(recursive=True))


OTHERS: set[psutil.Process] = set()
"""Processes that modules before this one have left, such as Python's resource tracker."""


def children(recursive: bool = False) -> list[psutil.Process]:
    """The processes of this module's sandboxes."""
    return [p for p in psutil.Process().children(recursive) if p not in OTHERS]


def config_of(folder: Path) -> Any:
    """The part of a VllmConfig that the sandbox reads."""
    from vllm.config.structured_outputs import StructuredOutputsConfig

    vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
    model = SimpleNamespace(
        model=str(folder),
        tokenizer=str(folder),
        runner_type="generate",
        tokenizer_mode="auto",
        tokenizer_revision=None,
        trust_remote_code=False,
        code_revision=None,
        skip_tokenizer_init=False,
        is_diffusion=False,
        hf_config=SimpleNamespace(model_type="llama"),
        get_vocab_size=lambda: vocab_size,
    )
    return SimpleNamespace(
        model_config=model,
        structured_outputs_config=StructuredOutputsConfig(),
        speculative_config=None,
        additional_config={},
    )


async def until(holds: Callable[[], bool], seconds: float = 10) -> None:
    async with asyncio.timeout(seconds):
        while not holds():  # noqa: ASYNC110 - processes set no events
            await asyncio.sleep(0.05)


def params_of(fields: dict[str, Any], **options: Any) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    return SamplingParams(structured_outputs=StructuredOutputsParams(**fields), **options)


def slow_schema(i: int = 0) -> dict[str, Any]:
    """A schema that xgrammar compiles in more than ten seconds. Each `i` gives another one."""
    pattern = "^([a-z]{1,50}){1,50}$"
    return {
        "type": "object",
        "properties": {f"p{i}_{k}": {"type": "string", "pattern": pattern} for k in range(150)},
    }


def slow(i: int = 0) -> dict[str, Any]:
    """A grammar that takes more than ten seconds to compile, and that only xgrammar can have."""
    schema = {"type": "json_schema", "json_schema": slow_schema(i), "any_order": True}
    return {"structural_tag": json.dumps({"type": "structural_tag", "format": schema})}


async def test_the_compiler_that_takes_a_costly_grammar_has_the_whole_limit(
    sandbox: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a slow machine, 128 tools at a vocabulary of 152k took llguidance more than a second."""
    tried: list[tuple[str | None, float]] = []

    async def attempt(request: Any, compiler: str | None, cpu_s: float) -> dict[str, Any]:
        tried.append((compiler, cpu_s))
        return {"refused": "It is costly.", "costly": compiler is None}

    monkeypatch.setattr(sandbox, "_try", attempt)
    await sandbox._tried({})
    assert tried == [(None, 1.0), ("guidance", LIMITS.cpu_s)]


def forks() -> int:
    """The number of trials that run now.

    Not counted are the helper itself and the fork that waits in advance.
    """
    return max(0, len(children(recursive=True)) - 2)


ACCEPTED = [
    ({"choice": [f"label {i}" for i in range(2000)]}, "xgrammar"),
    ({"json": SCHEMA}, "xgrammar"),
    ({"json": json.dumps(SCHEMA)}, "xgrammar"),
    (
        {
            "json": {
                "type": "object",
                "properties": {f"p{i}": {"type": "string"} for i in range(1000)},
            }
        },
        "xgrammar",
    ),
    ({"json": {"type": "number", "multipleOf": 3}}, "guidance"),
    ({"regex": "a{1,100000}"}, "xgrammar"),
    ({"regex": "(a+)+b"}, "xgrammar"),
    ({"grammar": 'root ::= root "a" | "a"'}, "xgrammar"),
    ({"grammar": 'start: "a" | "b" start'}, "xgrammar"),
    ({"json_object": True}, "xgrammar"),
]


@pytest.mark.parametrize(("fields", "backend"), ACCEPTED, ids=lambda value: repr(value)[:40])
async def test_an_accepted_grammar_is_as_vllms_own_validation_leaves_it(
    sandbox: Any, fields: Any, backend: str
) -> None:
    """Each field has the value that vLLM's own validation would have left."""
    params, stock = params_of(fields), params_of(fields)
    await sandbox.check(params)
    config = sandbox_config(sandbox)
    stock._validate_structured_outputs(
        config.model_config, config.structured_outputs_config, config.tokenizer
    )
    assert plain(params.structured_outputs) == plain(stock.structured_outputs)
    assert params.structured_outputs._backend == stock.structured_outputs._backend == backend
    assert params.structured_outputs._backend_was_auto == stock.structured_outputs._backend_was_auto


def plain(outputs: Any) -> dict[str, Any]:
    """The fields of StructuredOutputsParams, with the schema parsed."""
    fields = dataclasses.asdict(outputs)
    return fields | ({"json": json.loads(fields["json"])} if isinstance(outputs.json, str) else {})


def sandbox_config(sandbox: Any) -> Any:
    from vllm.tokenizers import cached_get_tokenizer

    settings = sandbox._settings
    model = SimpleNamespace(is_diffusion=False)
    return SimpleNamespace(
        model_config=model,
        structured_outputs_config=settings["outputs"],
        tokenizer=cached_get_tokenizer(settings["model"]["tokenizer"]),
    )


REFUSED = [
    ({"grammar": "root ::= root"}, "allows no token"),
    (
        {
            "json": {
                "$ref": "#/$defs/a",
                "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
            }
        },
        "no token",
    ),
    ({"regex": r"[^\s\S]"}, "allows no token"),
    ({"regex": "(?=a)b"}, "cannot be used"),
    ({"grammar": "root ::= nope"}, "cannot be used"),
    ({"json": {"enum": []}}, "cannot be used"),
    ({"regex": "(((a{0,1000}){0,1000}){0,1000}){0,1000}"}, "too slow|too long|too complex"),
    (slow(), "too long to compile"),
    ({"choice": ["x"] * 100_000}, "100000 entries"),
    ({"json": SCHEMA, "whitespace_pattern": " " * 300}, "more than 200 characters"),
]


@pytest.mark.parametrize(("fields", "words"), REFUSED, ids=lambda value: repr(value)[:40])
async def test_grammars_that_cannot_be_served_are_refused_with_the_reason(
    sandbox: Any, fields: Any, words: str
) -> None:
    started = time.monotonic()
    with pytest.raises(RequestError, match=words) as refusal:
        await sandbox.check(params_of(fields))
    assert refusal.value.param == "structured_outputs"
    assert time.monotonic() - started < REFUSED_S
    started = time.monotonic()
    with pytest.raises(RequestError, match=words):
        await sandbox.check(params_of(fields))
    assert time.monotonic() - started < 0.1  # remembered


COSTLY = {
    "properties with patterns": slow_schema(),
    "long texts": {
        "type": "object",
        "properties": {f"t{i}": {"type": "string", "maxLength": 3000 + i} for i in range(60)},
    },
    "400 properties": {  # llguidance gives up 500 at the first token
        "type": "object",
        "properties": {f"p{i}": {"type": "string", "maxLength": 900 + i} for i in range(400)},
    },
}


@pytest.mark.parametrize("name", COSTLY)
@pytest.mark.parametrize("kind", ["schema", "tool"])
async def test_what_costs_xgrammar_too_much_gets_to_llguidance(
    sandbox: Any, name: str, kind: str
) -> None:
    """The schema, and a tool with it. In vLLM alone, each takes seconds or minutes."""
    fields = (
        {"json": COSTLY[name]} if kind == "schema" else {"structural_tag": tag_of(COSTLY[name])}
    )
    params, started = params_of(fields), time.monotonic()
    await sandbox.check(params)
    assert time.monotonic() - started < SOON_S
    outputs = params.structured_outputs
    assert (outputs._backend, outputs._backend_was_auto) == ("guidance", True)
    assert outputs.structural_tag is None
    assert '"additionalProperties": false' in (outputs.json or outputs.grammar)


def tag_of(schema: dict[str, Any], name: str = "f") -> str:
    """The structural tag that vLLM makes of a tool."""
    content = {"type": "json_schema", "json_schema": schema}
    begin = f'<tool_call>{{"name": "{name}", "arguments": '
    tag = {"type": "tag", "begin": begin, "content": content, "end": "}</tool_call>"}
    tools = {"type": "triggered_tags", "triggers": ["<tool_call>"], "tags": [tag]}
    return json.dumps({"type": "structural_tag", "format": tools})


async def test_what_llguidance_gives_up_gets_to_xgrammar(
    sandbox: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llguidance compiles 1,000 properties, and stops at the first token ("2000 items").

    On a slow machine, xgrammar needs more than its first second for them.
    """
    properties = {f"p{i}": {"type": "string"} for i in range(1000)}
    outputs = {"json": json.dumps({"type": "object", "properties": properties})}
    request = {"outputs": outputs, "allowed": None, "mask_ms": LIMITS.mask_ms}
    given_up = await sandbox._try(request, "guidance", 10.0)
    assert "gave up at step 1" in given_up["refused"]
    assert given_up["costly"]

    from cfg_core.vllm_plugin.frontend import grammar_sandbox

    monkeypatch.setattr(grammar_sandbox, "FIRST_CPU_S", 0.05)
    monkeypatch.setattr(sandbox, "_limits", dataclasses.replace(LIMITS, cpu_s=12.0))
    assert (await sandbox._tried(request))["backend"] == "xgrammar"


async def test_the_order_of_keys_makes_no_second_trial(sandbox: Any) -> None:
    tried = len(sandbox._verdicts._kept)
    schema = {"type": "object", "required": ["b"], "properties": {"b": {"type": "string"}, "a": {}}}
    turned = {key: schema[key] for key in reversed(schema)}
    outputs = []
    for order in (schema, turned):
        params = params_of({"structural_tag": tag_of(order)})
        await sandbox.check(params)
        outputs.append(params.structured_outputs.structural_tag)
    assert len(sandbox._verdicts._kept) == tried + 1
    assert outputs[0] == outputs[1]  # so the engine core compiles it once, too
    assert outputs[0].index('"b"') < outputs[0].index('"a"')  # answers have them in this order


async def test_a_busy_machine_refuses_nothing_for_good(
    model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trial that its deadline ends says nothing about the grammar: 429, and not remembered."""
    from cfg_core.vllm_plugin.frontend import helper_process
    from cfg_core.vllm_plugin.frontend.grammar_sandbox import GrammarSandbox

    monkeypatch.setattr(helper_process, "WALL_S", 0.3)
    limits = GrammarLimits(cpu_s=5)
    sandbox = GrammarSandbox(config_of(model_folder("llama")), limits=limits)
    await sandbox.start()
    with pytest.raises(OverloadedError, match="busy"):
        await sandbox.check(params_of(slow(300)))
    assert not sandbox._verdicts._kept
    sandbox.close()


INVALID = [
    {"regex": "("},
    {"regex": "a{2,1}"},
    {"json": {"type": "any"}},
    {"json": {"$ref": "#/nowhere"}},
    {"json": {"type": "integer", "minimum": 5, "maximum": 1}},
    {"json": {"type": "string", "pattern": r"\bfoo\b"}},
    {"grammar": "root ::= ("},
    {"grammar": "start: nothing\n"},
    {"structural_tag": tag_of({"type": "any"})},
    {"structural_tag": tag_of({"type": "string", "pattern": r"\bfoo\b"})},
    {"structural_tag": '{"type": "structural_tag", "format": {"type": "nope"}}'},
    {"structural_tag": '{"structures": 3}'},
]


@pytest.mark.parametrize("fields", INVALID, ids=repr)
async def test_no_internals_of_a_compiler_reach_a_client(sandbox: Any, fields: Any) -> None:
    with pytest.raises(RequestError) as refusal:
        await sandbox.check(params_of(fields))
    said = str(refusal.value)
    assert not re.search(
        r"\.(cc|rs|py|h):\d|/project|Check failed|triggers|\d\d:\d\d:\d\d|\(\d+\):", said
    )
    assert said.endswith(".") or len(said.split()) > 6


async def test_what_xgrammar_reads_and_cannot_compile_is_served(sandbox: Any) -> None:
    """A fault of xgrammar: vLLM's validation passes it, and its engine core fails."""
    schema = {
        "type": "object",
        "properties": {"a": {"type": "string", "pattern": "^[a-z]{1,255}$"}},
    }
    params = params_of({"json": schema})
    await sandbox.check(params)
    assert params.structured_outputs._backend == "guidance"


async def test_a_reason_does_not_repeat_the_pattern(sandbox: Any) -> None:
    secret = "velvet marmalade number seven"
    with pytest.raises(RequestError) as refusal:
        await sandbox.check(params_of({"regex": f"(?={secret}){secret}(?!x)"}))
    assert secret not in str(refusal.value)


async def test_allowed_tokens_that_the_grammar_forbids_are_refused(sandbox: Any) -> None:
    with pytest.raises(RequestError, match="none of allowed_token_ids"):
        await sandbox.check(params_of({"regex": "[0-9]{3}"}, allowed_token_ids=[100, 101]))


async def test_other_tenants_and_the_event_loop_do_not_wait_for_a_flooding_tenant(
    sandbox: Any,
) -> None:
    flood = [asyncio.create_task(sandbox.check(params_of(slow(i)), "evil")) for i in range(1, 7)]
    await until(lambda: forks() >= LIMITS.places - 1)
    waits, gaps = [], []
    for i in range(8):
        started = last = time.monotonic()
        check = asyncio.create_task(
            sandbox.check(params_of({"choice": [f"fine {i}", "b"]}), "good")
        )
        while not check.done():
            await asyncio.sleep(0.005)
            last, gap = time.monotonic(), time.monotonic() - last
            gaps.append(gap)
        await check
        waits.append(time.monotonic() - started)
    assert max(waits) < 1.5
    assert max(gaps) < 0.5
    for task in flood:
        task.cancel()
    assert all(
        isinstance(e, asyncio.CancelledError)
        for e in await asyncio.gather(*flood, return_exceptions=True)
    )
    await until(lambda: forks() == 0)  # a cancelled trial is killed


async def test_too_many_waiting_grammars_get_a_429(sandbox: Any) -> None:
    waiting = sandbox._places._max_waiting
    flood = [
        asyncio.create_task(sandbox.check(params_of(slow(100 + i)), "evil"))
        for i in range(waiting + 2)
    ]
    await asyncio.sleep(0.3)
    with pytest.raises(OverloadedError):
        await sandbox.check(params_of({"choice": ["not seen before"]}), "evil")
    for task in flood:
        task.cancel()
    await asyncio.gather(*flood, return_exceptions=True)
    await until(lambda: forks() == 0)


async def test_a_killed_fork_refuses_its_grammar_and_a_killed_helper_is_replaced(
    sandbox: Any,
) -> None:
    check = asyncio.create_task(sandbox.check(params_of(slow(200))))
    await until(lambda: forks() >= 1)
    (helper,) = children()
    for fork in helper.children():  # including the one that waits in advance
        fork.send_signal(signal.SIGABRT)  # Rust ignores the first SIGSEGV that a process sends
    with pytest.raises(RequestError, match="ran out of memory or stack"):
        await check
    helper.kill()
    await sandbox.check(params_of({"choice": ["after", "the", "end"]}))
    (replaced,) = children()
    assert replaced.pid != helper.pid


async def test_the_helper_is_loaded_in_advance_and_stays(
    model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from cfg_core.vllm_plugin.frontend import helper_process
    from cfg_core.vllm_plugin.frontend.grammar_sandbox import GrammarSandbox

    monkeypatch.setattr(helper_process, "IDLE_S", 0.1)
    before = set(psutil.Process().children())
    sandbox = GrammarSandbox(config_of(model_folder("llama")))
    sandbox.begin()
    await until(lambda: bool(set(psutil.Process().children()) - before))
    (helper,) = set(psutil.Process().children()) - before
    await sandbox.start()
    await asyncio.sleep(0.5)
    await sandbox.check(params_of({"choice": ["still", "here"]}))
    assert helper.is_running()
    sandbox.close()
    await until(lambda: not helper.is_running())


async def test_the_helper_ends_when_idle_and_with_its_parent(
    model_folder: Callable[[str], Path],
) -> None:
    """A separate program starts a helper, and is killed."""
    program = (
        "import asyncio, sys, time\nfrom pathlib import Path; from"
        " tests.engine.test_grammar_sandbox import config_of\nfrom cfg_core.grammars.trials import"
        " GrammarLimits\nfrom cfg_core.vllm_plugin.frontend import helper_process\nfrom"
        " cfg_core.vllm_plugin.frontend.grammar_sandbox import GrammarSandbox\nasync def main():\n"
        "    helper_process.IDLE_S = 2.0\n    sandbox ="
        " GrammarSandbox(config_of(Path(sys.argv[1])), limits=GrammarLimits(at_start=False))\n"
        "    await sandbox.start(); print('ready', flush=True); await"
        " asyncio.sleep(1.0)\n    process = sandbox._process._process; print(process.pid,"
        " flush=True)\n    await asyncio.sleep(8); print('idle', process.returncode, flush=True);"
        " await sandbox.start()\n    print(sandbox._process._process.pid, flush=True); await"
        " asyncio.sleep(100)\nasyncio.run(main())\n"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        program,
        str(model_folder("llama")),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(HERE.parents[1])},
    )
    assert process.stdout is not None
    lines = []
    async with asyncio.timeout(150):
        for _ in range(4):
            lines.append((await process.stdout.readline()).decode().strip())
    assert lines[0] == "ready"
    assert lines[2].startswith("idle -9")
    assert not psutil.pid_exists(int(lines[1]))
    assert psutil.pid_exists(int(lines[3]))
    process.kill()
    await process.wait()
    await until(lambda: not psutil.pid_exists(int(lines[3])))
