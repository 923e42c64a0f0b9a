"""Every private vLLM name that the plugin uses exists in the vLLM that is installed."""

import ast
import functools
import importlib
import inspect
import pkgutil
import textwrap

import pytest

import cfg_core.vllm_plugin

MODULES = [
    importlib.import_module(f"cfg_core.vllm_plugin.{m.name}")
    for m in pkgutil.iter_modules(cfg_core.vllm_plugin.__path__)
    if m.name != "__main__"
]
NAMES = [(module.__name__, name) for module in MODULES for name in getattr(module, "PRIVATE_NAMES", ())]


@functools.cache
def attributes_of(cls: type) -> set[str]:
    """Methods, class attributes, annotations, and what any method of the class or its bases assigns to self."""
    names = set(dir(cls))
    for base in cls.__mro__:
        if base.__module__ == "builtins":
            continue
        names |= set(getattr(base, "__annotations__", {}))
        try:
            source = inspect.getsource(base)
        except OSError:  # written in C, such as msgspec's Struct
            continue
        for node in ast.walk(ast.parse(textwrap.dedent(source))):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                names.add(node.attr)
    return names


@pytest.mark.parametrize(("module", "name"), NAMES, ids=[f"{m.rsplit('.', 1)[1]}-{n}" for m, n in NAMES])
def test_private_name_exists(module, name):
    where, dotted = name.split(":")
    owner, *attribute = dotted.split(".")
    obj = getattr(importlib.import_module(where), owner)
    for attr in attribute:
        assert attr in attributes_of(obj), f"{name}, used by {module}, is gone"


def test_the_list_is_not_empty():
    assert len(NAMES) > 30


def test_the_check_can_fail():
    from vllm.v1.core.sched.scheduler import Scheduler

    assert "no_such_attribute_of_a_scheduler" not in attributes_of(Scheduler)


@pytest.mark.parametrize(
    ("where", "method", "parameters"),
    [
        ("vllm.v1.core.sched.scheduler:Scheduler", "schedule", ["self", "throttle_prefills"]),
        ("vllm.v1.core.sched.scheduler:Scheduler", "finish_requests", ["self", "request_ids", "finished_status"]),
        (
            "vllm.v1.core.sched.scheduler:Scheduler",
            "_reserve_prefill_lookahead",
            ["self", "request", "num_computed_tokens", "num_new_tokens"],
        ),
        ("vllm.v1.worker.gpu_model_runner:GPUModelRunner", "sample_tokens", ["self", "grammar_output"]),
        ("vllm.v1.worker.gpu_model_runner:GPUModelRunner", "_sample", ["self", "logits", "spec_decode_metadata"]),
        (
            "vllm.v1.worker.gpu.model_runner:GPUModelRunner",
            "sample",
            ["self", "hidden_states", "input_batch", "grammar_output"],
        ),
    ],
)
def test_overridden_methods_have_the_signature_we_override(where, method, parameters):
    module, owner = where.split(":")
    cls = getattr(importlib.import_module(module), owner)
    assert list(inspect.signature(getattr(cls, method)).parameters) == parameters


def test_schedule_asks_the_lookahead_hook_for_running_and_for_waiting_requests():
    """The hold in lockstep stands on both calls."""
    from vllm.v1.core.sched.scheduler import Scheduler

    assert inspect.getsource(Scheduler.schedule).count("self._reserve_prefill_lookahead(") == 2


def test_v2_asks_the_model_for_logits_once_and_masks_them_afterwards():
    """The blend stands between the two. `compute_logits_local` belongs to batch-sharded sampling, which is refused."""
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    source = inspect.getsource(GPUModelRunner.sample)
    assert source.count("self.model.compute_logits(") == 1
    assert source.index("self.model.compute_logits(") < source.index("apply_grammar_bitmask(")
    assert source.count("self.model.") == 2
    assert "self.model.compute_logits_local(" in source


def test_v2_takes_back_what_is_reported_as_rejected():
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    source = inspect.getsource(GPUModelRunner.sample_tokens)
    assert source.index("self.sample(") < source.index("self.pp_handler.broadcast(") < source.index("AsyncOutput(")
    assert source.index("AsyncOutput(") < source.index("self.postprocess_sampled(")
