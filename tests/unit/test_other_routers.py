"""What a router can tell of the others: their share, their prefixes, and where they look for them.

At the end, traffic that is simulated with several routers.
"""

from __future__ import annotations

import random

import pytest
from bench_routing import Simulation, Workload
from bench_scale import Routers

from deployments.routing.others import (
    LEAST_COUNTED,
    LEAST_SHARE,
    HashRing,
    PrefixReuse,
    TrafficShare,
    elsewhere,
)

# --- the share ------------------------------------------------------------------------------------


def share_after(own, others, replicas=4, rounds=200):
    """The estimate after reports of all replicas, with so many calls between two of them."""
    share, taken = TrafficShare(), [1000] * replicas
    for replica in range(replicas):
        share.reported(replica, taken[replica])
    for _ in range(rounds):
        for replica in range(replicas):
            for _ in range(own):
                share.sent(replica)
            taken[replica] += own + others
            share.reported(replica, taken[replica])
    return share


@pytest.mark.parametrize(("own", "others"), [(1, 0), (1, 1), (1, 3), (3, 1), (2, 14)])
def test_the_share_is_what_this_router_sends_of_all_calls(own, others):
    assert share_after(own, others).value == pytest.approx(own / (own + others))


def test_what_is_sent_while_a_first_report_is_on_its_way_counts():
    """Otherwise a router that is alone would find that others sent it."""
    share = TrafficShare()
    for _ in range(40):
        share.sent("new")
    share.reported("new", 0)
    share.reported("new", 40)
    assert share.value == 1.0


def test_without_reports_of_calls_a_router_is_alone():
    assert TrafficShare().value == 1.0
    assert share_after(1, 3, rounds=LEAST_COUNTED // 20).value == 1.0
    share = TrafficShare()
    for _ in range(1000):
        share.sent("a")
        share.reported("a", 0)  # a replica that does not report it
    assert share.value == 1.0


def test_calls_before_this_router_was_there_do_not_count():
    share = TrafficShare()
    share.reported("a", 10**6)
    share.sent("a")
    share.reported("a", 10**6 + 1)
    assert share.value == 1.0


def test_the_share_follows_when_routers_come_and_go():
    share = share_after(1, 3)
    for i in range(1, 4001):
        share.sent(0)
        share.reported(0, 1000 + 4 * 200 + i)
    assert share.value > 0.9


def test_a_share_has_a_least_value_and_a_replica_may_start_again():
    assert share_after(0, 10).value == LEAST_SHARE
    share = share_after(1, 1)
    share.reported(0, 0)
    assert share.value == pytest.approx(0.5, rel=0.01)
    share.forget(0)
    share.reported(0, 10**9)
    assert share.value == pytest.approx(0.5, rel=0.01)


# --- prefixes that others have sent ---------------------------------------------------------------


def test_alone_nothing_was_sent_elsewhere():
    reuse = PrefixReuse()
    for _ in range(500):
        reuse.seen(1.0)
    assert reuse.elsewhere(1.0) == elsewhere(5.0, 1.0) == 0.0
    assert reuse.elsewhere(0.5) > 0.9


@pytest.mark.parametrize("share", [0.125, 0.25, 0.5, 0.75])
def test_the_probability_that_others_have_sent_a_prefix(share):
    """Against prefixes that are sent by routers at random, with `rate` requests for each."""
    rng, rate, prefixes = random.Random(0), 1.5, 20_000
    reuse, own, others = PrefixReuse(), [0] * prefixes, [0] * prefixes
    for _ in range(int(rate * prefixes)):
        prefix = rng.randrange(prefixes)
        (own if rng.random() < share else others)[prefix] += 1
    reuse._mean = sum(count > 0 for count in own) / prefixes
    new = [i for i in range(prefixes) if not own[i]]
    found = sum(others[i] > 0 for i in new) / len(new)
    assert reuse.elsewhere(share) == pytest.approx(found, abs=0.02)


def test_where_prompts_are_never_repeated_there_is_nothing_to_find():
    reuse = PrefixReuse()
    for _ in range(500):
        reuse.seen(0.0)
    assert reuse.elsewhere(0.125) == 0.0


# --- one replica for each key ---------------------------------------------------------------------

KEYS = [b"%d" % i for i in range(5000)]


def test_every_router_finds_the_same_replica():
    names = [f"replica {i}" for i in range(20)]
    shuffled = random.Random(0).sample(names, len(names))
    assert [HashRing(names).at(k) for k in KEYS] == [HashRing(shuffled).at(k) for k in KEYS]


def test_all_replicas_get_keys_and_few_move_when_one_goes():
    before, after = HashRing(range(20)), HashRing(range(19))
    found = [before.at(key) for key in KEYS]
    counts = [found.count(replica) for replica in range(20)]
    assert min(counts) > 0.3 * len(KEYS) / 20
    assert max(counts) < 2.5 * len(KEYS) / 20
    assert all(
        after.at(k) == replica for k, replica in zip(KEYS, found, strict=True) if replica < 19
    )


def test_without_replicas_a_key_has_none():
    assert HashRing(()).at(b"key") is None


# --- simulated traffic ----------------------------------------------------------------------------


@pytest.mark.parametrize("prefixes", [64, 0])
def test_several_routers_nearly_do_what_one_does(prefixes):
    """Before, four routers waited four times as long for first tokens as one, and hit half as much.

    Each of them sent the same prefixes elsewhere, and all chose the replica that had been idle.
    """
    workload = Workload(replicas=16, prefixes=prefixes, requests=2000, load=0.7)
    one, four = (Simulation(workload, Routers(workload, n)).run().result() for n in (1, 4))
    assert four["hit_rate"] >= 0.75 * one["hit_rate"]
    assert four["ttft_mean_s"] <= 1.8 * one["ttft_mean_s"]
    assert four["max_over_mean_work"] <= 1.3


def test_one_router_believes_that_it_is_alone():
    """Reports are late, so its share is not exactly 1."""
    workload = Workload(replicas=16, requests=2000, load=0.7)
    routers = Routers(workload, 1)
    Simulation(workload, routers).run()
    assert routers._routers[0].placer._share.value > 0.85
