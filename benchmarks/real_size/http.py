"""What is measured over HTTP: long prompts, other clients, structured output."""

from __future__ import annotations

import random
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil

from models.real_size import POSITIONS
from tools.serving.process import Json, ServeProcess, config_with_model

from ..engine.bench import SCALE
from ..llm import guidance
from .offline import compared

MODEL = "real-size"
TIMEOUT_S = 300
ALONE_S = 2.0
BESIDE = 4
"""Requests of each kind beside which the watcher is timed."""
TINY: Json = {"model": MODEL, "prompt": "a b", "max_tokens": 1}
CHAT: Json = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Tofajec honi ufosi?"}],
    "max_tokens": 4,
    "temperature": 0,
}
GUIDED: Json = {"guidance_scale": SCALE, "negative_prompt": "Minuk."}


class Server:
    """configs/cfg.yaml with a model of real size, and a client of it."""

    def __init__(self, process: ServeProcess, vocabulary: int) -> None:
        self._process, self._vocabulary = process, vocabulary
        self._http = httpx.Client(base_url=process.url, timeout=TIMEOUT_S)
        self._random = random.Random(0)

    def post(self, path: str, body: Json) -> tuple[float, httpx.Response]:
        """(ms, answer)."""
        start = time.perf_counter()
        answer = self._http.post(path, json=body)
        return 1000 * (time.perf_counter() - start), answer

    def complete_ms(self, prompt: list[int], negative: list[int] | None, tokens: int) -> float:
        """Raises httpx.HTTPStatusError if it is refused."""
        body: Json = {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
        if negative is not None:
            body |= guidance(SCALE, negative)
        took, answer = self.post("/v1/completions", {**body, "ignore_eos": True})
        answer.raise_for_status()
        return took

    def long_prompts(self, lengths: Sequence[int], turns: int) -> Iterator[dict[str, Any]]:
        """As RealSize.first_tokens, with the times of another client's tiny requests, in ms."""
        for length in lengths:
            prompt, negative = self._ids(length), self._ids(length)
            row = compared(self.complete_ms, prompt, negative, turns)
            with self._watched() as alone:
                time.sleep(ALONE_S)
            waits: Json = {"alone": statistics.median(alone)}
            for kind, other in (("plain", None), ("guided", negative)):
                with self._watched() as found:
                    for _ in range(BESIDE):
                        self.complete_ms(prompt, other, 1)
                waits[f"beside {kind}, longest"] = max(found)
            yield {"tokens": length, **row, "tiny_request_ms": waits}

    @contextmanager
    def _watched(self) -> Iterator[list[float]]:
        """While open, another client sends tiny requests, one after the other; their ms."""
        found: list[float] = []
        stopped = threading.Event()

        def watch() -> None:
            with httpx.Client(base_url=self._process.url, timeout=TIMEOUT_S) as client:
                while not stopped.is_set():
                    start = time.perf_counter()
                    client.post("/v1/completions", json=TINY).raise_for_status()
                    found.append(1000 * (time.perf_counter() - start))

        thread = threading.Thread(target=watch)
        thread.start()
        while not found:  # connected
            time.sleep(0.01)
        found.clear()
        try:
            yield found
        finally:
            stopped.set()
            thread.join()

    def _ids(self, length: int) -> list[int]:
        return [self._random.randrange(10, self._vocabulary - 10) for _ in range(length)]

    def structured(self) -> Iterator[dict[str, Any]]:
        """One row for each grammar: its first and second use, and a guided one."""
        self.post("/v1/chat/completions", CHAT)[1].raise_for_status()
        for name, fields in GRAMMARS.items():
            uses = {"first": {}, "second": {}, "guided": GUIDED}
            row: dict[str, Any] = {"grammar": name}
            for use, more in uses.items():
                cpu_s = self._replica_cpu_s()
                took, answer = self.post("/v1/chat/completions", {**CHAT, **fields, **more})
                row[use] = {"status": answer.status_code, "ms": took}
                row[use]["cpu_s"] = self._replica_cpu_s() - cpu_s
            yield row

    def _replica_cpu_s(self) -> float:
        """CPU-seconds of the generator replicas and of their processes, ended ones included."""
        total = 0.0
        for process in self._process.processes():
            with suppress(psutil.Error):
                if any(
                    "ModelReplica" in p.name() or "ModelReplica" in " ".join(p.cmdline())
                    for p in (process, *process.parents())
                ):
                    total += sum(process.cpu_times()[:4])
        return total


def tools(number: int, parameters: int = 8) -> Json:
    """Functions with string, integer, boolean and enumerated parameters, to be called if wanted."""
    kinds: list[Json] = [
        {"type": "string"},
        {"type": "integer"},
        {"type": "boolean"},
        {"type": "string", "enum": ["red", "green", "blue"]},
    ]
    properties = {f"parameter_{i}": kinds[i % len(kinds)] for i in range(parameters)}
    schema = {"type": "object", "properties": properties, "required": list(properties)[::2]}
    functions = [
        {"name": f"function_{i}_of_{number}", "description": "It does it.", "parameters": schema}
        for i in range(number)
    ]
    return {"tools": [{"type": "function", "function": f} for f in functions]}


def schema(**properties: Json) -> Json:
    found = {"type": "object", "properties": properties, "required": list(properties)}
    name = "_".join(properties)
    form = {"type": "json_schema", "json_schema": {"name": name, "schema": found}}
    return {"response_format": form}


GRAMMARS: dict[str, Json] = {
    "json_object": {"response_format": {"type": "json_object"}},
    "schema of two fields": schema(a={"type": "string"}, b={"type": "integer"}),
    "maxLength 400": schema(text={"type": "string", "maxLength": 400}),
    "regex [a-z ]*": {"structured_outputs": {"regex": "[a-z ]*"}},
    "choice": {"structured_outputs": {"choice": ["yes", "no"]}},
    "tools, auto, 1": tools(1),
    "tools, auto, 60": tools(60),
    "tools, auto, 128": tools(128),
    "tools, required, 128": {**tools(128), "tool_choice": "required"},
}


@contextmanager
def started(model: Path, vocabulary: int) -> Iterator[Server]:
    with ServeProcess(config_with_model(model, MODEL, max_model_len=POSITIONS)) as process:
        yield Server(process, vocabulary)
