"""What the plugin changes inside vLLM, as two tables (shown in docs/patches.md).

`apply` is called only in processes that run a guided engine. An unguided vLLM in the same
environment stays as it is (tests/contract/test_patches.py). vLLM lets its users replace some
classes by name or by subclassing (the scheduler, the worker, the GPU model runner). These are
neither patches nor uses of private names.
"""

from __future__ import annotations

from functools import partial

from cfg_core import patching
from cfg_core.patching import Patch, PrivateUse

_CORE = "cfg_core.vllm_plugin.core"
_FRONTEND = "cfg_core.vllm_plugin.frontend"
_WORKER = "cfg_core.vllm_plugin.worker"
_FAULTS = "tests/contract/test_stock_faults.py"
_NEEDED = "tests/contract/test_still_needed.py"
_NO_HOOK = "no hook for it up to 0.33.0"
_RUNNER_V1 = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
_RUNNER_V2 = "vllm.v1.worker.gpu.model_runner:GPUModelRunner"

_frontend = partial(Patch, process="frontend", upstream=_NO_HOOK)
_engine_core = partial(Patch, process="engine core")
_on_cpu = partial(Patch, process="worker (CPU)", test=_FAULTS)

PATCHES: tuple[Patch, ...] = (
    _frontend(
        target="vllm.v1.engine.input_processor:InputProcessor.process_inputs",
        by=f"{_FRONTEND}.admission:process_inputs",
        reason="Every entry point passes each request through it. Guidance is checked and resolved "
        "there, where an error still reaches the caller.",
        test="tests/engine/test_requests.py",
        needed_while="vllm.v1.engine.async_llm:AsyncLLM.__init__ calls InputProcessor",
    ),
    _frontend(
        target="vllm.sampling_params:SamplingParams._validate_structured_outputs",
        by=f"{_FRONTEND}.grammar_sandbox:validate_structured_outputs",
        reason="vLLM compiles a grammar on the event loop to validate it. A grammar that passed "
        "its trial in another process is not validated again.",
        test="tests/engine/test_grammar_sandbox.py",
        needed_while="vllm.sampling_params:SamplingParams._validate_structured_outputs "
        "calls validate_xgrammar_grammar",
    ),
    _frontend(
        target="vllm.v1.engine.output_processor:OutputProcessor.process_outputs",
        by=f"{_FRONTEND}.guided_tokens:process_outputs",
        reason="The engine core sends the count of guided tokens in a field that clients would "
        "see. It is removed here.",
        upstream="EngineCoreOutput has no field for extensions",
        test="tests/simulation/test_guided_tokens.py",
        needed_while=f"{_NEEDED}::test_an_output_has_no_field_for_extensions",
    ),
    _frontend(
        target="vllm.v1.engine.logprobs:LogprobsProcessor.from_new_request",
        by=f"{_FRONTEND}.logprobs:from_new_request",
        reason="`guidance_logprobs`: notes which requests asked for the streams' logprobs. "
        "`guidance_score_tokens`: tokens before the scored ones have no logprobs.",
        test="tests/engine/test_requests.py",
        needed_while="vllm.v1.engine.output_processor:RequestState.from_new_request "
        "calls LogprobsProcessor",
    ),
    _frontend(
        target="vllm.v1.engine.logprobs:LogprobsProcessor._update_sample_logprobs",
        by=f"{_FRONTEND}.logprobs:update_sample_logprobs",
        reason="`guidance_logprobs`: reads the columns that the workers added.",
        test="tests/engine/test_requests.py",
        needed_while="vllm.v1.engine.output_processor:RequestState.from_new_request "
        "calls LogprobsProcessor",
    ),
    _frontend(
        target="vllm.v1.engine.parallel_sampling:ParentRequest.get_child_info",
        by=f"{_FRONTEND}.begun:get_child_info",
        reason="`begun_token_ids`: each choice of `n` gets its own tokens.",
        test="tests/engine/test_begun.py",
        needed_while="vllm.v1.engine.async_llm:AsyncLLM.add_request calls ParentRequest",
    ),
    *(
        _frontend(
            target=f"vllm.entrypoints.openai.{kind}:{request}.to_beam_search_params",
            by=f"{_FRONTEND}.beam_search:to_beam_search_params",
            reason="Each step of a beam search makes requests without the client's extra "
            "arguments. Guidance would be ignored, so it is refused.",
            test="tests/engine/test_vllm_serve.py",
            needed_while=f"{_NEEDED}::test_a_beam_search_has_no_extra_arguments",
        )
        for kind, request in (
            ("completion.protocol", "CompletionRequest"),
            ("chat_completion.protocol", "ChatCompletionRequest"),
        )
    ),
    _engine_core(
        target="vllm.v1.engine.core:EngineCore.preprocess_add_request",
        by=f"{_CORE}.arrivals:preprocess_add_request",
        reason="Images, audio and video of followers come behind the leader's. They are taken away "
        "before vLLM makes the leader, and given to the followers. Followers' prompts are made and "
        "hashed here, where vLLM makes and hashes the leader's.",
        upstream="a request has one prompt",
        test="tests/simulation/test_arrivals.py",
        needed_while="vllm.v1.engine.core:EngineCoreProc.run_engine_core calls EngineCoreProc",
    ),
    _engine_core(
        target="vllm.v1.engine.core:EngineCore.guidance_stats",
        by=f"{_CORE}.stats:utility_method",
        reason="Frontends ask the engine core for counts as for its other utility methods.",
        upstream="utility methods are methods of EngineCore; there is no registry for others",
        test="tests/contract/test_serving_names.py",
        needed_while="vllm.v1.engine.core:EngineCoreProc._handle_client_request "
        "calls getattr(self, method_name)",
        adds=True,
    ),
    _engine_core(
        target="vllm.distributed.device_communicators.shm_broadcast:MessageQueue.dequeue",
        by=f"{_CORE}.remote_queues:dequeue",
        reason="The wait for a worker on another machine ends when the executor treats the worker "
        "as failed. Without this, the engine hangs.",
        upstream="fault of 0.32.0 and 0.33.0",
        test=_FAULTS,
        needed_while=f"{_FAULTS}::test_stock_vllm_still_waits_after_the_queue_has_ended",
    ),
    _on_cpu(
        target="vllm.v1.sample.rejection_sampler:expand_batch_to_tokens",
        by=f"{_WORKER}.cpu_faults:make_expand_batch_to_tokens",
        reason="vLLM's CPU kernel loses its output: under speculation, temperature, top-k and "
        "top-p of sampled requests are read from uninitialized memory.",
        upstream="fault of 0.32.0 and 0.33.0",
        needed_while=f"{_FAULTS}::test_stock_vllm_still_has_the_fault",
    ),
    *(
        _on_cpu(
            target=f"{module}:bgmv_shrink",
            by=f"{_WORKER}.cpu_faults:make_bgmv_shrink",
            reason=reason,
            upstream="fault of 0.32.0, fixed in 0.33.0",
            needed_while=f"{_FAULTS}::test_a_tested_version_still_needs_the_patch_of_adapters",
            fault=f"{_WORKER}.cpu_faults:takes_last_adapter",
        )
        for module, reason in (
            (
                "vllm.lora.ops.torch_ops.lora_ops",
                "vLLM reads -1 (no adapter) as the last adapter: in a batch with requests that use "
                "an adapter, requests without one use it too.",
            ),
            ("vllm.lora.punica_wrapper.punica_cpu", "The same function, imported by name."),
        )
    ),
    _on_cpu(
        target="vllm.model_executor.layers.mamba.mamba_mixer2:MambaMixer2.get_kv_cache_spec",
        by=f"{_WORKER}.cpu_faults:make_get_kv_cache_spec",
        reason="With prefix caching, a Mamba2 layer promises to save its state inside of a chunk. "
        "The CPU kernel cannot: the first prompt that fills a block ends the engine.",
        upstream="fault of 0.32.0",
        needed_while=f"{_FAULTS}::test_stock_mamba2_on_a_cpu_still_has_the_fault",
        fault=f"{_WORKER}.cpu_faults:returns_last_state_only",
    ),
    _on_cpu(
        target="vllm.model_executor.layers.mamba.ops.cpu.gdn_attention:_spec_forward",
        by=f"{_WORKER}.cpu_faults:make_spec_forward",
        reason="A model with gated delta nets under speculation: a sequence with fewer tokens in a "
        "step than were accepted in the last one ends the engine.",
        upstream="fault of 0.32.0",
        needed_while=f"{_FAULTS}::test_stock_gated_delta_nets_still_take_no_shorter_sequence",
    ),
    *(
        _on_cpu(
            target=f"vllm.v1.worker.mamba_utils:MambaSpecDecodeGPUContext.{method}",
            by=f"{_WORKER}.cpu_faults:make_{method}",
            reason="A model with gated delta nets under speculation and prefix caching, which is "
            "vLLM's default: the first step ends the engine, for want of a kernel.",
            upstream="fault of 0.32.0",
            needed_while=f"{_FAULTS}::test_stock_vllm_still_has_no_kernel_for_cached_states",
        )
        for method in ("run_fused_precopy", "run_fused_postprocess")
    ),
)

_in_core = partial(PrivateUse, process="engine core")
_in_worker = partial(PrivateUse, process="worker", upstream=_NO_HOOK)

USES: tuple[PrivateUse, ...] = (
    _in_core(
        target="vllm.v1.structured_output:StructuredOutputManager.__class__",
        by=f"{_CORE}.grammar_manager:adopt",
        reason="Each grammar is compiled by the backend that was chosen for it, and its time per "
        "token is limited. Aborting a request cancels its compilation.",
        upstream="one backend for all requests, no time limit, no cancellation (up to 0.33.0)",
        test="tests/engine/test_grammars.py",
        needed_while="vllm.v1.engine.core:EngineCore.__init__ calls StructuredOutputManager",
    ),
    _in_core(
        target="vllm.v1.core.kv_cache_manager:KVCacheManager.allocate_slots",
        by=f"{_CORE}.kv_roles:EvenSplit.enforce",
        reason="`kv_split: even`: a stream gets no blocks beyond its role's half of the pool.",
        upstream=_NO_HOOK,
        test="tests/engine/test_kv_split.py",
        needed_while="vllm.v1.core.sched.scheduler:Scheduler.__init__ calls KVCacheManager",
    ),
    _in_core(
        target="vllm.v1.core.kv_cache_manager:KVCacheManager.get_computed_blocks",
        by=f"{_CORE}.scoring:limit_hits",
        reason="`guidance_score_tokens`: notes of which stream cached blocks are looked up.",
        upstream="a request reads the prefix cache as far as it can, or not at all",
        test="tests/engine/test_scoring.py",
        needed_while=f"{_NEEDED}::test_the_prefix_cache_is_read_whole_or_not_at_all",
    ),
    _in_core(
        target="vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator.find_longest_cache_hit",
        by=f"{_CORE}.scoring:limit_hits",
        reason="Cached blocks end before the scored tokens, whose hidden states are needed.",
        upstream="as above",
        test="tests/engine/test_scoring.py",
        needed_while=f"{_NEEDED}::test_the_prefix_cache_is_read_whole_or_not_at_all",
    ),
    _in_worker(
        target="vllm.v1.worker.gpu.sample.prompt_logprob:PromptLogprobsWorker"
        ".compute_prompt_logprobs",
        by=f"{_WORKER}.v2:GuidedRunnerV2",
        reason="The scores of groups come with vLLM's log-probabilities of prompts (V2).",
        test="tests/engine/test_scoring.py",
        needed_while=f"{_RUNNER_V2}.load_model calls PromptLogprobsWorker",
    ),
    _in_worker(
        target="vllm.v1.worker.cpu_model_runner:CPUModelRunner.__class__",
        by=f"{_WORKER}.cpu_worker:GuidedCPUWorker",
        process="worker (CPU)",
        reason="The model runner is replaced with a guided one, on V2, too. GPU workers make "
        "theirs in `_make_model_runner`, which subclasses may override. The CPU worker makes it "
        "in the middle of another method.",
        test="tests/engine/test_requests.py",
        needed_while="vllm.v1.worker.cpu_worker:CPUWorker.init_device calls CPUModelRunner",
    ),
    _in_worker(
        target="vllm.v1.worker.gpu_input_batch:InputBatch.add_request",
        by=f"{_WORKER}.begun_v1:adding",
        reason="`begun_token_ids`: a new request has output already (V1; V2 can begin so).",
        upstream="V1 adds new requests without output",
        test="tests/engine/test_begun.py",
        needed_while=f"{_RUNNER_V1}._update_states calls CachedRequestState",
    ),
    _in_worker(
        target="vllm.v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer.__class__",
        by=f"{_WORKER}.drafter_v1:guide_drafter",
        reason="The drafter blends the logits of each group, and may skip steps.",
        test="tests/engine/test_speculation.py",
        needed_while=f"{_RUNNER_V1}.__init__ calls DraftModelProposer",
    ),
    _in_worker(
        target="vllm.v1.worker.gpu.spec_decode.speculator:DraftModelSpeculator.__class__",
        by=f"{_WORKER}.drafter_v2:guide_drafter",
        reason="The same on Model Runner V2.",
        test="tests/engine/test_speculation.py",
        needed_while=f"{_RUNNER_V2}.__init__ calls init_speculator",
    ),
    _in_worker(
        target="vllm.v1.worker.gpu.spec_decode.speculator:BaseSpeculator.propose",
        by=f"{_WORKER}.drafter_v2:copy_drafts",
        reason="Followers get their leader's drafts, whatever kind of drafter made them.",
        test="tests/engine/test_speculation.py",
        needed_while=f"{_RUNNER_V2}.__init__ calls init_speculator",
    ),
    *(
        _in_worker(
            target=f"vllm.v1.sample.{sampler}.apply_logits_processors",
            by=f"{_WORKER}.processors_v1:process_after",
            reason=reason,
            upstream="vLLM's own processors are one object for the batch, and do not run with "
            "drafts",
            test="tests/engine/test_sequence_processors.py",
            needed_while=f"{_NEEDED}::test_logits_processors_do_not_run_with_drafts",
        )
        for sampler, reason in (
            (
                "sampler:Sampler",
                "Logits processors per sequence run after vLLM's own (V1; V2 has a list for them).",
            ),
            ("rejection_sampler:RejectionSampler", "The same for the rows before each draft."),
        )
    ),
    _in_worker(
        target="vllm.model_executor.models.interfaces_base:VllmModelForTextGeneration"
        ".compute_logits",
        by=f"{_WORKER}.v1:GuidedRunnerV1",
        reason="Most groups are blended before the model's head (V1; V2 asks for logits later).",
        upstream="V1 computes logits inside of `execute_model`",
        test="tests/engine/test_head.py",
        needed_while=f"{_RUNNER_V1}.execute_model calls self.model.compute_logits",
    ),
    _in_worker(
        target=f"{_RUNNER_V2}.model",
        by=f"{_WORKER}.v2:GuidedRunnerV2",
        reason="During V2's `sample`, the model's LM head is one that blends, because V2 applies "
        "the grammar's mask in the same method.",
        test="tests/contract/test_structure.py",
        needed_while="tests/contract/test_structure.py"
        "::test_v2_asks_the_model_for_logits_once_and_masks_them_afterwards",
    ),
    _in_worker(
        target="vllm.v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer.model",
        by=f"{_WORKER}.drafter_v1:GuidedProposer",
        reason="While drafts are sampled, the draft model's LM head is one that blends.",
        test="tests/engine/test_speculation.py",
        needed_while="vllm.v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer"
        "._sample_draft_tokens calls self.model.compute_logits",
    ),
)

ROWS = (*PATCHES, *USES)


def apply(process: str) -> None:
    """Apply the patches of this process. A second call does nothing."""
    patching.apply(PATCHES, process)
