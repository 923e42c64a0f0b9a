"""What the thread that makes requests does for followers, so that the scheduler need not."""

from types import SimpleNamespace

import msgspec
import pytest
from vllm import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.request import Request
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from cfg_core.params import ResolvedGuidance
from cfg_core.params.between import Between
from cfg_core.params.resolved import RESOLVED
from cfg_core.vllm_plugin.core import arrivals, followers
from cfg_core.vllm_plugin.core.followers import make_followers, make_ready, plan_group
from cfg_core.vllm_plugin.core.prompt_hashes import PromptHashes
from tests.simulation.paths import make_config
from tests.simulation.requests import admitted
from tests.simulation.sim import Simulation

BLOCK = 16
NEGATIVE = list(range(100, 100 + 10 * BLOCK + 3))
FIELDS = {"guidance_scale": 2.0, "negative_prompt_token_ids": NEGATIVE}


@pytest.fixture
def hasher(monkeypatch):
    """vLLM's hasher, with the ids of the requests whose blocks it hashed, in order."""
    hash_fn = get_hash_fn_by_name("sha256")
    init_none_hash(hash_fn)
    stock, hashed = get_request_block_hasher(BLOCK, hash_fn), []

    def block_hasher(request):
        made = stock(request)
        hashed.extend([request.request_id] * len(made))
        return made

    block_hasher.hashed = hashed
    monkeypatch.setattr(followers, "_HASHES", PromptHashes())
    return block_hasher


def leader_of(hasher, fields=FIELDS, **options):
    return Request(
        request_id="r",
        prompt_token_ids=[5] * 40,
        sampling_params=SamplingParams(max_tokens=4, extra_args=admitted(fields)),
        pooling_params=None,
        block_hasher=hasher,
        **options,
    )


def followers_of(leader):
    plan = plan_group(leader, 1024, lambda *lengths: True)
    return make_followers(leader, plan)


def as_vllm_hashes(hasher, ids, **options):
    sampling = SamplingParams(max_tokens=4)
    return Request("x", list(ids), sampling, None, block_hasher=hasher, **options).block_hashes


def test_the_hashes_of_a_follower_are_those_of_vllm(hasher):
    for salt in (None, "a", None, "b", "a"):
        (follower,) = followers_of(leader_of(hasher, cache_salt=salt))
        assert follower.block_hashes == as_vllm_hashes(hasher, NEGATIVE, cache_salt=salt)
        follower.append_output_token_ids(list(range(2 * BLOCK)))
        grown = as_vllm_hashes(hasher, follower.all_token_ids, cache_salt=salt)
        assert follower.block_hashes == grown
        assert len(grown) > len(NEGATIVE) // BLOCK


def test_a_negative_of_many_requests_is_hashed_once(hasher):
    for _ in range(5):
        followers_of(leader_of(hasher))
    assert hasher.hashed.count("") == len(NEGATIVE) // BLOCK
    other = {**FIELDS, "negative_prompt_token_ids": [7, *NEGATIVE]}
    (follower,) = followers_of(leader_of(hasher, other))
    assert follower.block_hashes == as_vllm_hashes(hasher, [7, *NEGATIVE])


def test_followers_that_begin_late_hash_only_the_output(hasher):
    leader = leader_of(hasher, {**FIELDS, "guidance_start": 2})
    make_ready(leader)
    hasher.hashed.clear()
    leader.append_output_token_ids([3] * BLOCK)
    leader.max_tokens = 40
    (follower,) = followers_of(leader)
    assert hasher.hashed.count(follower.request_id) == 1
    assert follower.block_hashes == as_vllm_hashes(hasher, [*NEGATIVE, *[3] * BLOCK])


def test_the_scheduler_does_not_touch_a_prompt_again(hasher, monkeypatch):
    """Beyond lists that are copied as vLLM copies a plain request's."""
    between = {"start_token_id": 5, "end_token_id": 6}
    leader = leader_of(hasher, {**FIELDS, "guidance_between": between})
    make_ready(leader)
    hasher.hashed.clear()
    monkeypatch.setattr(ResolvedGuidance, "from_extra_args", None)  # not called again
    monkeypatch.setattr(Between, "is_open_after", None)
    followers_of(leader)
    assert not hasher.hashed
    assert plan_group(leader, 1024, lambda *lengths: True).is_open


def test_the_workers_get_no_guidance_with_a_leader(hasher):
    leader = leader_of(hasher)
    theirs = leader.sampling_params
    theirs.extra_args["other"] = 1
    assert make_ready(leader) is make_ready(leader)
    assert leader.sampling_params.extra_args == {"other": 1}
    assert RESOLVED in theirs.extra_args, "other choices of a client share the parameters"


def test_a_request_is_ready_when_the_scheduler_gets_it(hasher):
    """By the way of vLLM's own messages."""
    sampling = SamplingParams(max_tokens=4, extra_args=admitted(FIELDS))
    sent = EngineCoreRequest("r", [5] * 40, None, sampling, None, 0.0, None, None, None)
    got = MsgpackDecoder(EngineCoreRequest).decode(MsgpackEncoder().encode(sent))
    guidance = ResolvedGuidance.from_extra_args(sampling.extra_args)
    assert ResolvedGuidance.from_extra_args(got.sampling_params.extra_args) == guidance

    def stock(core, request):
        return Request.from_engine_core_request(request, hasher), 0

    request, _ = arrivals.preprocess_add_request(stock)(SimpleNamespace(), got)
    assert getattr(request, followers._READY).guidance == guidance


def test_a_negative_is_one_value_for_vllms_encoder():
    """Its decoder, its checks and its copies take time for each value."""
    short, long = (
        admitted({**FIELDS, "negative_prompt_token_ids": [7] * n}) for n in (10, 100_000)
    )

    def values(item):
        if isinstance(item, dict | list | tuple):
            return 1 + sum(map(values, item.values() if isinstance(item, dict) else item))
        return 1

    assert values(short) == values(long)
    assert len(msgspec.msgpack.encode(long)) < 4 * 100_000 + 1_000


def test_guidance_that_no_frontend_resolved_fails(hasher):
    """The core of a guided engine may have another frontend. It must not go on unguided."""
    leader = leader_of(hasher, None)
    leader.sampling_params.extra_args = {"guidance_scale": 2.0}
    assert followers.asks_for_guidance(leader)
    with pytest.raises(ValueError, match="not resolved"):
        plan_group(leader, 1024, lambda *lengths: True)


def test_cached_prompts_beyond_a_steps_budget_sample_in_one_step(tmp_path):
    """As a plain request with the same prompt. Scored tokens are computed again all the same."""
    sim = Simulation(make_config(tmp_path), 256)

    def steps(name, scale=2.0, **options):
        before = sim.steps
        sim.add(name, [5] * 150, 1, scale=scale, negative=[9] * 170, **options)
        sim.run()
        return sim.steps - before

    cold = steps("cold")
    cached = steps("cached")
    assert cold >= cached + 4
    assert cached == steps("plain", scale=None)
    assert steps("scored", score=60) > cached
    assert sim.scheduler.guidance_stats()["solo_rows"] == 0
    sim.check_drained()


def test_cached_prompts_are_found_in_a_few_looks(tmp_path, monkeypatch):
    sim = Simulation(make_config(tmp_path, max_num_batched_tokens=200), 256)
    for prompt in ([5] * 200, [6] * 90):
        sim.add(f"r{prompt[0]}", prompt, 1)
    sim.run()
    pool, looks = sim.scheduler.kv_cache_manager.block_pool, []
    stock = pool.get_cached_block
    monkeypatch.setattr(pool, "get_cached_block", lambda *args: looks.append(1) or stock(*args))

    def likely(prompt, **options):
        sampling = SamplingParams(max_tokens=1, **options)
        request = Request("x", prompt, sampling, None, block_hasher=sim.hasher)
        looks.clear()
        return sim.scheduler._roles.likely_hits(request)

    assert likely([5] * 200) == 192
    assert len(looks) <= 4
    assert likely([5] * 192) == 176  # the last token is computed
    assert likely([5] * 100 + [7] * 100) == 96
    assert likely([6] * 200) == 80
    assert likely([7] * 200) == likely([5]) == 0
    assert likely([5] * 200, prompt_logprobs=1) == 0
