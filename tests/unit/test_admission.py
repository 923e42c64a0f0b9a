"""The queue in front of the engines: order, bounds, fairness and 429s. No engine, no server."""

import asyncio
import random

import pytest

from cfg_core.errors import OverloadedError, RequestError
from cfg_core.params import FollowerParams, GuidanceParams
from deployments.admission.entries import Share
from deployments.admission.queue import RETRY_AT_MOST_S, AdmissionQueue
from deployments.requests.demand import (
    Demand,
    check_answer_size,
    check_context,
    check_streams,
    demand_of,
)
from deployments.requests.guidance_fields import Guidance, read_guidance
from deployments.requests.streams import streams_of


class Clock:
    time = 0.0

    def __call__(self):
        return self.time


def queue(capacity=4, max_streams=100, max_tokens=100_000, clock=None):
    return AdmissionQueue(lambda: capacity, max_streams, max_tokens, clock or Clock())


def demand(streams=1, tokens=10):
    return Demand(streams=streams, tokens=tokens)


def asked(endpoint, body, guidance):
    return demand_of(endpoint, body, guidance, streams_of(endpoint, body, guidance))


def check_answer(endpoint, body, most_bytes, **options):
    groups = streams_of(endpoint, body, None)
    check_answer_size(endpoint, body, groups, most_bytes, **options)


class Caller:
    """A request in the queue."""

    def __init__(self, line, share=None, wants=None, priority=0, log=None, name=None):
        self.line, self.share, self.wants = line, share or Share(), wants or demand()
        self.log, self.name = log, name
        self.task = asyncio.ensure_future(self._run(priority))

    async def _run(self, priority):
        self.place = await self.line.enter(self.share, self.wants, priority)
        if self.log is not None:
            self.log.append(self.name)

    async def settled(self):
        await settle()
        return self

    @property
    def running(self):
        return self.task.done() and not self.task.cancelled() and self.task.exception() is None

    @property
    def refused(self):
        return (
            self.task.done()
            and not self.task.cancelled()
            and isinstance(self.task.exception(), OverloadedError)
        )

    def end(self):
        self.place.leave()


async def end_one(callers):
    """End the only request that runs."""
    (running,) = (caller for caller in callers if caller.running)
    callers.remove(running)
    running.end()
    await settle()


async def settle():
    for _ in range(5):
        await asyncio.sleep(0)


async def test_as_many_streams_run_as_there_is_room_for():
    line = queue(capacity=4)
    callers = [Caller(line, wants=demand(streams=2)) for _ in range(3)]
    await settle()
    assert [c.running for c in callers] == [True, True, False]
    callers[0].end()
    await settle()
    assert callers[2].running
    line.check_integrity()


async def test_a_request_larger_than_the_engines_runs_alone():
    line = queue(capacity=4)
    small = await Caller(line).settled()
    large = await Caller(line, wants=demand(streams=10)).settled()
    assert (small.running, large.running) == (True, False)
    small.end()
    await settle()
    assert large.running


async def test_capacity_may_grow():
    room = [1]
    line = AdmissionQueue(lambda: room[0], 10, 1000, Clock())
    callers = [await Caller(line).settled() for _ in range(2)]
    room[0] = 2
    line.admit()
    await settle()
    assert callers[1].running


async def test_a_request_that_does_not_fit_the_queue_is_refused():
    line = queue(capacity=1, max_streams=2)
    callers = [await Caller(line).settled() for _ in range(4)]
    assert [c.refused for c in callers] == [False, False, False, True]
    line = queue(capacity=1, max_tokens=25)
    callers = [await Caller(line).settled() for _ in range(4)]
    assert [c.refused for c in callers] == [False, False, False, True]
    line.check_integrity()


async def test_lower_priority_numbers_go_first():
    line, log = queue(capacity=1), []
    callers = [await Caller(line).settled()]
    for name, priority in (("late", 5), ("usual", 0), ("urgent", -1), ("usual too", 0)):
        callers.append(await Caller(line, priority=priority, log=log, name=name).settled())
    for _ in range(4):
        await end_one(callers)
    assert log == ["urgent", "usual", "usual too", "late"]


async def test_tenants_share_by_weight():
    """Two tenants have a backlog. One has three times the weight: it gets 30 of the first 40."""
    line, log = queue(capacity=1), []
    callers = [await Caller(line).settled()]
    for share in (Share(tenant="a"), Share(tenant="b", weight=3.0)):
        callers += [
            await Caller(line, share, log=log, name=share.tenant).settled() for _ in range(40)
        ]
    for _ in range(40):
        await end_one(callers)
    assert 28 <= log.count("b") <= 31


async def test_a_burst_does_not_keep_others_out():
    """A full queue drops requests of the tenant that fills it.

    The burst does not count against that tenant later.
    """
    line = queue(capacity=1, max_streams=10)
    first = await Caller(line).settled()
    burst = [await Caller(line, Share(tenant="burst")).settled() for _ in range(30)]
    assert sum(c.refused for c in burst) == 20
    quiet = await Caller(line, Share(tenant="quiet")).settled()
    assert not quiet.refused
    assert sum(c.refused for c in burst) == 21
    line.check_integrity()
    first.end()
    await settle()
    (second,) = (caller for caller in burst if caller.running)
    second.end()
    await settle()
    assert quiet.running, "the quiet tenant goes second, although ten others came before it"


async def test_a_tenant_has_its_own_bound():
    line, share = queue(capacity=10), Share(tenant="small", max_streams=2)
    assert (await Caller(line, share, demand(streams=2)).settled()).running
    assert (await Caller(line, share).settled()).refused
    with pytest.raises(RequestError, match="3 streams"):
        await line.enter(share, demand(streams=3))
    assert (await Caller(line).settled()).running
    line.check_integrity()


async def test_a_caller_who_leaves_is_forgotten():
    line = queue(capacity=1)
    running, waiting, behind = [await Caller(line).settled() for _ in range(3)]
    waiting.task.cancel()
    await settle()
    line.check_integrity()
    assert line.stats["queued_requests"] == 1
    running.end()
    await settle()
    assert behind.running


async def test_a_caller_that_leaves_during_admission_gives_its_place_back():
    line = queue(capacity=1)
    running = await Caller(line).settled()
    waiting = await Caller(line).settled()
    running.end()
    waiting.task.cancel()
    await settle()
    assert waiting.task.cancelled()
    assert line.stats["running_streams"] == 0
    line.check_integrity()


async def test_retry_after_is_what_the_queue_needs():
    clock = Clock()
    line = queue(capacity=1, max_streams=8, clock=clock)
    running = await Caller(line, wants=demand(tokens=100)).settled()
    waiting = [await Caller(line, wants=demand(tokens=100)).settled() for _ in range(8)]
    for i in range(10):  # 100 tokens in 2 s
        clock.time += 2.0
        (running if i == 0 else waiting[i - 1]).end()
        await settle()
        waiting.append(await Caller(line, wants=demand(tokens=100)).settled())
    refused = await Caller(line, wants=demand(tokens=100)).settled()
    assert refused.refused
    assert refused.task.exception().retry_after_s == pytest.approx(9 * 100 / 2 / 50)


async def test_retry_after_is_bounded():
    line = queue(capacity=1, max_streams=1, max_tokens=10**9)
    assert line.retry_after_s() == 1
    (await Caller(line, wants=demand(tokens=1)).settled()).end()
    await Caller(line).settled()
    await Caller(line, wants=demand(tokens=10**8)).settled()
    assert line.retry_after_s() == RETRY_AT_MOST_S


@pytest.mark.parametrize("seed", range(20))
async def test_a_storm_leaves_nothing_behind(seed):
    """Random tenants, sizes, departures and cancellations.

    The counts are right after each event. In the end, every waiting request has run.
    """
    rng, callers = random.Random(seed), []
    line = queue(capacity=6, max_streams=15, max_tokens=2000)
    for _ in range(300):
        event = rng.random()
        running = [c for c in callers if c.running]
        if event < 0.55 or not callers:
            tenant, wants = rng.choice("abc"), demand(rng.randint(1, 4), rng.randint(1, 400))
            share = Share(
                tenant=tenant, weight=rng.choice([1.0, 2.0]), max_streams=rng.choice([None, 9])
            )
            callers.append(Caller(line, share, wants, rng.randint(-1, 1)))
        elif event < 0.85 and running:
            gone = rng.choice(running)
            gone.end()
            callers.remove(gone)
        else:
            rng.choice(callers).task.cancel()
        if rng.random() < 0.7:
            await settle()
            callers = [c for c in callers if not c.task.done() or c.running]
            line.check_integrity()
    await settle()
    while callers := [c for c in callers if not c.task.done() or c.running]:
        running = [c for c in callers if c.running]
        assert running, "somebody waits, nobody runs"
        running[0].end()
        callers.remove(running[0])
        await settle()
    line.check_integrity()
    assert line.stats["running_streams"] == line.stats["queued_streams"] == 0


def guided(**fields):
    return Guidance(params=GuidanceParams(scale=2.0, **fields))


FOUR_STREAMS = Guidance(
    params=GuidanceParams(
        streams=(
            FollowerParams(weight=-1, prompt="xxxx"),
            FollowerParams(weight=-1, token_ids=(1, 2)),
            FollowerParams(weight=1, lora="b"),
        )
    )
)
SUFFIXED = guided(end=4, negative_suffix_token_ids=[1, 2, 3])
COMPLETION, CHAT = "completion", "chat"


@pytest.mark.parametrize(
    ("endpoint", "body", "guidance", "streams", "tokens"),
    [
        (COMPLETION, {"prompt": "x" * 40, "max_tokens": 5}, None, 1, 15),
        (COMPLETION, {"prompt": "x" * 40, "max_tokens": 5}, guided(), 2, 10 + 1 + 10),
        (COMPLETION, {"prompt": "x" * 40, "max_tokens": 5, "n": 3}, guided(), 6, 11 + 30),
        (
            COMPLETION,
            {"prompt": [1, 2, 3], "max_tokens": 5},
            guided(negative_prompt_token_ids=(1, 2)),
            2,
            3 + 2 + 10,
        ),
        (COMPLETION, {"prompt": ["x" * 4, "x" * 8], "max_tokens": 5}, None, 2, 3 + 10),
        (COMPLETION, {"prompt": [[1, 2], [3]], "max_tokens": 5}, None, 2, 3 + 10),
        (COMPLETION, {"prompt": ["x" * 4] * 9, "messages": [], "max_tokens": 5}, None, 9, 9 + 45),
        (
            COMPLETION,
            {"prompt": "x" * 4, "max_tokens": 5, "max_completion_tokens": 1},
            None,
            1,
            1 + 5,
        ),
        (COMPLETION, {"prompt": "x" * 4}, None, 1, 1 + 16),
        (COMPLETION, {"prompt": "x" * 4, "max_tokens": None}, None, 1, 1 + 256),
        (COMPLETION, {"prompt": None, "n": -3, "max_tokens": -1}, None, 1, 0),
        (
            CHAT,
            {"messages": [{"role": "user", "content": "x" * 36}], "max_completion_tokens": 5},
            None,
            1,
            11 + 5,
        ),
        (
            CHAT,
            {"messages": "xxxx", "prompt": ["x"] * 9, "max_tokens": 9, "max_completion_tokens": 5},
            None,
            1,
            5,
        ),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x" * 32}]}]},
            None,
            1,
            10 + 256,
        ),
        (CHAT, {"messages": "no list"}, guided(), 2, 1 + 512),
        (COMPLETION, {"prompt": "x" * 40, "max_tokens": 5}, FOUR_STREAMS, 4, 10 + 1 + 2 + 10 + 20),
        (
            COMPLETION,
            {"prompt": ["x" * 40, "x" * 8], "max_tokens": 5, "n": 2},
            FOUR_STREAMS,
            16,
            (10 + 1 + 2 + 10) + (2 + 1 + 2 + 2) + 16 * 5,
        ),
        # After its end, a window has no followers.
        (COMPLETION, {"prompt": "x" * 40, "max_tokens": 9}, guided(end=4), 2, 10 + 1 + 9 + 4),
        (COMPLETION, {"prompt": "x" * 40, "max_tokens": 3}, guided(end=4), 2, 10 + 1 + 3 + 3),
        (COMPLETION, {"prompt": "x" * 40, "max_tokens": 9, "n": 2}, guided(end=4), 4, 11 + 18 + 8),
        # A suffix is no stream, and is computed for each guided token.
        (COMPLETION, {"prompt": "x" * 40, "max_tokens": 9}, SUFFIXED, 1, 10 + 9 + 4 * 3),
        (COMPLETION, {"prompt": "x" * 40, "max_tokens": 9, "n": 2}, SUFFIXED, 2, 10 + 18 + 8 * 3),
        (CHAT, {}, None, 1, 256),
    ],
)
def test_what_a_request_asks_for(endpoint, body, guidance, streams, tokens):
    assert asked(endpoint, body, guidance) == Demand(streams=streams, tokens=tokens)


@pytest.mark.parametrize("value", ["40", 40.0, True, [40], {}])
@pytest.mark.parametrize(
    ("endpoint", "name"),
    [
        (COMPLETION, "n"),
        (COMPLETION, "max_tokens"),
        (CHAT, "max_completion_tokens"),
        (CHAT, "n"),
    ],
)
def test_counts_are_integers(endpoint, name, value):
    """vLLM would accept the first three values as numbers.

    A queue that did not would count such a request as one stream.
    """
    with pytest.raises(RequestError, match=f"{name} is .*: send an integer"):
        asked(endpoint, {"prompt": "x", name: value}, None)


def test_one_request_has_a_bound():
    check_streams(demand(8, 1), 8)
    with pytest.raises(RequestError, match="9 streams"):
        check_streams(demand(9, 1), 8)


def test_an_answer_that_is_not_streamed_has_a_bound():
    body = {"prompt": "x", "n": 40, "max_tokens": 400, "logprobs": 20}
    check_answer(COMPLETION, body, 64 * 2**20)
    with pytest.raises(RequestError, match="set stream to true"):
        check_answer(COMPLETION, body, 2**20)
    check_answer(COMPLETION, body | {"stream": True}, 2**20)
    chat = {"messages": [], "n": 40, "max_tokens": 400, "logprobs": True, "top_logprobs": 20}
    with pytest.raises(RequestError, match="set stream to true"):
        check_answer(CHAT, chat, 2**20)
    for endpoint, name in ((COMPLETION, "logprobs"), (CHAT, "top_logprobs")):
        with pytest.raises(RequestError, match=f"{name} is a string: send an integer"):
            check_answer(endpoint, {"prompt": "x", name: "20"}, 2**20)
        check_answer(endpoint, {"prompt": "x", name: True}, 2**20)


def test_the_streams_own_logprobs_count_for_the_size_of_an_answer():
    body = {"prompt": "x", "n": 5, "max_tokens": 400, "logprobs": 20}
    limit = 5 * 400 * 21 * 100 * 4
    check_answer(COMPLETION, body, limit, shown_streams=2)
    with pytest.raises(RequestError, match="set stream to true"):
        check_answer(COMPLETION, body, limit, shown_streams=4)


@pytest.mark.parametrize(
    "asked",
    [{"echo": True, "logprobs": 20}, {"prompt_logprobs": 20}, {"echo": True, "logprobs": 0}],
)
def test_logprobs_of_the_prompt_count_for_the_size_of_an_answer(asked):
    body = {"prompt": [5] * 9_000, "max_tokens": 0, "n": 8}
    check_answer("completion", body, 2**20)
    with pytest.raises(RequestError, match="MiB"):
        check_answer("completion", body | asked, 2**20)


def test_scored_tokens_follow_each_negative():
    fields = {"guidance_scale": 2, "guidance_score_tokens": 30, "echo": True, "logprobs": 0}
    body = {"prompt": [5] * 100, "max_tokens": 0, **fields}
    last = asked("completion", body, read_guidance(body, "completion"))
    assert last.tokens == 100 + 1 + 30
    body |= {"negative_prompt_token_ids": [7] * 20}
    own = asked("completion", body, read_guidance(body, "completion"))
    assert own.tokens == 100 + 20 + 30


@pytest.mark.parametrize("prompt", [[1] * 600, [[1], [1] * 600]])
def test_token_ids_that_never_fit_are_refused(prompt):
    with pytest.raises(RequestError, match="maximum context length is 512"):
        check_context(COMPLETION, {"prompt": prompt}, 512)
    check_context(COMPLETION, {"prompt": prompt}, 0)
    check_context(COMPLETION, {"prompt": prompt, "truncate_prompt_tokens": 9}, 512)


@pytest.mark.parametrize("prompt", ["x" * 9000, ["x" * 9000] * 600, [1] * 512, None, []])
def test_other_prompts_are_checked_by_the_engine(prompt):
    check_context(COMPLETION, {"prompt": prompt}, 512)


async def test_a_burst_begins_a_few_at_a_time_while_another_tenant_is_here():
    """A replica needs some time to start a request.

    So a tenant may start only a few requests at a time while another tenant is active.
    """
    clock = Clock()
    line = AdmissionQueue(lambda: 100, 100, 100_000, clock, most_starting=lambda: 3)
    burst = [await Caller(line, Share(tenant="burst")).settled() for _ in range(8)]
    assert all(caller.running for caller in burst), "no other tenant is active"
    for caller in burst:
        caller.place.begun()
        caller.place.begun()
    quiet = await Caller(line, Share(tenant="quiet")).settled()
    assert quiet.running
    more = [await Caller(line, Share(tenant="burst")).settled() for _ in range(8)]
    assert sum(caller.running for caller in more) == 3
    line.check_integrity()
    more[0].place.begun()
    more[1].end()
    await settle()
    assert sum(caller.running for caller in more) == 5
    assert (await Caller(line, Share(tenant="quiet")).settled()).running
    line.check_integrity()


async def test_one_tenant_leaves_room_while_another_is_here():
    """While two tenants are active, one gets at most 3 of 4 places.

    The next request of the other finds a place free.
    """
    clock = Clock()
    line = AdmissionQueue(lambda: 4, 100, 10_000, clock, most_of_one=lambda: 3)
    alone = [await Caller(line, Share(tenant="a")).settled() for _ in range(4)]
    assert all(caller.running for caller in alone)
    other = await Caller(line, Share(tenant="b")).settled()
    assert not other.running
    more = [await Caller(line, Share(tenant="a")).settled() for _ in range(3)]
    for caller in alone:
        caller.end()
    await settle()
    assert other.running
    assert [caller.running for caller in more] == [True, True, True]
    last = await Caller(line, Share(tenant="a")).settled()
    assert not last.running
    other.end()
    await settle()
    assert not last.running  # the place is kept for other tenants
    clock.time += 61.0
    line.admit()
    await settle()
    assert last.running  # alone again
    line.check_integrity()
