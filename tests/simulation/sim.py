"""The real GuidedScheduler and KV cache manager, driven by a fake model runner.

The fake runner keeps, for every slot of every physical KV block, *which prefix* was written there, and checks
on each sampled row that the stream's block table holds exactly its own prefix. So a lost block, a block handed
out twice, a token computed at the wrong place or a stream out of lockstep is seen at once, at the cost of no
model: some ten thousand stream-steps per second.
"""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import LlamaConfig
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from cfg_core.vllm_plugin import guided_engine_args
from cfg_core.vllm_plugin.step import StepGuidance

VOCAB = 256
GARBAGE = 3  # what a row that is not the leader's would sample


def model_token(leader: str, index: int) -> int:
    """The token that the guided model samples as output `index` of this leader."""
    return 4 + zlib.crc32(f"{leader}:{index}".encode()) % 250


def make_config(folder: Path, kv_split: str = "elastic", **engine_args):
    """A VllmConfig of a model that is never loaded."""
    if not (folder / "config.json").exists():
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=64,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=2,
            architectures=["LlamaForCausalLM"],
            max_position_embeddings=512,
            dtype="float32",
        ).save_pretrained(folder)
    defaults = {"max_model_len": 256, "max_num_seqs": 16, "max_num_batched_tokens": 64, "block_size": 16}
    return EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        enforce_eager=True,
        kv_cache_memory_bytes=1 << 26,
        **{**defaults, **engine_args, **guided_engine_args(kv_split)},
    ).create_engine_config()


@dataclass
class FakeRunner:
    """Mirrors what the V1 runner does with a step: writes KV, samples rows, blends groups by copying."""

    block_size: int
    kv: dict[tuple[int, int], int] = field(default_factory=dict)

    def execute(self, scheduler, step) -> ModelRunnerOutput:
        guidance = StepGuidance.of(step) or StepGuidance((), ())
        joint = {s: row for row in guidance.joint for s in row.streams}
        sampled: list[list[int]] = []
        for stream, num_tokens in step.num_scheduled_tokens.items():
            request = scheduler.requests[stream]
            end = self._write(scheduler, request, num_tokens, stream in guidance.solo)
            if end < request.num_tokens:
                sampled.append([])
                continue
            self._check(scheduler, request)
            group = scheduler._groups.of(stream)
            if group is None:
                sampled.append([model_token(stream, request.num_output_tokens)])
            elif stream in guidance.solo:
                assert stream not in joint
                sampled.append([])
            else:
                assert stream in joint, f"{stream} samples outside a joint step"
                sampled.append([self._guided_token(scheduler, joint[stream])])
        ids = list(step.num_scheduled_tokens)
        return ModelRunnerOutput(
            req_ids=ids, req_id_to_index={r: i for i, r in enumerate(ids)}, sampled_token_ids=sampled
        )

    @staticmethod
    def _guided_token(scheduler, row) -> int:
        counts = {scheduler.requests[s].num_output_tokens for s in row.streams}
        assert len(counts) == 1, f"{row.streams} blend logits of different positions: {counts}"
        return model_token(row.streams[0], counts.pop())

    def _write(self, scheduler, request, num_tokens: int, taken_back: bool) -> int:
        """Write the KV of this chunk; returns its end. Runs after scheduling, so counts are already advanced."""
        end = request.num_computed_tokens + taken_back
        tokens = list(request.all_token_ids)
        assert end <= len(tokens), f"{request.request_id} computes a token that is not sampled yet"
        prefix = hash_chain(tokens[:end])
        for position in range(end - num_tokens, end):
            self.kv[self._slot(scheduler, request, position)] = prefix[position]
        return end

    def _check(self, scheduler, request) -> None:
        for position, prefix in enumerate(hash_chain(list(request.all_token_ids))):
            slot = self._slot(scheduler, request, position)
            assert self.kv.get(slot) == prefix, f"{request.request_id}: wrong KV at {position} (slot {slot})"

    def _slot(self, scheduler, request, position: int) -> tuple[int, int]:
        (blocks,) = scheduler.kv_cache_manager.get_block_ids(request.request_id)
        return blocks[position // self.block_size], position % self.block_size


def hash_chain(tokens: list[int]) -> list[int]:
    """For each position a number that stands for the whole prefix up to it."""
    out, value = [], 0
    for token in tokens:
        value = zlib.crc32(token.to_bytes(4, "little"), value)
        out.append(value)
    return out


class Simulation:
    """An engine core in miniature: `add`, `abort`, `step`, `run`, with every invariant checked on each step."""

    def __init__(self, config, num_blocks: int) -> None:
        self.config = config
        self.block_size = config.cache_config.block_size
        config.cache_config.num_gpu_blocks = num_blocks
        spec = FullAttentionSpec(block_size=self.block_size, num_kv_heads=1, head_size=1, dtype=torch.float32)
        self.scheduler = config.scheduler_config.get_scheduler_cls()(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(
                num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
            ),
            structured_output_manager=StructuredOutputManager(config),
            block_size=self.block_size,
            log_stats=False,
        )
        self.runner = FakeRunner(self.block_size)
        hash_fn = get_hash_fn_by_name("sha256")
        init_none_hash(hash_fn)
        caching = config.cache_config.enable_prefix_caching
        self.hasher = get_request_block_hasher(self.block_size, hash_fn) if caching else None
        self.outputs: dict[str, list[int]] = {}
        self.finished: dict[str, str] = {}
        self.steps = 0

    def add(self, rid: str, prompt: list[int], max_tokens: int, scale=None, negative=None, priority=0) -> None:
        extra = None
        if scale is not None:
            extra = {"guidance_scale": scale, "negative_prompt_token_ids": negative or prompt[-1:]}
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, extra_args=extra)
        request = Request(
            request_id=rid,
            prompt_token_ids=prompt,
            sampling_params=params,
            pooling_params=None,
            arrival_time=float(len(self.outputs)),
            priority=priority,
            block_hasher=self.hasher,
        )
        self.outputs[rid] = []
        self.scheduler.add_request(request)

    def abort(self, rid: str) -> None:
        for request in self.scheduler.finish_requests(rid, RequestStatus.FINISHED_ABORTED):
            self.finished[request.request_id] = "abort"

    def step(self) -> None:
        step = self.scheduler.schedule()
        output = self.runner.execute(self.scheduler, step)
        if not step.total_num_scheduled_tokens:
            output = EMPTY_MODEL_RUNNER_OUTPUT
        self.check_roles()
        for per_client in self.scheduler.update_from_output(step, output).values():
            for one in per_client.outputs:
                assert one.request_id in self.outputs, f"a client sees {one.request_id}"
                self.outputs[one.request_id] += one.new_token_ids
                if one.finish_reason is not None:
                    self.finished[one.request_id] = str(one.finish_reason)
        self.scheduler.check_integrity()
        self.steps += 1

    def check_roles(self) -> None:
        """Under the even split, no role holds more than its half."""
        limit = getattr(self.scheduler._split, "limit", None)
        if limit is not None:
            entries = self.scheduler._roles.entries(self.scheduler._groups.is_follower)
            assert max(entries) <= limit, (entries, limit)

    def run(self, max_steps: int = 20_000) -> None:
        while self.scheduler.has_requests():
            self.step()
            assert self.steps < max_steps, f"no progress: {self.scheduler.guidance_stats()}"

    def check_drained(self) -> None:
        """Invariant 2: a finished or aborted group leaves no block, no slot, no id behind."""
        stats = self.scheduler.guidance_stats()
        assert stats["running"] == stats["waiting"] == stats["groups"] == 0, stats
        assert stats["free_blocks"] == stats["total_blocks"], stats
        assert not self.scheduler.requests
        for rid, tokens in self.outputs.items():
            assert rid in self.finished, rid
            assert tokens == [model_token(rid, i) for i in range(len(tokens))], rid


def random_load(sim: Simulation, rng: random.Random, num_requests: int, abort_share: float = 0.02) -> None:
    """Random arrivals, lengths, scales, priorities and aborts, until everything has finished."""
    shared = [rng.randrange(4, VOCAB) for _ in range(64)]
    added = 0
    while added < num_requests or sim.scheduler.has_requests():
        for _ in range(rng.choice((0, 0, 1, 1, 2, 5)) if added < num_requests else 0):
            _add_random(sim, rng, f"r{added}", shared)
            added += 1
        live = [r for r in sim.outputs if r not in sim.finished]
        if live and rng.random() < abort_share:
            sim.abort(rng.choice(live))
        sim.step()
        assert sim.steps < 50_000, f"no progress: {sim.scheduler.guidance_stats()}"


def _add_random(sim: Simulation, rng: random.Random, rid: str, shared: list[int]) -> None:
    def prompt(longest: int) -> list[int]:
        head = shared[: rng.choice((0, 0, 16, 33, 64))]
        return (head + [rng.randrange(4, VOCAB) for _ in range(rng.randint(1, longest))])[-longest:]

    pool = (sim.scheduler.guidance_stats()["total_blocks"] - 2) * sim.block_size
    longest = min(100, pool // 2 - 40)
    guided = rng.random() < 0.7
    sim.add(
        rid,
        prompt(longest),
        max_tokens=rng.randint(1, 30),
        scale=rng.choice((-1.0, 0.0, 1.5, 3.0)) if guided else None,
        negative=prompt(longest) if guided and rng.random() < 0.8 else None,
        priority=rng.randint(0, 2),
    )
