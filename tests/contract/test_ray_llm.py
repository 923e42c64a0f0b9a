"""Ray Serve LLM with the installed vLLM, which is newer than the one that Ray pins.

What Ray's code imports from vLLM exists, but for `ray_names.BROKEN`. What the plugin takes for
granted about processes that others start holds.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray.llm
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest

from cfg_core.errors import EngineError
from cfg_core.vllm_plugin import SCHEDULER, guided_engine_args
from cfg_core.vllm_plugin.processes import TravellingOptions
from deployments.ray_llm import ray_names
from deployments.ray_llm.engine import GuidedVLLMEngine
from deployments.ray_llm.ray_names import VLLMEngine
from tests.contract.syntax import calls
from tests.support.warm_process import WarmProcess

FOLDERS = ("serve", "batch", "common")


def imports_of_vllm() -> Iterator[tuple[str, str | None]]:
    """The modules of vLLM that Ray's code imports, each with a name in it or None."""
    root = Path(ray.llm.__path__[0]) / "_internal"
    for path in (file for folder in FOLDERS for file in (root / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm"):
                yield from ((str(node.module), alias.name) for alias in node.names)
            elif isinstance(node, ast.Import):
                yield from ((a.name, None) for a in node.names if a.name.startswith("vllm"))


def is_missing(module: str, name: str | None) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # openai.api_server: still there
            found = importlib.import_module(module)
            if name is not None and not hasattr(found, name):
                importlib.import_module(f"{module}.{name}")
    except ImportError:
        return True
    return False


def test_every_name_of_vllm_that_ray_imports_exists() -> None:
    imports = set(imports_of_vllm())
    assert len(imports) > 20
    broken = {f"{module}:{name}" for module, name in imports if is_missing(module, name)}
    assert broken == ray_names.BROKEN


def test_rays_requests_and_answers_keep_fields_that_they_do_not_know() -> None:
    for kind, stock in (
        (ray_names.ChatCompletionRequest, ChatCompletionRequest),
        (ray_names.CompletionRequest, CompletionRequest),
    ):
        assert issubclass(kind, stock)
        assert kind.model_config["extra"] == "allow"
    for answer in (ray_names.ChatCompletionResponse, ray_names.CompletionResponse):
        assert answer.model_config["extra"] == "allow"


def test_vllm_loads_plugins_while_it_makes_engine_arguments() -> None:
    """`register` finds them among its callers."""
    written = [ast.unparse(node.func) for node in calls(EngineArgs.__post_init__)]
    assert "load_general_plugins" in written
    assert "scheduler_cls" in inspect.signature(EngineArgs).parameters


PROGRAM = """
import sys
{first}
from cfg_core.patching import applied
from vllm.engine.arg_utils import EngineArgs
{then}
print(len(applied()))
"""
MAKES = "args = EngineArgs(model='models/stories', {arguments})"
RECEIVES = "import pickle; pickle.loads(bytes.fromhex('{sent}'))"


def num_applied(process: WarmProcess, first: str = "", then: str = "") -> int:
    """How many patches a new process has after these lines."""
    return int(process.run(PROGRAM.format(first=first, then=then)).split()[-1])


@pytest.mark.parametrize(
    ("then", "touched"),
    [
        (MAKES.format(arguments=""), False),
        (MAKES.format(arguments="scheduler_cls='vllm.v1.core.sched.scheduler.Scheduler'"), False),
        (MAKES.format(arguments=f"scheduler_cls={SCHEDULER!r}"), True),
    ],
)
def test_a_process_is_patched_by_the_engine_arguments_that_it_makes(
    warm_process: WarmProcess, then: str, touched: bool
) -> None:
    assert num_applied(warm_process, then=then) == (8 if touched else 0)


def test_a_process_is_patched_by_the_engine_arguments_that_it_gets(
    warm_process: WarmProcess,
) -> None:
    """However they were made: as a mapping, or by hand as EngineArgs."""
    sent = pickle.dumps(guided_engine_args()).hex()
    assert num_applied(warm_process, first=RECEIVES.format(sent=sent)) == 8
    made = EngineArgs(model="models/stories", scheduler_cls=SCHEDULER)
    plain = pickle.dumps(EngineArgs(model="models/stories")).hex()
    assert num_applied(warm_process, first=RECEIVES.format(sent=plain)) == 0
    assert made.scheduler_cls == SCHEDULER


def test_options_stay_a_mapping_on_the_way() -> None:
    args = guided_engine_args(kv_split="even")
    again = pickle.loads(pickle.dumps(args))
    assert again == args
    assert type(again["additional_config"]["cfg_serve"]) is TravellingOptions
    config = EngineArgs(model="models/stories", **args).create_engine_config()
    assert type(config.additional_config["cfg_serve"]) is TravellingOptions


async def test_the_engines_process_is_told_its_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside another cluster of the machine, it would take either of them."""
    named: list[str] = []

    async def start(self: VLLMEngine) -> None:
        named.append(os.environ["RAY_ADDRESS"])
        raise EngineError("far enough")

    context = SimpleNamespace(gcs_address="10.0.0.1:6379")
    monkeypatch.setenv("RAY_ADDRESS", "")
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(VLLMEngine, "start", start)
    with pytest.raises(EngineError, match="far enough"):
        await GuidedVLLMEngine.__new__(GuidedVLLMEngine).start()
    assert named == [context.gcs_address]
