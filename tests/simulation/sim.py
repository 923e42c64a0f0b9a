"""The real GuidedScheduler and KV cache manager, driven by a fake model runner.

For every slot of every physical KV block, the fake runner records *which prefix* was written there.
For each sampled row, it checks that the stream's block table holds exactly its own prefix. So it
finds a lost block, a block that was allocated twice, a token computed at the wrong place, or a
stream out of lockstep at once, without the cost of a model. It follows the protocols of both
runners, with async scheduling and pipeline stages (paths.py).

    python -m tests.simulation --joint-steps 1000000     a long run
    python -m tests.simulation --paths states            only with states, which nothing can undo
    python -m tests.simulation --seed 7 --path v2-async  replays one
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import torch
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import (
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
)
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from cfg_core.policy.draft_cost import DraftCosts
from cfg_core.policy.groups import FOLLOWER_SUFFIX
from cfg_core.policy.pool import EVEN
from cfg_core.vllm_plugin.core import grammar_manager
from cfg_core.vllm_plugin.wire import guided_tokens, token_strengths
from tests.simulation.grammar import FakeGrammar, show_tokens
from tests.simulation.paths import V1, EnginePath, runner_version
from tests.simulation.requests import SimRequest
from tests.simulation.runner import FakeRunner, Rejection
from tests.simulation.texts import model_token
from tests.support.fixed_cost import FixedCost

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput


TRIAL_EVERY = 8
"""Trials of the cost of drafts, in steps: often, as loads are short."""
TOKEN_SECONDS = 0.05
"""What one more token costs a step, in steps of none."""


class Simulation:
    """An engine core in miniature: `add`, `abort`, `step`, `run`, with every invariant checked on
    each step.

    token_cost: what gates take for the cost of one more token, in steps. By default, probes pay
        where a gate is not nearly always open.
    """

    def __init__(
        self,
        config: VllmConfig,
        num_blocks: int,
        path: EnginePath = V1,
        token_cost: float = 1.0,
    ) -> None:
        self.config = config
        # vLLM's CPU platform turns it off.
        config.scheduler_config.async_scheduling = path.asynchronous
        config.parallel_config.pipeline_parallel_size = path.stages
        self.block_size = config.cache_config.block_size
        config.cache_config.num_gpu_blocks = num_blocks
        kv = self._kv_config(path, num_blocks)
        block_size, hash_block_size = resolve_kv_cache_block_sizes(kv, config)
        with runner_version(path.v2):
            self.depth = config.max_concurrent_batches
            self.scheduler = config.scheduler_config.get_scheduler_cls()(
                vllm_config=config,
                kv_cache_config=kv,
                structured_output_manager=StructuredOutputManager(config),
                block_size=block_size,
                hash_block_size=hash_block_size,
                log_stats=False,
            )
        self.scheduler._probes.cost = FixedCost(token_cost)
        self.spent = 0.0  # seconds that the steps would have taken: runs must not differ
        self.scheduler._speculation.costs = DraftCosts(every=TRIAL_EVERY)
        self.scheduler._speculation.clock = lambda: self.spent
        assert self.scheduler.use_v2_model_runner == path.v2
        self.runner = FakeRunner(self.block_size, path)
        self.in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput, list[Rejection]]] = deque()
        self.grammars: list[Request] = []
        show_tokens(self.scheduler.structured_output_manager)
        self.hasher = self._hasher()
        self.outputs: dict[str, list[int]] = {}
        self.finished: dict[str, str] = {}
        self.guided: dict[str, int] = {}
        self.scores: dict[str, list[int]] = {}
        self.stops: dict[str, set[int]] = {}
        self.begun: dict[str, int] = {}
        self.steps = self.idle = 0

    def _kv_config(self, path: EnginePath, num_blocks: int) -> KVCacheConfig:
        """One layer of attention and, if the path has states, one that is recurrent."""
        cache = self.config.cache_config
        spec = FullAttentionSpec(
            block_size=self.block_size, num_kv_heads=1, head_size=1, dtype=torch.float32
        )
        groups = [KVCacheGroupSpec(["layer"], spec)]
        if path.states:
            aligned = path.states == "align"
            cache.mamba_cache_mode = path.states
            cache.enable_prefix_caching = aligned
            state = MambaSpec(
                block_size=self.block_size if aligned else self.config.model_config.max_model_len,
                shapes=((2 * self.block_size,),),
                dtypes=(torch.float32,),
                mamba_cache_mode=path.states,
                num_speculative_blocks=path.drafts,
            )
            groups.append(KVCacheGroupSpec(["recurrent layer"], state))
        return KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups)

    def _hasher(self) -> Any:
        hash_fn = get_hash_fn_by_name("sha256")
        init_none_hash(hash_fn)
        caching = self.config.cache_config.enable_prefix_caching
        return get_request_block_hasher(self.block_size, hash_fn) if caching else None

    def add(self, rid: str, prompt: list[int], max_tokens: int, **more: Any) -> None:
        """Add a request. more: fields of SimRequest."""
        asked = SimRequest(rid, prompt, max_tokens, **more)
        request = asked.request(arrival_time=float(len(self.outputs)), hasher=self.hasher)
        if asked.grammar:
            self.grammars.append(request)
        self.outputs[rid] = []
        self.begun[rid] = asked.begun
        self.stops[rid] = set(asked.stop)
        if (rules := asked.rules()) is not None:
            self.runner.rules[rid] = rules
        self.scheduler.add_request(request)

    @property
    def busy(self) -> bool:
        return self.scheduler.has_requests() or bool(self.in_flight)

    def compile_grammars(self) -> None:
        """Do what a thread of vLLM does some time after the request arrived."""
        manager = self.scheduler.structured_output_manager
        while self.grammars:
            request, grammar = self.grammars.pop(), FakeGrammar()
            assert grammar_manager.catch_up(manager, request, grammar)
            request.structured_output_request.grammar = grammar

    def abort(self, rid: str) -> None:
        for request in self.scheduler.finish_requests(rid, RequestStatus.FINISHED_ABORTED):
            self.finished[request.request_id] = "abort"

    def step(self) -> None:
        """Do a step as `EngineCore.step` and `step_with_batch_queue` do.

        They fill the queue of steps in flight, and then process one.
        """
        if self.scheduler.has_requests():
            step = self.scheduler.schedule()
            self.check_roles()
            self.check_windows()
            output = self.runner.execute(step)
            self.spent += 1 + TOKEN_SECONDS * step.total_num_scheduled_tokens
            self.check_computed()
            executed = step.total_num_scheduled_tokens > 0
            self.idle = (
                0 if executed or self.grammars or not self.scheduler.requests else self.idle + 1
            )
            assert self.idle <= self.depth + 2, f"stalled: {self.scheduler.guidance_stats()}"
            output = output if executed else EMPTY_MODEL_RUNNER_OUTPUT
            self.in_flight.append((step, output, self.runner.rejections))
            self.steps += 1
            if len(self.in_flight) < self.depth and (executed or self.scheduler.has_requests()):
                return
        if self.in_flight:
            self._take(*self.in_flight.popleft())

    def _take(
        self, step: SchedulerOutput, output: ModelRunnerOutput, rejections: list[Rejection]
    ) -> None:
        self.runner.hear_of(rejections)
        for per_client in self.scheduler.update_from_output(step, output).values():
            for one in per_client.outputs:
                assert one.request_id in self.outputs, (
                    f"a client would get the output of {one.request_id}"
                )
                if one.new_prompt_logprobs_tensors is not None:
                    assert not self.outputs[one.request_id], "scores must come first"
                    rows = len(one.new_prompt_logprobs_tensors.logprobs)
                    self.scores.setdefault(one.request_id, []).append(rows)
                self.outputs[one.request_id] += one.new_token_ids
                self.guided[one.request_id] = self.guided.get(one.request_id, 0) + guided_tokens(
                    one
                )
                self._check_gates(one.request_id, token_strengths(one)[0])
                if one.finish_reason is not None:
                    self.finished[one.request_id] = str(one.finish_reason)
        if self.runner.path.drafts and not self.runner.path.asynchronous and output.req_ids:
            drafts = [
                self.runner.sequences[r].drafts
                for r in output.req_ids
                if r in self.runner.sequences
            ]
            ids = [r for r in output.req_ids if r in self.runner.sequences]
            self.scheduler.update_draft_token_ids(DraftTokenIds(ids, [list(d) for d in drafts]))
        self.scheduler.check_integrity()

    def _check_gates(self, rid: str, strengths: list[float]) -> None:
        """The last tokens of an output were guided where their gates were open."""
        rules, end = self.runner.rules.get(rid), len(self.outputs[rid])
        if rules is not None and rules.gates is not None:
            wanted = list(map(float, rules.gates[end - len(strengths) : end]))
            assert strengths == wanted, f"{rid}: {strengths} is the strength of other tokens"

    def check_computed(self) -> None:
        """Scheduler and worker agree on how far each running stream has been computed."""
        for request in self.scheduler.running:
            sequence = self.runner.sequences[request.request_id]
            computed = sequence.computed + sequence.rejected
            assert request.num_computed_tokens == computed, (
                f"{request.request_id}: the worker has computed {computed} tokens"
            )
            stale = request.num_stale_output_tokens and self.scheduler._groups.of(
                request.request_id
            )
            assert not stale, (
                f"{request.request_id} runs while output from before its preemption is in flight"
            )

    def check_roles(self) -> None:
        """Under the even split, no role holds more than its half."""
        pool = self.scheduler._split.pool
        if pool.kv_split == EVEN:
            entries = self.scheduler._roles.entries(self.scheduler._groups.is_follower)
            assert max(entries) <= pool.limit, (entries, pool)

    def check_windows(self) -> None:
        """Outside of its window, a request has no follower, and so no block for one."""
        for rid, rules in self.runner.rules.items():
            leader = self.scheduler.requests.get(rid)
            if leader is not None and not rules.guides(leader.num_output_tokens):
                followers = [f"{rid}{FOLLOWER_SUFFIX}{i}" for i in range(len(rules.lengths))]
                held = self.scheduler._roles.held(followers)
                assert not held, f"{rid} holds blocks for followers outside of its window"
                assert self.scheduler.requests.keys().isdisjoint(followers), rid

    def run(self, max_steps: int = 20_000) -> None:
        self.compile_grammars()
        while self.busy:
            self.step()
            assert self.steps < max_steps, f"no progress: {self.scheduler.guidance_stats()}"

    def check_drained(self) -> None:
        """A finished or aborted group leaves no block, no slot and no id behind."""
        stats = self.scheduler.guidance_stats()
        assert stats["running"] == stats["waiting"] == stats["groups"] == 0, stats
        assert stats["free_blocks"] == stats["total_blocks"], stats
        assert not self.scheduler.requests
        assert stats["gate_saved_tokens"] <= self.runner.saved, "suffixes were not saved"
        for rid, tokens in self.outputs.items():
            rules = self.runner.rules.get(rid)
            new = range(self.begun[rid], len(tokens))
            guided = sum(map(rules.guides, new)) if rules is not None else 0
            assert self.guided.get(rid, 0) == guided, f"{rid}: wrong count of guided tokens"
            scored = [rules.scored] if rules is not None and rules.scored and tokens else []
            assert self.scores.get(rid, []) == scored, f"{rid}: wrong scores"
            assert rid in self.finished, rid
            assert tokens == [model_token(rid, i) for i in range(len(tokens))], rid
            assert not tokens or len(tokens) > self.begun[rid], rid
            assert self.stops[rid].isdisjoint(tokens[:-1]), f"{rid} continued after its stop token"
        assert not self.in_flight
