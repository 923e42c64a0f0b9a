"""The engine core counts guided tokens itself, so the count can differ from the length of the text.

`check_drained` checks on all random loads that both agree if nothing is wrong.
"""

import dataclasses

import pytest
from vllm import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.request import Request

from cfg_core.policy.groups import FOLLOWER_SUFFIX
from cfg_core.vllm_plugin import vllm_patches, wire
from cfg_core.vllm_plugin.core.followers import make_followers, plan_group
from tests.simulation.paths import V1, EnginePath, make_config
from tests.simulation.requests import admitted
from tests.simulation.runner import FakeRunner
from tests.simulation.sim import Simulation
from tests.simulation.texts import model_token

attach = wire.attach


def unguided_token(self, stream, row, ahead):
    """A worker that samples from any row that the scheduler sends, blended or not."""
    return model_token(stream.split(FOLLOWER_SUFFIX)[0], self._num_outputs(stream) + ahead)


@pytest.mark.parametrize("path", [V1, EnginePath(True, True)], ids=["v1", "v2-async"])
def test_tokens_of_rows_that_were_not_joint_are_not_counted(model_folder, monkeypatch, path):
    """The scheduler forgets its groups in every third step.

    The tokens of these steps are not guided, and must not be counted as guided.
    """
    steps, forgotten = 0, 0

    def forget(scheduler_output, guidance):
        nonlocal steps, forgotten
        steps += 1
        if guidance.joint and steps % 3 == 0:
            forgotten += len(guidance.joint)
            guidance = dataclasses.replace(guidance, joint=())
        attach(scheduler_output, guidance)

    monkeypatch.setattr(wire, "attach", forget)
    monkeypatch.setattr(FakeRunner, "_token", unguided_token)
    sim = Simulation(make_config(model_folder), 256, path)
    for i in range(4):
        sim.add(f"r{i}", [5 + i] * 20, 30, scale=2.0, negative=[9] * 12)
    sim.run()
    assert [len(tokens) for tokens in sim.outputs.values()] == [30] * 4
    assert forgotten > 8
    assert sum(sim.guided.values()) == 4 * 30 - forgotten


def test_the_frontend_does_not_send_the_count_to_clients():
    """vLLM would show `kv_transfer_params` to clients."""
    vllm_patches.apply("frontend")
    output = EngineCoreOutput("r", [5, 6], kv_transfer_params=wire._marked(2))
    other = EngineCoreOutput("s", [5], kv_transfer_params={"a connector": 1})
    assert wire.guided_tokens(output) == 2
    assert wire.guided_tokens(other) == 0
    OutputProcessor(None, log_stats=False).process_outputs([output, other])
    assert output.kv_transfer_params is None
    assert other.kv_transfer_params == {"a connector": 1}


def test_both_streams_of_a_group_have_the_salt(model_folder):
    """Otherwise one tenant could find out the negative prompts of another from response times."""
    hash_fn = get_hash_fn_by_name("sha256")
    init_none_hash(hash_fn)

    def follower(salt):
        extra = admitted({"guidance_scale": 2.0, "negative_prompt_token_ids": [7] * 40})
        leader = Request(
            request_id="r",
            prompt_token_ids=[5] * 40,
            sampling_params=SamplingParams(max_tokens=4, extra_args=extra),
            pooling_params=None,
            cache_salt=salt,
            block_hasher=get_request_block_hasher(16, hash_fn),
        )
        plan = plan_group(leader, 256, lambda *lengths: True)
        return make_followers(leader, plan)[0].block_hashes

    assert follower("a") == follower("a")
    assert follower("a")[0] != follower("b")[0]
    assert follower("a")[0] != follower(None)[0]
