"""One vLLM engine in this process, and what tests ask of it.

vllm is imported when the first engine starts, not when the tests are collected. Every `generate`
ends with `assert_idle`: no request and no KV block may be left behind.
"""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch

from tests.engine.oracle import CASES, NEW_TOKENS, PAIRS, PROMPTS, Case, Oracle

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": (
        "0"
    ),  # scheduler and worker in this process: tests look inside
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
ASYNC = "CFG_SERVE_TEST_ASYNC"
"""Environment variable: 1 or 0 turns async scheduling on or off.

If it is not set, vLLM's default on a CPU applies.
"""

BLOCK_SIZE = 32
ROOMY = {"num_gpu_blocks_override": 2048, "max_num_batched_tokens": 2048, "max_num_seqs": 256}
"""Everything fits at once: no chunk, no preemption."""
BUDGET_16 = {"num_gpu_blocks_override": 2048, "max_num_batched_tokens": 16, "max_num_seqs": 16}
"""Long prompts take up to ten steps; at most 16 streams."""
SMALL_POOL = {"num_gpu_blocks_override": 16, "max_num_batched_tokens": 256, "max_num_seqs": 64}
"""15 blocks of 32 tokens: the largest group (150 + 120 prompt tokens) takes 11 or 12 of them."""
TIGHT = {"num_gpu_blocks_override": 16, "max_num_batched_tokens": 16, "max_num_seqs": 16}
"""Budget and pool small at once. Models with two KV groups need twice the blocks."""


def tight_for_groups(drafts: int) -> dict[str, Any]:
    """Budget and pool small, but large enough for a group of eight streams.

    40 blocks of 32 tokens: the group of four streams in formulas.py takes 20 of them, that of eight
    up to 32. With three drafts, eight streams take 40 tokens of a step.
    """
    budget = 48 if drafts else 32
    return {"num_gpu_blocks_override": 41, "max_num_batched_tokens": budget, "max_num_seqs": 16}


class Engine:
    """`LLM` on the model in `folder`, with the plugin or without (`guided=False`).

    The caller must call `close`.
    """

    def __init__(
        self,
        folder: Path,
        *,
        guided: bool = True,
        kv_split: str = "elastic",
        logits_processors: Any = None,
        draft_cost: float | None = None,
        **options: Any,
    ) -> None:
        from vllm import LLM

        from cfg_core.vllm_plugin import guided_engine_args

        forget_settings()
        inspect_in_process(folder)
        freeze()
        plugin: dict[str, Any] = {}
        if guided:
            plugin = guided_engine_args(kv_split, logits_processors, draft_cost)
        basics: dict[str, Any] = {
            "max_model_len": 256,
            "enforce_eager": True,
            "dtype": "float32",
            "block_size": BLOCK_SIZE,
            "kv_cache_memory_bytes": 64 << 20,
            "disable_log_stats": False,
        }
        options = {**basics, **of_this_process(), **options}
        with without_collections(), keeping_async_scheduling(options):
            self.llm = LLM(str(folder), **options, **plugin)
        self.guided = guided
        if guided:
            check_after_each_step(self.scheduler)

    @property
    def core(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core

    @property
    def scheduler(self) -> Any:
        return self.core.scheduler

    def stats(self) -> dict[str, int]:
        """Counts of groups, blocks and steps; only with the plugin."""
        counts: dict[str, int] = self.scheduler.guidance_stats()
        return counts

    def generate(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], **options: Any
    ) -> list[RequestOutput]:
        """Generate all at once. Returns the outputs in the order of `prompts`.

        Nothing may be left behind.
        """
        inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        outputs: list[RequestOutput] = self.llm.generate(
            inputs, list(params), use_tqdm=False, **options
        )
        self.assert_idle()
        return outputs

    def guide(self, cases: Sequence[Case], **options: Any) -> list[list[int]]:
        """The greedy tokens of `cases`, all in one batch. `options` are passed to SamplingParams.

        Every token comes from a joint step of its group, and no joint step is done twice. With
        async scheduling, one more step may be in flight when a text ends.
        """
        before = self.stats()["joint_steps"]
        got = tokens(
            self.generate(
                [case.prompt for case in cases], [guided(case, **options) for case in cases]
            )
        )
        wasted = self.stats()["joint_steps"] - before - sum(map(len, got))
        assert (
            0
            <= wasted
            <= (
                len(got) if self.llm.llm_engine.vllm_config.scheduler_config.async_scheduling else 0
            )
        )
        return got

    def assert_idle(self) -> None:
        """No request of any kind, every block and every image free, every group gone."""
        scheduler = self.scheduler
        assert not scheduler.requests
        assert not scheduler.running
        assert not scheduler.waiting
        pool = scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1  # one is vLLM's null block
        encoder = scheduler.encoder_cache_manager
        assert encoder.num_freeable_slots == encoder.cache_size  # no image is held for a stream
        if self.guided:
            stats = self.stats()
            left = {
                key: stats[key]
                for key in ("running", "waiting", "groups", "leader_blocks", "follower_blocks")
            }
            assert not any(left.values()), left
            assert stats["free_blocks"] == stats["total_blocks"]

    @contextmanager
    def prefix_hits(self) -> Iterator[dict[tuple[int, ...], int]]:
        """While open, maps the prompt of a stream to the most tokens found in the prefix cache.

        Streams are leaders and followers.
        """
        manager = self.scheduler.kv_cache_manager
        hits: dict[tuple[int, ...], int] = {}
        original = manager.get_computed_blocks

        def count(request: Any, *args: Any) -> Any:
            found = original(request, *args)
            prompt = tuple(request.prompt_token_ids)
            hits[prompt] = max(hits.get(prompt, 0), found[1])
            return found

        manager.get_computed_blocks = count
        try:
            yield hits
        finally:
            manager.get_computed_blocks = original

    @contextmanager
    def planned_wrongly(self, steps: int = 200) -> Iterator[None]:
        """While open, each stream may sample as soon as it has read its prompt, in some steps."""
        from cfg_core.vllm_plugin.core.scheduler import EVERYTHING

        scheduler, left = self.scheduler, iter(range(steps))
        carry_out = scheduler._carry_out

        def let_all_sample(plan: Any) -> None:
            carry_out(plan)
            if next(left, None) is not None:
                object.__setattr__(plan, "sampling", EVERYTHING)

        scheduler._carry_out = let_all_sample
        try:
            yield
        finally:
            del scheduler._carry_out

    @contextmanager
    def whole_preemptions(self) -> Iterator[list[str]]:
        """While open, collects the ids of preempted streams.

        After each step, no other stream of their groups may be running.
        """
        scheduler, preempted = self.scheduler, []
        preempt, schedule = scheduler._preempt_request, scheduler.schedule

        def record(request: Any, *args: Any, **kwargs: Any) -> None:
            preempted.append(request.request_id)
            preempt(request, *args, **kwargs)

        def check(*args: Any, **kwargs: Any) -> Any:
            before = len(preempted)
            output = schedule(*args, **kwargs)
            running = {name for name, r in scheduler.requests.items() if r.status.name == "RUNNING"}
            for stream in preempted[before:]:
                group = scheduler._groups.of(stream)
                assert group is None or running.isdisjoint(group.streams), group
            return output

        scheduler._preempt_request, scheduler.schedule = record, check
        try:
            yield preempted
        finally:
            del scheduler._preempt_request, scheduler.schedule

    def close(self) -> None:
        with without_collections():
            self.llm.llm_engine.engine_core.shutdown()
        del self.llm
        gc.collect()


@contextmanager
def of_these_tests() -> Iterator[None]:
    """While open, vLLM has ENVIRONMENT and one thread, because the models are too small for more.

    A folder of tests with engines opens it for its own tests only.
    """
    set_num_threads, num_threads = torch.set_num_threads, torch.get_num_threads()
    set_num_threads(1)
    with patch.dict(os.environ, ENVIRONMENT):
        yield
    forget_settings()
    torch.set_num_threads = set_num_threads  # vLLM's CPU worker replaces it by a no-op
    set_num_threads(num_threads)


def of_this_process() -> dict[str, Any]:
    """Engine options for the runner and the scheduling that paths.py chose for this process.

    Empty if it chose none.
    """
    if ASYNC not in os.environ:
        return {}
    return {
        "async_scheduling": os.environ[ASYNC] == "1",
        "worker_extension_cls": "mrv2_cpu.WorkerExtension",
    }


@contextmanager
def keeping_async_scheduling(options: dict[str, Any]) -> Iterator[None]:
    """While open, engines are sync or async as `options` say. vLLM's CPU platform says sync.

    Only the process that builds the VllmConfig needs this.
    """
    from vllm.platforms.cpu import CpuPlatform

    original, made = CpuPlatform.check_and_update_config.__func__, []

    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        wanted = vllm_config.scheduler_config.async_scheduling
        original(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = wanted
        made.append(wanted)

    if "async_scheduling" not in options:
        yield
        return
    with patch.object(CpuPlatform, "check_and_update_config", classmethod(check_and_update_config)):
        yield
    assert made
    assert set(made) == {options["async_scheduling"]}, "vLLM cannot do both: see its warnings"


def fork_workers() -> None:
    """Let engines fork their processes from this one, so that they need not import vLLM again.

    vLLM's CPU platform would have them spawned. For a process that has run no engine yet.
    """
    import vllm.v1.engine.core
    import vllm.v1.worker.cpu_worker  # noqa: F401 - what the forks need
    from vllm.platforms.cpu import CpuPlatform

    original = CpuPlatform.check_and_update_config.__func__

    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        original(cls, vllm_config)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)


def check_after_each_step(scheduler: Any) -> None:
    """Call `check_integrity` after each call of `update_from_output`."""
    original = scheduler.update_from_output

    def update_from_output(*args: Any) -> Any:
        outputs = original(*args)
        scheduler.check_integrity()
        return outputs

    scheduler.update_from_output = update_from_output


def plain(**options: Any) -> SamplingParams:
    """Greedy, NEW_TOKENS tokens, no guidance, unless `options` say otherwise."""
    from vllm import SamplingParams

    return SamplingParams(
        **{"temperature": 0.0, "max_tokens": NEW_TOKENS, "ignore_eos": True, **options}
    )


def guided(case: Case, **options: Any) -> SamplingParams:
    """As `plain`, with the guidance of `case`."""
    fields = {"guidance_scale": case.scale, "negative_prompt_token_ids": list(case.negative)}
    return plain(**{"extra_args": fields, **options})


def tokens(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def mixture(oracle: Oracle) -> tuple[list[tuple[int, ...]], list[SamplingParams], list[list[int]]]:
    """Every pair at scales 1.5 and 3, each followed by its prompt without guidance.

    Returns prompts, parameters and HF's tokens.
    """
    prompts, params, want = [], [], []
    for i, case in enumerate(CASES):
        if case.scale not in (1.5, 3.0):
            continue
        prompts += [case.prompt, case.prompt]
        params += [guided(case), plain()]
        want += [oracle.guided[i], oracle.plain[PROMPTS.index(case.prompt)]]
    assert len(want) == 4 * len(PAIRS)
    return prompts, params, want


def forget_settings() -> None:
    """Let the next engine read vLLM's environment variables again.

    An engine caches them for its whole process.
    """
    import vllm.envs

    vllm.envs.disable_envs_cache()


def inspect_in_process(folder: Path) -> None:
    """Import the class of the model in `folder` in this process."""
    config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    import_model(config["architectures"][0])


def import_model(architecture: str) -> None:
    """Import a model's class in this process.

    vLLM would start a process for that, which takes half a minute for each architecture.
    """
    from vllm import ModelRegistry

    lazy = ModelRegistry.models[architecture]
    ModelRegistry.register_model(architecture, lazy.load_model_cls())


def freeze() -> None:
    """Keep the garbage collector from visiting what is alive now: what imports have made."""
    gc.collect()
    gc.freeze()


@contextmanager
def without_collections() -> Iterator[None]:
    """While open, vLLM collects no garbage, and neither freezes nor thaws what is alive.

    It would do so eight times when an engine starts and three times when it ends. Each time visits
    all that imports have made, and takes a second: together, most of the life of a tiny engine.
    """
    with ExitStack() as patches:
        for name in ("collect", "freeze", "unfreeze"):
            patches.enter_context(patch.object(gc, name, return_value=0))
        yield


def differences(got: Sequence[list[int]], want: Sequence[list[int]]) -> list[str]:
    """One line for each sequence that differs: which, and from which token on. Empty if all are
    equal."""
    assert len(got) == len(want)
    lines = []
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        if a != b:
            first = next(
                (k for k, (x, y) in enumerate(zip(a, b, strict=False)) if x != y),
                min(len(a), len(b)),
            )
            lines.append(f"sequence {i}: {len(a)} tokens for {len(b)}, first difference at {first}")
    return lines
