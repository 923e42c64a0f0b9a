"""The order of calls inside vLLM that our hooks rely on. No signature shows it."""

import ast

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from tests.contract.syntax import called, nodes


def test_schedule_asks_the_lookahead_hook_for_running_and_for_waiting_requests():
    """The scheduler relies on both calls to hold back a stream whose partner cannot run."""
    assert called(Scheduler.schedule).count("self._reserve_prefill_lookahead") == 2


def test_v2_asks_the_model_for_logits_once_and_masks_them_afterwards():
    """The blend is computed between the two calls, and nothing else of the model is used.

    `compute_logits_local` is used for batch-sharded sampling only, which is refused.
    """
    names = called(GPUModelRunner.sample)
    read = [node for node in nodes(GPUModelRunner.sample) if isinstance(node, ast.Attribute)]
    of_model = sorted(node.attr for node in read if ast.unparse(node.value) == "self.model")
    assert of_model == ["compute_logits", "compute_logits_local"]
    (mask,) = {name for name in names if name.endswith(".apply_grammar_bitmask")}
    assert names.index("self.model.compute_logits") < names.index(mask)


def test_v2_takes_back_tokens_that_are_reported_as_rejected():
    names = called(GPUModelRunner.sample_tokens)
    order = ["self.sample", "self.pp_handler.broadcast", "AsyncOutput", "self.postprocess_sampled"]
    assert sorted(order, key=names.index) == order
