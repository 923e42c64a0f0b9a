"""What no signature tells: the order of things in vLLM's own code that our hooks rely on."""

import inspect


def test_schedule_asks_the_lookahead_hook_for_running_and_for_waiting_requests():
    """The hold in lockstep stands on both calls."""
    from vllm.v1.core.sched.scheduler import Scheduler

    assert inspect.getsource(Scheduler.schedule).count("self._reserve_prefill_lookahead(") == 2


def test_v2_asks_the_model_for_logits_once_and_masks_them_afterwards():
    """The blend stands between the two. `compute_logits_local` belongs to batch-sharded sampling,
    which is refused."""
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    source = inspect.getsource(GPUModelRunner.sample)
    assert source.count("self.model.compute_logits(") == 1
    assert source.index("self.model.compute_logits(") < source.index("apply_grammar_bitmask(")
    assert source.count("self.model.") == 2
    assert "self.model.compute_logits_local(" in source


def test_v2_takes_back_what_is_reported_as_rejected():
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    source = inspect.getsource(GPUModelRunner.sample_tokens)
    assert (
        source.index("self.sample(")
        < source.index("self.pp_handler.broadcast(")
        < source.index("AsyncOutput(")
    )
    assert source.index("AsyncOutput(") < source.index("self.postprocess_sampled(")
