"""An unguided vLLM in the environment where the plugin is installed: nothing of it is replaced."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tests.engine.engines import ENVIRONMENT
from tests.engine.oracle import PROMPTS, Oracle
from tests.support.quick_starts import python_path

PROGRAM = """
import inspect, json, sys
from cfg_core.patching import applied
from cfg_core.vllm_plugin import vllm_patches
from deployments import serve_patches
from tests.engine.engines import Engine, plain, tokens

rows = [*vllm_patches.PATCHES, *serve_patches.PATCHES]
found = lambda: [inspect.getattr_static(row.owner, row.attribute, None) for row in rows]
before = found()
engine = Engine(sys.argv[1], guided=False)
prompts = json.loads(sys.argv[2])
got = tokens(engine.generate(prompts, [plain() for _ in prompts]))
replaced = [row.target for row, was, is_ in zip(rows, before, found()) if was is not is_]

worker = engine.core.model_executor.driver_worker.worker
runner = worker.model_runner
frontend = engine.llm.llm_engine
objects = [engine.scheduler, engine.scheduler.kv_cache_manager, engine.core.model_executor, worker]
objects += [runner, runner.sampler, frontend.input_processor, frontend.output_processor]
# A class of ours, or a function of ours set on one object
ours = [type(o).__qualname__ for o in objects if not type(o).__module__.startswith("vllm.")]
ours += [f"{type(o).__qualname__}.{name}" for o in objects for name, value in vars(o).items()
         if getattr(value, "__module__", None) and value.__module__.startswith("cfg_core")]
engine.close()
print(json.dumps([len(rows), replaced, [*applied()], ours, got]))
"""


def test_an_unguided_engine_runs_what_vllm_ships(
    model_folder: Callable[[str], Path], llama: Oracle
) -> None:
    """A process of its own, because the tests' process has run guided engines."""
    prompts = json.dumps([list(prompt) for prompt in PROMPTS[:2]])
    command = [sys.executable, "-c", PROGRAM, str(model_folder("llama")), prompts]
    env = {**os.environ, **ENVIRONMENT, "PYTHONPATH": python_path(Path(__file__).parents[2])}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    num_rows, replaced, applied, ours, got = json.loads(done.stdout.splitlines()[-1])
    assert num_rows > 10
    assert (replaced, applied, ours) == ([], [], [])
    assert got == [plain[: len(tokens)] for plain, tokens in zip(llama.plain, got, strict=False)]
    assert all(got)
