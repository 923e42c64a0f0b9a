"""A process of test_ranks.py: an engine of several ranks answers the oracle's cases.

It needs a process of its own, because vLLM starts the ranks from it. It reads a folder, a JSON
object of engine options and the length of the texts, and writes one line of JSON.

Requests come in four waves, between which all ranks are idle: all cases and prompts at once, two
guided requests that one rank answers alone, a request whose client leaves, and all prompts again.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.engine.engines import (
    BLOCK_SIZE,
    fork_workers,
    guided,
    keeping_async_scheduling,
    of_this_process,
    plain,
)
from tests.engine.oracle import CASES, PROMPTS

EVERY = 7
"""Every seventh case: 11 pairs, all scales."""
ALONE = CASES[:2]
LEFT_TOKENS = 150
"""The tokens that the client who leaves has asked for."""
WAIT_S = 120
"""Model Runner V2 takes long on a CPU."""
IDLE = ("running", "waiting", "groups", "leader_blocks", "follower_blocks")

ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
}
BASICS: dict[str, Any] = {
    "max_model_len": 256,
    "enforce_eager": True,
    "dtype": "float32",
    "block_size": BLOCK_SIZE,
    "kv_cache_memory_bytes": 64 << 20,
    "num_gpu_blocks_override": 24,
    "max_num_batched_tokens": 32,
    "max_num_seqs": 16,
}
"""Prompts are chunked, and groups preempted."""


class Client:
    """Sends requests to one engine, and counts them, because each needs a name."""

    def __init__(self, engine: Any) -> None:
        self._engine, self._sent = engine, 0

    async def answer(self, prompt: Sequence[int], params: Any, rank: int | None) -> list[int]:
        from vllm.sampling_params import RequestOutputKind

        self._sent += 1
        params.output_kind = RequestOutputKind.FINAL_ONLY
        asked = {"prompt_token_ids": list(prompt)}
        name = str(self._sent)
        tokens: list[int] = []
        async for output in self._engine.generate(asked, params, name, data_parallel_rank=rank):
            tokens = list(output.outputs[0].token_ids)
        return tokens

    async def answers(self, asked: Sequence[tuple[Any, Any]], rank: int | None = None) -> Any:
        work = [self.answer(prompt, params, rank) for prompt, params in asked]
        return await asyncio.wait_for(asyncio.gather(*work), WAIT_S)

    async def leave(self, prompt: Sequence[int], params: Any) -> None:
        """Send a request, and leave when the engine works on it."""
        task = asyncio.create_task(self.answer(prompt, params, None))
        while not any(stats["groups"] for stats in await self.stats()):
            assert not task.done()
            await asyncio.sleep(0.01)
        task.cancel()

    async def stats(self) -> list[dict[str, int]]:
        """`guidance_stats` of each rank."""
        core = self._engine.engine_core
        if hasattr(core, "call_utility_all_async"):
            return list(await core.call_utility_all_async("guidance_stats"))
        return [await core.call_utility_async("guidance_stats")]

    async def idle(self) -> None:
        """Wait until no rank has a request or a block."""
        async with asyncio.timeout(WAIT_S):
            while any(s[key] for s in await self.stats() for key in IDLE):  # noqa: ASYNC110
                await asyncio.sleep(0.05)


async def main(folder: Path, options: dict[str, Any], new_tokens: int) -> dict[str, Any]:
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    from cfg_core.vllm_plugin import guided_engine_args

    fork_workers()
    plugin = guided_engine_args(draft_cost=options.pop("draft_cost", None))
    given = {**BASICS, **of_this_process(), **options}
    arguments = AsyncEngineArgs(model=str(folder), **given, **plugin)
    with keeping_async_scheduling(given):
        engine = AsyncLLM.from_engine_args(arguments)
    try:
        client = Client(engine)
        parallel = engine.vllm_config.parallel_config
        length = {"max_tokens": new_tokens}
        prompts = [(prompt, plain(**length)) for prompt in PROMPTS]
        cases = [(case.prompt, guided(case, **length)) for case in CASES[::EVERY]]
        first = await client.answers([*cases, *prompts])
        await client.idle()
        alone = [(case.prompt, guided(case, **length)) for case in ALONE]
        one = 0 if parallel.data_parallel_size > 1 else None
        by_one = [*await client.answers(alone[:1], one), *await client.answers(alone[1:], one)]
        left = plain(max_tokens=LEFT_TOKENS, extra_args=cases[0][1].extra_args)
        await client.leave(cases[0][0], left)
        await client.idle()
        again = await client.answers(prompts)
        await client.idle()
        return {
            "ranks": parallel.data_parallel_size,
            "experts_are_spread": parallel.enable_expert_parallel,
            "v2": engine.vllm_config.use_v2_model_runner,
            "async": engine.vllm_config.scheduler_config.async_scheduling,
            "guided": first[: len(cases)],
            "plain": first[len(cases) :],
            "alone": by_one,
            "again": again,
            "stats": await client.stats(),
            "in_flight": len(getattr(engine.engine_core, "reqs_in_flight", ())),
        }
    finally:
        engine.shutdown()


if __name__ == "__main__":
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM prints to stdout
    result = asyncio.run(main(Path(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3])))
    print(json.dumps(result), file=out, flush=True)
