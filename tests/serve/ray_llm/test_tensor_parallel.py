"""Two tensor-parallel workers as actors of Ray, as Ray Serve LLM has them on GPUs, on CPUs.

tests/support/ray_cpu reports CPUs as Ray's "GPU" (tests/serve/tensor_parallel says more). On GPUs,
Ray makes the engine's configuration in a task, and the replica gets it pickled: this is the only
test in which a replica makes no EngineArgs of its own.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from cfg_core.reference import guided_generate
from cfg_core.vllm_plugin import SCHEDULER, WORKER
from tests.serve.ray_llm.bodies import GUIDANCE, OPTIONS, PROMPTS, SEA, answer, in_xargs, streamed
from tests.serve.ray_llm.process import IMPORT_PATH, RayLlmProcess, llm_config
from tests.support.quick_starts import python_path
from tools.serving.process import REPOSITORY, Json

pytestmark = [pytest.mark.slow, pytest.mark.survey, pytest.mark.timeout(900)]

PLATFORM = REPOSITORY / "tests" / "support" / "ray_cpu"
STORIES = REPOSITORY / "models" / "stories"
BY_HAND: Json = {"scheduler_cls": SCHEDULER, "worker_cls": WORKER}


@pytest.fixture(
    scope="module",
    params=[IMPORT_PATH, "ray.serve.llm:build_openai_app"],
)
def server(request: pytest.FixtureRequest) -> Iterator[RayLlmProcess]:
    """Ours, and Ray's own builder with engine arguments that were written by hand."""
    is_ours = request.param == IMPORT_PATH
    config = llm_config(
        "stories", str(STORIES), tensor_parallel_size=2, **({} if is_ours else BY_HAND)
    )
    del config["accelerator_config"]
    env = {"PYTHONPATH": python_path(REPOSITORY, PLATFORM)}
    resources = {"CPU": 8, "GPU": 2}
    with RayLlmProcess(config, import_path=request.param, env=env, resources=resources) as process:
        yield process


def test_texts_are_those_of_the_reference(server: RayLlmProcess) -> None:
    commands = [" ".join(process.cmdline()) for process in server.processes()]
    assert sum("RayWorkerProc" in command for command in commands) == 2, commands
    model = AutoModelForCausalLM.from_pretrained(STORIES, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(STORIES)
    negative = tokenizer.encode(SEA)
    for prompt in PROMPTS[:4]:
        want = guided_generate(
            model, tokenizer.encode(prompt), negative, scale=3.0, max_new_tokens=24
        )
        assert min(want.gaps) > 1e-4
        text = tokenizer.decode(want.token_ids)
        body = {**OPTIONS, "prompt": prompt, "ignore_eos": True, **GUIDANCE[0]}
        assert answer(server.url, in_xargs(body))[0] == text
        if server.is_ours:
            assert answer(server.url, body)[0] == text
            assert streamed(server.url, body)[0] == text
