"""The engines that are compared: each in a process of its own, on one core, with one thread.

    python benchmarks/embeddings/engines.py ENGINE MODEL     JSON lines of texts in, of vectors out

This file is run by itself, and only what the chosen engine needs is imported: the peers in `OTHERS`
run in an interpreter that has nothing else of this project.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

Run = Callable[..., Iterable[Any] | None]
"""Embeds the texts; returns vectors, or None if nobody asks for them. If the engine is online, a
second argument is the number of its clients."""


def ours(model: str, dtype: str) -> Run:
    from cfg_core.prefill_only import Engine

    quantization = "int8" if dtype == "int8" else None
    dtype = "auto" if quantization else dtype
    engine = Engine.load(model, dtype=dtype, quantization=quantization, num_threads=1)
    return lambda texts: engine.embed(texts, show_progress=False)


def ours_online(model: str, dtype: str) -> Run:
    from cfg_core.prefill_only import AsyncEngine, EngineOptions, RequestOptions

    engine = AsyncEngine.load(model, EngineOptions(dtype=dtype, num_threads=1))  # type: ignore[arg-type]
    return online(lambda text: engine.run([text], RequestOptions()))


def sentence_transformers(model: str, dtype: str) -> Run:
    sys.path.append(os.path.join(sys.prefix, "oracle"))
    from sentence_transformers import SentenceTransformer

    engine = SentenceTransformer(model, device="cpu")
    return lambda texts: engine.encode(list(texts), batch_size=32, show_progress_bar=False)


def onnx_runtime(model: str, dtype: str) -> Run:
    """sentence-transformers' own way to ONNX Runtime. It exports the model at each start.

    dtype: int8 quantises the weights dynamically, for avx512_vnni, as its documentation advises.
    """
    import sentence_transformers

    options: dict[str, Any] = {"provider": "CPUExecutionProvider"}
    engine = sentence_transformers.SentenceTransformer(
        model, device="cpu", backend="onnx", model_kwargs=options
    )
    if dtype == "int8":
        folder = tempfile.mkdtemp(prefix="onnx-int8-")
        engine.save_pretrained(folder)
        sentence_transformers.export_dynamic_quantized_onnx_model(engine, "avx512_vnni", folder)
        options["file_name"] = "model_qint8_avx512_vnni.onnx"
        engine = sentence_transformers.SentenceTransformer(
            folder, device="cpu", backend="onnx", model_kwargs=options
        )
        shutil.rmtree(folder)
    return lambda texts: engine.encode(list(texts), batch_size=32, show_progress_bar=False)


def openvino(model: str, dtype: str) -> Run:
    """sentence-transformers' own way to OpenVINO, which chooses the type to compute in by itself.

    dtype: auto leaves it the choice; another name is passed as its INFERENCE_PRECISION_HINT.
    """
    import sentence_transformers

    hints = {"INFERENCE_NUM_THREADS": "1"}
    if dtype != "auto":
        hints["INFERENCE_PRECISION_HINT"] = dtype
    engine = sentence_transformers.SentenceTransformer(
        model, device="cpu", backend="openvino", model_kwargs={"ov_config": hints}
    )
    return lambda texts: engine.encode(list(texts), batch_size=32, show_progress_bar=False)


def vllm_arguments(model: str, dtype: str) -> dict[str, Any]:
    return {
        "model": model,
        "runner": "pooling",
        "dtype": dtype,
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "disable_log_stats": True,
    }


def vllm(model: str, dtype: str) -> Run:
    from vllm import LLM

    engine = LLM(**vllm_arguments(model, dtype))
    return lambda texts: [
        output.outputs.embedding for output in engine.embed(list(texts), use_tqdm=False)
    ]


def vllm_online(model: str, dtype: str) -> Run:
    from vllm import AsyncEngineArgs, AsyncLLMEngine, PoolingParams

    async def start() -> AsyncLLMEngine:
        return AsyncLLMEngine.from_engine_args(AsyncEngineArgs(**vllm_arguments(model, dtype)))

    engine = LOOP.run_until_complete(start())
    numbers = iter(range(10**9))

    async def embed(text: str) -> None:
        async for _ in engine.encode(
            text, PoolingParams(task="embed"), request_id=str(next(numbers))
        ):
            pass

    return online(embed)


def infinity(model: str, dtype: str) -> Run:
    from infinity_emb import AsyncEngineArray, EngineArgs

    arguments = EngineArgs(
        model_name_or_path=model,
        engine="torch",
        device="cpu",
        dtype=dtype,
        bettertransformer=False,
        model_warmup=False,
    )
    engine = AsyncEngineArray.from_args([arguments])[0]
    LOOP.run_until_complete(engine.astart())
    return lambda texts: LOOP.run_until_complete(engine.embed(sentences=list(texts)))[0]


def online(embed: Callable[[str], Awaitable[object]]) -> Run:
    """Clients that each send one text, wait, and send the next."""

    async def all_of(texts: Sequence[str], num_clients: int) -> None:
        waiting = iter(texts)

        async def client() -> None:
            for text in waiting:
                await embed(text)

        await asyncio.gather(*(client() for _ in range(num_clients)))

    return lambda texts, num_clients: LOOP.run_until_complete(all_of(texts, num_clients))


def openvino_online(model: str, dtype: str) -> Run:
    """OpenVINO behind a queue: a thread computes all texts that wait, then those that came since.

    sentence-transformers has no server, and this is the least that one would do.
    """
    encode = openvino(model, dtype)
    waiting: list[tuple[str, asyncio.Future[None]]] = []
    busy = asyncio.Lock()

    async def embed(text: str) -> None:
        done: asyncio.Future[None] = LOOP.create_future()
        waiting.append((text, done))
        async with busy:
            taken, waiting[:] = list(waiting), []
            if taken:
                await asyncio.to_thread(encode, [text for text, _ in taken])
            for _, future in taken:
                future.set_result(None)
        await done

    return online(embed)


def gemm_limit(model: str, dtype: str) -> Run:
    """Only the matrix products of the model, at its shapes, 1024 tokens at a time: no engine can be
    faster."""
    import torch

    with open(os.path.join(model, "config.json"), encoding="utf-8") as file:
        config = json.load(file)
    hidden, inner, layers = (
        config["hidden_size"],
        config["intermediate_size"],
        config["num_hidden_layers"],
    )
    shapes = [(hidden, hidden)] * 4 + [(hidden, inner), (inner, hidden)]
    kind = getattr(torch, dtype)
    weights = [torch.randn(out, into, dtype=kind) for into, out in shapes]
    rows = [torch.randn(GEMM_TOKENS, into, dtype=kind) for into, _ in shapes]

    def run(texts: Sequence[str]) -> None:
        for _ in range(len(texts) * layers):
            for row, weight in zip(rows, weights, strict=True):
                torch.nn.functional.linear(row, weight)

    return run


GEMM_TOKENS = 1024

ENGINES: dict[str, tuple[Callable[[str, str], Run], str]] = {
    "ours fp32": (ours, "float32"),
    "ours bf16": (ours, "bfloat16"),
    "ours int8": (ours, "int8"),
    "ours": (ours, "auto"),
    "sentence-transformers": (sentence_transformers, "float32"),
    "vllm": (vllm, "auto"),
    "vllm fp32": (vllm, "float32"),
    "vllm bf16": (vllm, "bfloat16"),
    "infinity": (infinity, "float32"),
    "onnxruntime fp32": (onnx_runtime, "float32"),
    "onnxruntime int8": (onnx_runtime, "int8"),
    "openvino": (openvino, "auto"),
    "openvino fp32": (openvino, "f32"),
    "GEMM limit fp32": (gemm_limit, "float32"),
    "GEMM limit bf16": (gemm_limit, "bfloat16"),
    "ours online": (ours_online, "auto"),
    "ours fp32 online": (ours_online, "float32"),
    "ours bf16 online": (ours_online, "bfloat16"),
    "openvino online": (openvino_online, "auto"),
    "vllm online": (vllm_online, "auto"),
    "vllm fp32 online": (vllm_online, "float32"),
    "vllm bf16 online": (vllm_online, "bfloat16"),
}

OTHERS = {
    "infinity": "infinity",
    "onnxruntime fp32": "peers",
    "onnxruntime int8": "peers",
    "openvino": "peers",
    "openvino online": "peers",
    "openvino fp32": "peers",
}
"""Which interpreter an engine needs: see the options of __main__.py."""

LOOP = asyncio.new_event_loop()


def main() -> None:
    name, model = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")  # whatever else is printed goes to stderr
    os.dup2(2, 1)
    make, dtype = ENGINES[name]
    asyncio.set_event_loop(LOOP)
    import torch

    torch.set_num_threads(1)
    run = make(model, dtype)
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        vectors = run(order["texts"], *order["clients"])
        answer = (
            [list(map(float, vector)) for vector in vectors]
            if order.get("vectors") and vectors is not None
            else []
        )
        print(json.dumps({"vectors": answer}), file=answers, flush=True)


if __name__ == "__main__":
    main()
