"""Everything that the plugin replaces inside vLLM, as a table (shown in docs/patches.md).

`apply` is called only in processes that run a guided engine. An unguided vLLM in the same
environment stays as it is (tests/contract/test_patches.py). vLLM lets its users replace some
classes by name or by subclassing (the scheduler, the worker, the GPU model runner). These are not
patches.
"""

from __future__ import annotations

from cfg_core import patches
from cfg_core.patches import Patch

_CORE = "cfg_core.vllm_plugin.core"
_FRONTEND = "cfg_core.vllm_plugin.frontend"
_WORKER = "cfg_core.vllm_plugin.worker"
_LAST_ADAPTER = f"{_WORKER}.cpu_worker:takes_last_adapter"
_FAULTS = "tests/contract/test_stock_faults.py"
_NO_HOOK = "no hook for it up to 0.33.0"

PATCHES = (
    Patch(
        target="vllm.v1.engine.input_processor:InputProcessor.process_inputs",
        by=f"{_FRONTEND}.admission:process_inputs",
        process="frontend",
        reason=(
            "Every entry point passes each request through it. Guidance is checked and resolved "
            "there, where an error still reaches the caller."
        ),
        upstream=_NO_HOOK,
        test="tests/engine/test_requests.py",
    ),
    Patch(
        target="vllm.sampling_params:SamplingParams._validate_structured_outputs",
        by=f"{_FRONTEND}.grammar_sandbox:validate_structured_outputs",
        process="frontend",
        reason=(
            "vLLM compiles a grammar on the event loop to validate it. A grammar that passed "
            "its trial in another process is not validated again."
        ),
        upstream=_NO_HOOK,
        test="tests/engine/test_grammar_sandbox.py",
    ),
    Patch(
        target="vllm.v1.engine.output_processor:OutputProcessor.process_outputs",
        by=f"{_FRONTEND}.guided_tokens:process_outputs",
        process="frontend",
        reason=(
            "The engine core sends the count of guided tokens in a field that clients would see. "
            "It is removed here."
        ),
        upstream="EngineCoreOutput has no field for extensions",
        test="tests/simulation/test_guided_tokens.py",
    ),
    Patch(
        target="vllm.v1.engine.logprobs:LogprobsProcessor.from_new_request",
        by=f"{_FRONTEND}.logprobs:from_new_request",
        process="frontend",
        reason=(
            "`guidance_logprobs`: notes which requests asked for the streams' logprobs. "
            "`guidance_score_tokens`: tokens before the scored ones have no logprobs."
        ),
        upstream=_NO_HOOK,
        test="tests/engine/test_requests.py",
    ),
    Patch(
        target="vllm.v1.engine.logprobs:LogprobsProcessor._update_sample_logprobs",
        by=f"{_FRONTEND}.logprobs:update_sample_logprobs",
        process="frontend",
        reason="`guidance_logprobs`: reads the columns that the workers added.",
        upstream=_NO_HOOK,
        test="tests/engine/test_requests.py",
    ),
    *(
        Patch(
            target=f"vllm.entrypoints.openai.{kind}:{request}.to_beam_search_params",
            by=f"{_FRONTEND}.beam_search:to_beam_search_params",
            process="frontend",
            reason=(
                "Each step of a beam search makes requests without the client's extra arguments. "
                "Guidance would be ignored, so it is refused."
            ),
            upstream=_NO_HOOK,
            test="tests/engine/test_vllm_serve.py",
        )
        for kind, request in (
            ("completion.protocol", "CompletionRequest"),
            ("chat_completion.protocol", "ChatCompletionRequest"),
        )
    ),
    Patch(
        target="vllm.v1.engine.core:EngineCore.preprocess_add_request",
        by=f"{_CORE}.arrivals:preprocess_add_request",
        process="engine core",
        reason=(
            "Images, audio and video of followers come behind the leader's. They are taken away "
            "before vLLM makes the leader, and given to the followers. Followers' prompts are "
            "made and hashed here, where vLLM makes and hashes the leader's."
        ),
        upstream="a request has one prompt",
        test="tests/simulation/test_arrivals.py",
    ),
    Patch(
        target="vllm.v1.engine.core:EngineCore.guidance_stats",
        by=f"{_CORE}.stats:utility_method",
        process="engine core",
        reason="Frontends ask the engine core for counts as for its other utility methods.",
        upstream="utility methods are methods of EngineCore; there is no registry for others",
        test="tests/contract/test_serving_names.py",
        adds=True,
    ),
    Patch(
        target="vllm.distributed.device_communicators.shm_broadcast:MessageQueue.dequeue",
        by=f"{_CORE}.remote_queues:dequeue",
        process="engine core",
        reason=(
            "The wait for a worker on another machine ends when the executor treats the worker "
            "as failed. Without this, the engine hangs."
        ),
        upstream="fault of 0.32.0 and 0.33.0",
        test=_FAULTS,
    ),
    Patch(
        target="vllm.v1.structured_output:StructuredOutputManager.__class__",
        by=f"{_CORE}.grammar_manager:adopt",
        process="engine core",
        reason=(
            "Each grammar is compiled by the backend that was chosen for it, and its time per "
            "token is limited. Aborting a request cancels its compilation."
        ),
        upstream="one backend for all requests, no time limit, no cancellation (up to 0.33.0)",
        test="tests/engine/test_grammars.py",
        per_object=True,
    ),
    Patch(
        target="vllm.v1.core.kv_cache_manager:KVCacheManager.allocate_slots",
        by=f"{_CORE}.kv_roles:EvenSplit.enforce",
        process="engine core",
        reason="`kv_split: even`: a stream gets no blocks beyond its role's half of the pool.",
        upstream=_NO_HOOK,
        test="tests/engine/test_kv_split.py",
        per_object=True,
    ),
    Patch(
        target="vllm.v1.core.kv_cache_manager:KVCacheManager.get_computed_blocks",
        by=f"{_CORE}.scoring:limit_hits",
        process="engine core",
        reason="`guidance_score_tokens`: notes of which stream cached blocks are looked up.",
        upstream="a request reads the prefix cache as far as it can, or not at all",
        test="tests/engine/test_scoring.py",
        per_object=True,
    ),
    Patch(
        target="vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator.find_longest_cache_hit",
        by=f"{_CORE}.scoring:limit_hits",
        process="engine core",
        reason="Cached blocks end before the scored tokens, whose hidden states are needed.",
        upstream="as above",
        test="tests/engine/test_scoring.py",
        per_object=True,
    ),
    Patch(
        target=(
            "vllm.v1.worker.gpu.sample.prompt_logprob:PromptLogprobsWorker.compute_prompt_logprobs"
        ),
        by=f"{_WORKER}.v2:GuidedRunnerV2",
        process="worker",
        reason="The scores of groups come with vLLM's log-probabilities of prompts (V2).",
        upstream=_NO_HOOK,
        test="tests/engine/test_scoring.py",
        per_object=True,
    ),
    Patch(
        target="vllm.v1.worker.cpu_worker:CPUWorker.model_runner",
        by=f"{_WORKER}.cpu_worker:GuidedCPUWorker",
        process="worker (CPU)",
        reason=(
            "The model runner is replaced with a guided one. GPU workers make theirs in "
            "`_make_model_runner`, which subclasses may override. The CPU worker has no "
            "such method."
        ),
        upstream=_NO_HOOK,
        test="tests/contract/test_patches.py",
        per_object=True,
    ),
    Patch(
        target="vllm.v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer.__class__",
        by=f"{_WORKER}.drafter_v1:guide_drafter",
        process="worker",
        reason="The drafter blends the logits of each group, and may skip steps.",
        upstream=_NO_HOOK,
        test="tests/engine/test_speculation.py",
        per_object=True,
    ),
    Patch(
        target="vllm.v1.worker.gpu.spec_decode.speculator:DraftModelSpeculator.__class__",
        by=f"{_WORKER}.drafter_v2:guide_drafter",
        process="worker",
        reason="The same on Model Runner V2.",
        upstream=_NO_HOOK,
        test="tests/engine/test_speculation.py",
        per_object=True,
    ),
    Patch(
        target="vllm.v1.worker.gpu.spec_decode.speculator:BaseSpeculator.propose",
        by=f"{_WORKER}.drafter_v2:copy_drafts",
        process="worker",
        reason="Followers get their leader's drafts, whatever kind of drafter made them.",
        upstream=_NO_HOOK,
        test="tests/engine/test_speculation.py",
        per_object=True,
    ),
    Patch(
        target="vllm.v1.sample.sampler:Sampler.apply_logits_processors",
        by=f"{_WORKER}.processors_v1:process_after",
        process="worker",
        reason="Logits processors per sequence run after vLLM's own (V1; V2 has a list for them).",
        upstream="vLLM's own processors are one object for the batch, and do not run with drafts",
        test="tests/engine/test_sequence_processors.py",
        per_object=True,
    ),
    Patch(
        target="vllm.v1.sample.rejection_sampler:RejectionSampler.apply_logits_processors",
        by=f"{_WORKER}.processors_v1:process_after",
        process="worker",
        reason="The same for the rows before each draft.",
        upstream="as above",
        test="tests/engine/test_sequence_processors.py",
        per_object=True,
    ),
    Patch(
        target=(
            "vllm.model_executor.models.interfaces_base:VllmModelForTextGeneration.compute_logits"
        ),
        by=f"{_WORKER}.v1:GuidedRunnerV1",
        process="worker",
        reason="Most groups are blended before the model's head (V1; V2 asks for logits later).",
        upstream="V1 computes logits inside of `execute_model`",
        test="tests/engine/test_head.py",
        per_object=True,
    ),
    Patch(
        target="vllm.v1.worker.gpu.model_runner:GPUModelRunner.model",
        by=f"{_WORKER}.v2:GuidedRunnerV2",
        process="worker",
        reason=(
            "During V2's `sample`, the model's LM head is one that blends, because V2 applies the "
            "grammar's mask in the same method."
        ),
        upstream=_NO_HOOK,
        test="tests/contract/test_structure.py",
        per_object=True,
    ),
    Patch(
        target="vllm.v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer.model",
        by=f"{_WORKER}.drafter_v1:GuidedProposer",
        process="worker",
        reason="While drafts are sampled, the draft model's LM head is one that blends.",
        upstream=_NO_HOOK,
        test="tests/engine/test_speculation.py",
        per_object=True,
    ),
    Patch(
        target="vllm.v1.sample.rejection_sampler:expand_batch_to_tokens",
        by=f"{_WORKER}.cpu_worker:make_expand_batch_to_tokens",
        process="worker (CPU)",
        reason=(
            "vLLM's CPU kernel loses its output: under speculation, temperature, top-k and top-p "
            "of sampled requests are read from uninitialized memory."
        ),
        upstream="fault of 0.32.0 and 0.33.0",
        test=_FAULTS,
    ),
    Patch(
        target="vllm.lora.ops.torch_ops.lora_ops:bgmv_shrink",
        by=f"{_WORKER}.cpu_worker:make_bgmv_shrink",
        process="worker (CPU)",
        reason=(
            "vLLM reads -1 (no adapter) as the last adapter: in a batch with requests that use an "
            "adapter, requests without one use it too."
        ),
        upstream="fault of 0.32.0, fixed in 0.33.0",
        test=_FAULTS,
        fault=_LAST_ADAPTER,
    ),
    Patch(
        target="vllm.lora.punica_wrapper.punica_cpu:bgmv_shrink",
        by=f"{_WORKER}.cpu_worker:make_bgmv_shrink",
        process="worker (CPU)",
        reason="The same function, imported by name.",
        upstream="as above",
        test=_FAULTS,
        fault=_LAST_ADAPTER,
    ),
    Patch(
        target="vllm.model_executor.layers.mamba.mamba_mixer2:MambaMixer2.get_kv_cache_spec",
        by=f"{_WORKER}.cpu_mamba:make_get_kv_cache_spec",
        process="worker (CPU)",
        reason=(
            "With prefix caching, a Mamba2 layer promises to save its state inside of a chunk. "
            "The CPU kernel cannot: the first prompt that fills a block ends the engine."
        ),
        upstream="fault of 0.32.0",
        test=_FAULTS,
        fault=f"{_WORKER}.cpu_mamba:returns_last_state_only",
    ),
)


def apply(process: str) -> None:
    """Apply the patches of this process. A second call does nothing."""
    patches.apply(patch for patch in PATCHES if patch.process == process)
