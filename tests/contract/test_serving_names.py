"""What deployments/ assumes about vLLM, Ray and uvicorn in the pinned versions.

A failure here means that an upgrade changed one of them, and that our code must follow.
"""

import dataclasses
import importlib
import inspect
import json
import os
import subprocess
import sys

import pytest
from transformers import PythonBackend
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.renderers.hf import safe_apply_chat_template

from deployments.generator import replica
from deployments.generator.refusals import validation
from deployments.ingress import serve_queue
from deployments.proxy import http_1_0
from deployments.requests.template_kwargs import TAKEN
from deployments.routing import serve_routers

MODULES = (serve_routers, serve_queue, http_1_0, replica, validation)
NAMES = [
    (path, name) for module in MODULES for path, names in module.PRIVATE.items() for name in names
]


@pytest.mark.parametrize(("path", "name"), NAMES, ids=lambda value: value.split(".")[-1])
def test_private_names_of_ray_and_uvicorn_exist(path, name):
    """Private names that our code looks up by a string at run time.

    test_names.py cannot check them, because our source does not show their class.
    """
    module, cls = path.split(":")
    owner = getattr(importlib.import_module(module), cls)
    fields = inspect.get_annotations(owner)
    assert hasattr(owner, name) or name in fields or f"self.{name} = " in inspect.getsource(owner)


def test_serve_reads_its_settings():
    """Each variable of Serve in configs/serve.env changes the setting of that name.

    Ray's own variable is tested in tests/serve/waits/test_chunks_over_http.py.
    """
    from cfg_serve.home import serve_settings

    settings = {
        name: value for name, value in serve_settings().items() if name.startswith("RAY_SERVE_")
    }
    assert serve_settings().keys() - settings.keys() == {"RAY_worker_niceness"}
    names = [*settings, *(name.removeprefix("RAY_SERVE_") for name in settings)]
    show = (
        "import json; from ray.serve._private import constants as c;"
        f"print(json.dumps([vars(c)[n] for n in {names} if n in vars(c)]))"
    )
    others = {
        name: value for name, value in os.environ.items() if not name.startswith("RAY_SERVE_")
    }
    ours, stock = (
        json.loads(
            subprocess.run(
                [sys.executable, "-c", show], env=env, capture_output=True, check=True
            ).stdout
        )
        for env in (others | settings, others)
    )
    assert [*map(plain, ours)] == [*map(plain, settings.values())]
    assert all(a != b for a, b in zip(ours, stock, strict=True))


def plain(value):
    """A setting as text, or as a number if it is one.

    Serve reads "1" as a number or as true.
    """
    try:
        return float(value)
    except ValueError:
        return value


def test_serves_send_puts_messages_on_a_queue_that_can_be_seen():
    """serve_queue.py relies on this.

    `send` of an ASGI application closes over a MessageQueue of this name.
    """
    from ray.serve._private.http_util import MessageQueue
    from ray.serve._private.replica import UserCallableWrapper

    source = inspect.getsource(UserCallableWrapper.call_http_entrypoint)
    assert f"{serve_queue.QUEUE} = MessageQueue()" in source
    assert f"{serve_queue.QUEUE}.put_nowait(item)" in source
    queue = MessageQueue()
    messages = getattr(queue, serve_queue.MESSAGES)
    queue.put_nowait({"type": "x"})
    assert len(messages) == 1
    queue.get_messages_nowait()
    assert len(messages) == 0


def test_uvicorns_cycle_has_the_fields_that_end_a_stream_by_closing():
    from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

    source = inspect.getsource(RequestResponseCycle)
    assert all(f"self.{name}" in source for name in http_1_0.CYCLE_FIELDS)


def test_the_engine_answers_for_its_scheduler():
    """`VllmServer.stats` asks the engine core for a method that the plugin puts there."""
    from vllm.v1.engine.core import EngineCore

    from cfg_core.vllm_plugin import vllm_patches

    vllm_patches.apply("engine core")
    assert callable(EngineCore.guidance_stats)


def test_engine_options_read_from_source_are_the_real_ones():
    from vllm.engine.arg_utils import AsyncEngineArgs

    from deployments.config.engine_keys import vllm_engine_fields

    fields = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    assert vllm_engine_fields() == {name for name in fields if not name.startswith("_")}


def test_the_frontend_has_its_options():
    from cfg_core.vllm_plugin import versions
    from deployments.config.engine_keys import FRONTEND_KEYS, vllm_engine_fields

    options = versions.chosen().frontend_args({})
    assert {field.name for field in dataclasses.fields(options)} >= FRONTEND_KEYS
    assert FRONTEND_KEYS.isdisjoint(vllm_engine_fields())


@pytest.mark.parametrize("request_cls", [CompletionRequest, ChatCompletionRequest])
def test_no_field_of_vllm_is_taken_for_guidance(request_cls):
    """Otherwise read_guidance would refuse a valid plain request.

    Or vLLM would read one of our fields.
    """
    from cfg_core.params import looks_like_guidance
    from deployments.requests.guidance_fields import near_miss

    assert not [
        name for name in request_cls.model_fields if looks_like_guidance(name) or near_miss(name)
    ]


def test_unknown_fields_pass_vllm_unread():
    """This is why read_guidance refuses unknown fields itself."""
    assert CompletionRequest.model_validate({"prompt": "x", "guidance_scale": 2})


@pytest.mark.parametrize("output", ["completion", "chat"])
def test_chunks_are_written_as_sse_reads_them(output):
    """deployments/generator/answers/sse.py looks for these byte sequences in vLLM's chunks."""
    from vllm.entrypoints.openai.chat_completion import protocol as chat
    from vllm.entrypoints.openai.completion import protocol as completion

    from deployments.generator.answers import sse

    if output == "chat":
        delta = chat.DeltaMessage(content='"finish_reason":"abort"')
        choice = chat.ChatCompletionResponseStreamChoice(index=0, delta=delta, finish_reason=None)
        chunk = chat.ChatCompletionStreamResponse(model="m", choices=[choice])
    else:
        choice = completion.CompletionResponseStreamChoice(
            index=0, text='"finish_reason":"abort"', finish_reason=None
        )
        chunk = completion.CompletionStreamResponse(model="m", choices=[choice])
    assert not sse.may_be_last(chunk.model_dump_json(exclude_unset=True))
    choice.finish_reason = "length"
    assert sse.may_be_last(chunk.model_dump_json(exclude_unset=True))
    chunk.choices = []
    assert sse.may_be_last(chunk.model_dump_json(exclude_unset=True))


def test_all_types_of_parts_are_known():
    """deployments/requests/media_checks.py checks each type that vLLM's parser of chats reads."""
    from vllm.renderers import chat_utils

    from deployments.requests.media_checks import MEDIA_PARTS

    module = chat_utils if hasattr(chat_utils, "MM_PARSER_MAP") else chat_utils.chat_message  # 0.33
    of_text = {"text", "input_text", "output_text", "refusal", "thinking", "tool_reference"}
    assert set(module.MM_PARSER_MAP) - {*of_text, *MEDIA_PARTS} == {"image_pil"}


def test_no_argument_of_a_chat_template_is_forgotten():
    """All other arguments than those that are refused are variables that templates read."""
    found = {
        name
        for function in (safe_apply_chat_template, PythonBackend.apply_chat_template)
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD
    }
    read = {"tools", "documents", "add_generation_prompt", "continue_final_message"}
    assert found - read == TAKEN


def test_loaders_of_videos_ask_for_frames_as_they_are_bounded():
    """deployments/generator/media/videos.py makes a subclass of a loader with these methods."""
    from vllm.multimodal.media import ImageMediaIO, VideoMediaIO
    from vllm.multimodal.video import VIDEO_LOADER_REGISTRY, VideoLoader

    loader = VideoMediaIO(ImageMediaIO()).video_loader
    assert isinstance(loader, VideoLoader)
    assert isinstance(type(loader)(), VideoLoader)
    for name in VIDEO_LOADER_REGISTRY.name2class:
        kind = type(VIDEO_LOADER_REGISTRY.load(name))
        for method in ("compute_frames_index_to_sample", "read_frames", "load_bytes"):
            assert inspect.ismethod(getattr(kind, method)), (name, method)


NGRAM_DRAFTER = """
from types import SimpleNamespace as Config
from vllm.v1.spec_decode.ngram_proposer import NgramProposer

speculation = Config(num_speculative_tokens=3, prompt_lookup_min=1, prompt_lookup_max=3)
drafter = NgramProposer(
    Config(
        speculative_config=speculation,
        model_config=Config(max_model_len=128),
        scheduler_config=Config(max_num_seqs=1024),
        parallel_config=Config(tensor_parallel_size=1),
    )
)
assert drafter.num_numba_thread_available <= 1, drafter.num_numba_thread_available
"""


def test_the_drafter_of_n_grams_uses_one_thread_of_numba() -> None:
    """So deployments/generator/environment.py lets numba's pool have one.

    In a process of its own: once a process has imported numba, vLLM 0.32 starts no engine in it
    on a CPU (`register_kernels` takes an attribute of llvmlite's library for a dictionary).
    """
    subprocess.run([sys.executable, "-c", NGRAM_DRAFTER], check=True, timeout=120)
