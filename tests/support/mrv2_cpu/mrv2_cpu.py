"""Test support: vLLM's Model Runner V2 without a GPU, its kernels run by Triton's interpreter.

This tests the results of what vLLM does on a GPU by default. It does not test races between
streams, CUDA graphs, or the compiled kernels. Whatever does not work on a CPU is worked around
here, and nowhere else:

- Triton finds no driver: `interpret_triton`, before vllm is imported.
- some kernels give integer masks, which only the compiler accepts: `interpret_triton`.
- the resampling kernel of probabilistic drafts calls a CUDA library's `log1p`, which is None there:
  `interpret_triton`.
- the top-k/top-p kernel does not run under the interpreter: `WorkerExtension`, which vLLM imports
  in each worker, redirects it to vLLM's own PyTorch version.
- vLLM 0.33's worker refuses V2 without a Triton driver: `WorkerExtension` removes the refusal.
- V1 with a pipeline needs a tensor that stock vLLM makes only while it compiles:
  `make_intermediate_tensors`.
"""

from __future__ import annotations

import functools
import os
from types import ModuleType
from typing import Any


def interpret_triton() -> None:
    """Make Triton interpret kernels, and act as its own driver. Call this before `import vllm`."""
    os.environ["TRITON_INTERPRET"] = "1"
    import triton.backends
    from triton.runtime.interpreter import InterpreterBuilder

    class Driver:
        @staticmethod
        def is_active() -> bool:
            return False  # Triton itself must never choose it

    triton.backends.backends.setdefault(
        "cpu", triton.backends.Backend(compiler=None, driver=Driver)
    )
    for name, position in (("create_masked_store", 2), ("create_masked_load", 1)):
        if not hasattr(getattr(InterpreterBuilder, name), "__wrapped__"):
            setattr(
                InterpreterBuilder,
                name,
                _with_boolean_mask(getattr(InterpreterBuilder, name), position),
            )
    import triton.language as tl
    from triton.language.extra import libdevice

    libdevice.log1p = lambda x: tl.log(tl.maximum(1.0 + x, 1e-38))  # smaller values are not used
    _speed_up_interpreter()


def _speed_up_interpreter() -> None:
    """Let the interpreter do once what it does in each call of a kernel or of its functions.

    It replaces the functions of `triton.language`, and restores them after the kernel. No process
    with this module compiles a kernel, so they can stay replaced. It also builds its table of
    numpy's types in each call.
    """
    from triton.runtime import interpreter

    patch, np_dtype = interpreter._patch_lang, interpreter._get_np_dtype
    of_scalar = functools.cache(np_dtype)
    patched: set[frozenset[str]] = set()

    def patch_once(fn: Any) -> Any:
        languages = frozenset(
            value.__name__
            for value in fn.__globals__.values()
            if isinstance(value, ModuleType) and value in (interpreter.tl, interpreter.tl.core)
        )
        if languages not in patched:
            patch(fn)
            patched.add(languages)
        return interpreter._LangPatchScope()  # restores nothing

    def np_dtype_of(type_: Any) -> Any:
        element = type_.scalar  # a pointer has no hash
        return np_dtype(element) if element.is_ptr() else of_scalar(element)

    interpreter._patch_lang, interpreter._get_np_dtype = patch_once, np_dtype_of


def _with_boolean_mask(original: Any, position: int) -> Any:
    def call(self: Any, *args: Any) -> Any:
        mask = args[position]
        if mask is not None and mask.data.dtype != bool:
            mask.data = mask.data.astype(bool)
        return original(self, *args)

    call.__wrapped__ = original  # type: ignore[attr-defined]
    return call


def __getattr__(name: str) -> Any:
    """Make `WorkerExtension` on first use.

    It needs vllm, which must not be imported before `interpret_triton`.
    """
    if name != "WorkerExtension":
        raise AttributeError(name)
    import vllm.v1.sample.ops.topk_topp_sampler as sampler
    import vllm.v1.worker.gpu_worker as gpu_worker

    sampler.HAS_TRITON = False
    gpu_worker.HAS_TRITON = True  # only 0.33 reads it
    extension = type(
        "WorkerExtension", (), {"make_intermediate_tensors": _make_intermediate_tensors}
    )
    return globals().setdefault(name, extension)


def _make_intermediate_tensors(worker: Any) -> None:
    """Make the tensors into which V1's second pipeline stage receives.

    Stock vLLM makes them only while it compiles, so not in eager mode.
    """
    from vllm.distributed.parallel_state import get_pp_group

    runner = worker.model_runner
    if not worker.use_v2_model_runner and not get_pp_group().is_first_rank:
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
        )
