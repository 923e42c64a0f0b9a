"""The order of calls inside vLLM that our hooks rely on. No signature shows it."""

import inspect


def test_schedule_asks_the_lookahead_hook_for_running_and_for_waiting_requests():
    """The scheduler relies on both calls to hold back a stream whose partner cannot run."""
    from vllm.v1.core.sched.scheduler import Scheduler

    assert inspect.getsource(Scheduler.schedule).count("self._reserve_prefill_lookahead(") == 2


def test_v2_asks_the_model_for_logits_once_and_masks_them_afterwards():
    """The blend is computed between the two calls.

    `compute_logits_local` is used for batch-sharded sampling only, which is refused.
    """
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    source = inspect.getsource(GPUModelRunner.sample)
    assert source.count("self.model.compute_logits(") == 1
    assert source.index("self.model.compute_logits(") < source.index("apply_grammar_bitmask(")
    assert source.count("self.model.") == 2
    assert "self.model.compute_logits_local(" in source


def test_v2_takes_back_tokens_that_are_reported_as_rejected():
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    source = inspect.getsource(GPUModelRunner.sample_tokens)
    assert (
        source.index("self.sample(")
        < source.index("self.pp_handler.broadcast(")
        < source.index("AsyncOutput(")
    )
    assert source.index("AsyncOutput(") < source.index("self.postprocess_sampled(")
