"""The policy without a scheduler: every rule of lockstep.py's docstring, and its invariants."""

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from cfg_core.policy.lockstep import (
    Headroom,
    Snapshot,
    StreamState,
    Unit,
    WaitingUnit,
    all_may_decode,
    plan,
)

BLOCK = 16
PLENTY = Headroom(1000, 1000, 1000)


class Needs:
    """Blocks by arithmetic: a stream that has computed `computed[id]` tokens, in blocks of 16."""

    def __init__(self, computed=None):
        self.computed = computed or {}

    def at_most(self, num_tokens):
        return -(-num_tokens // BLOCK) + 1

    def exactly(self, stream, num_tokens):
        done = self.computed.get(stream, 0)
        return -(-(done + num_tokens) // BLOCK) - -(-done // BLOCK)


def plain(name, remaining=1, **kw):
    return Unit((StreamState(name, remaining),), **kw)


def pair(name, leader=1, follower=1, **kw):
    streams = (StreamState(name, leader), StreamState(f"{name}-", follower, follower=True))
    return Unit(streams, guided=True, **kw)


def half(name, remaining=1, **kw):
    return Unit((StreamState(name, remaining),), guided=True, missing=(f"{name}-",), **kw)


def snapshot(*running, waiting=(), budget=100, headroom=PLENTY, **kw):
    return Snapshot(
        running=running, waiting=tuple(waiting), token_budget=budget, headroom=headroom, **kw
    )


def test_decoding_groups_sample_and_stay_adjacent_among_plain_requests():
    step = plan(snapshot(plain("p"), pair("a"), plain("q"), pair("b")), Needs())
    assert step.order == ("p", "a", "a-", "q", "b", "b-")
    assert step.sampling == {"a", "a-", "b", "b-"}
    assert step.preempt == ()


def test_a_group_whose_streams_do_not_both_fit_the_budget_waits_whole():
    step = plan(snapshot(pair("a", 1, 60), budget=50), Needs())
    assert step.sampling == set()


def test_a_group_that_fits_exactly_samples():
    assert plan(snapshot(pair("a", 20, 30), budget=50), Needs()).sampling == {"a", "a-"}
    assert plan(snapshot(pair("a", 20, 31), budget=50), Needs()).sampling == set()


def test_a_chunk_limit_holds_a_long_stream_back_and_its_partner_with_it():
    assert plan(snapshot(pair("a", 1, 30), chunk_limit=20), Needs()).sampling == set()
    assert plan(snapshot(pair("a", 1, 20), chunk_limit=20), Needs()).sampling == {"a", "a-"}


def test_with_a_joint_limit_a_group_reads_its_prompts_before_it_samples():
    reading, ready = pair("a", leader=5), pair("b")
    step = plan(snapshot(reading, ready, joint_limit=1), Needs())
    assert step.sampling == {"b", "b-"}
    assert plan(snapshot(reading, ready), Needs()).sampling == {"a", "a-", "b", "b-"}


def test_drafts_do_not_count_for_a_joint_limit():
    decoding, reading = (
        Unit(
            (StreamState(name, size, drafts=3), StreamState(f"{name}-", size, True, drafts=3)), True
        )
        for name, size in (("a", 4), ("b", 5))
    )
    step = plan(snapshot(decoding, reading, joint_limit=1), Needs())
    assert step.sampling == {"a", "a-"}


def test_with_a_joint_limit_no_group_samples_in_the_step_that_admits_it():
    waiting = [WaitingUnit(("w", "w-"), (4, 4), guided=True)]
    assert plan(snapshot(waiting=waiting, free_slots=8, joint_limit=1), Needs()).sampling == set()
    assert plan(snapshot(waiting=waiting, free_slots=8), Needs()).sampling == {"w", "w-"}


def test_a_stream_with_nothing_to_compute_holds_its_group():
    assert plan(snapshot(pair("a", 1, 0)), Needs()).sampling == set()


def test_units_before_a_group_take_their_budget_first():
    step = plan(snapshot(plain("p", 99), pair("a"), budget=100), Needs())
    assert step.sampling == set()


def test_a_half_admitted_group_never_samples_and_its_missing_stream_goes_first():
    step = plan(snapshot(half("a"), pair("b")), Needs())
    assert step.sampling == {"b", "b-"}
    assert step.promote == ("a-",)


def test_only_the_first_half_admitted_group_keeps_its_place():
    step = plan(snapshot(pair("c"), half("a"), half("b"), half("d")), Needs())
    assert [u.streams[0].id for u in step.preempt] == ["b", "d"]
    assert step.order == ("c", "c-", "a")
    assert step.promote == ("a-",)


def test_without_enough_blocks_whole_units_are_preempted_from_the_tail():
    needs = Needs(dict.fromkeys(("a", "a-", "b", "b-", "p"), 16))
    step = plan(snapshot(pair("a"), pair("b"), plain("p"), headroom=Headroom(3, 3, 3)), needs)
    assert [u.streams[0].id for u in step.preempt] == ["p", "b"]
    assert step.order == ("a", "a-")
    assert step.sampling == {"a", "a-"}


def test_under_priority_the_greatest_rank_is_preempted():
    needs = Needs(dict.fromkeys(("a", "a-", "b", "b-"), 16))
    running = (pair("a", rank=(2, 0.0)), pair("b", rank=(1, 5.0)))
    step = plan(snapshot(*running, headroom=Headroom(2, 2, 2), by_rank=True), needs)
    assert [u.streams[0].id for u in step.preempt] == ["a"]


def test_each_role_has_its_own_room():
    needs = Needs(dict.fromkeys(("a", "a-", "b", "b-"), 16))
    running = (pair("a"), pair("b"))
    assert plan(snapshot(*running, headroom=Headroom(4, 2, 2)), needs).preempt == ()
    assert plan(snapshot(*running, headroom=Headroom(4, 3, 1)), needs).preempt != ()
    assert plan(snapshot(*running, headroom=Headroom(4, 1, 3)), needs).preempt != ()


def test_the_last_unit_is_never_preempted():
    assert plan(snapshot(pair("a"), headroom=Headroom(0, 0, 0)), Needs()).preempt == ()


WAITING = (WaitingUnit(("w", "w-"), (10, 5), guided=True),)


def test_a_waiting_group_that_surely_fits_samples_in_its_first_step():
    assert plan(snapshot(waiting=WAITING, free_slots=2), Needs()).sampling == {"w", "w-"}


def test_a_waiting_group_holds_back_when_anything_could_split_it():
    def sampling(**kw):
        return plan(snapshot(waiting=WAITING, **{"free_slots": 2, **kw}), Needs()).sampling

    assert sampling(budget=14) == set()
    assert sampling(free_slots=1) == set()
    assert sampling(headroom=Headroom(3, 3, 3)) == set()
    assert sampling(headroom=Headroom(9, 9, 3)) == set()
    assert sampling(chunk_limit=9) == set()


def test_a_waiting_group_whose_prompts_are_cached_samples_in_its_first_step():
    """Long prompts that all requests share would otherwise cost each of them one step more."""

    def sampling(*cached, **options):
        waiting = [WaitingUnit(("w", "w-"), (1_000, 500), True, cached=cached)]
        room = {"free_slots": 2, "headroom": Headroom(400, 400, 400), "budget": 40, **options}
        return plan(snapshot(waiting=waiting, **room), Needs()).sampling

    assert sampling(980, 480) == {"w", "w-"}
    assert sampling(979, 480) == sampling(980, 0) == sampling() == set()
    assert sampling(980, 480, chunk_limit=20) == {"w", "w-"}
    assert sampling(980, 480, chunk_limit=19) == set()
    assert sampling(980, 480, headroom=Headroom(90, 90, 90)) == set()  # cached blocks may be free


def test_nothing_is_admitted_to_sample_in_a_step_that_preempts():
    needs = Needs(dict.fromkeys(("a", "a-", "b", "b-"), 16))
    step = plan(
        snapshot(pair("a"), pair("b"), waiting=WAITING, free_slots=2, headroom=Headroom(2, 2, 2)),
        needs,
    )
    assert step.sampling == {"a", "a-"}


def test_a_lone_waiting_stream_uses_room_but_does_not_sample():
    lone = WaitingUnit(("x-",), (90,))
    step = plan(snapshot(waiting=(lone, *WAITING), free_slots=3), Needs())
    assert step.sampling == set()


remaining = st.integers(min_value=0, max_value=40)
units = st.lists(
    st.one_of(
        remaining.map(lambda n: plain("p", n)),
        st.tuples(remaining, remaining).map(lambda ab: pair("g", *ab)),
        remaining.map(lambda n: half("h", n)),
    ),
    max_size=12,
)


def renamed(unit, i):
    streams = tuple(dataclasses.replace(s, id=f"{i}{s.id}") for s in unit.streams)
    return dataclasses.replace(
        unit, streams=streams, missing=tuple(f"{i}{m}" for m in unit.missing), rank=(i % 3, i)
    )


@given(
    units,
    st.integers(2, 120),
    st.integers(0, 40),
    st.integers(0, 40),
    st.booleans(),
    st.sampled_from((0, 8, 30)),
)
def test_invariants_of_every_plan(drawn, budget, leaders, followers, by_rank, chunk_limit):
    running = tuple(renamed(u, i) for i, u in enumerate(drawn))
    headroom = Headroom(leaders + followers, leaders, followers)
    needs = Needs()
    snap = snapshot(
        *running, budget=budget, headroom=headroom, by_rank=by_rank, chunk_limit=chunk_limit
    )
    step = plan(snap, needs)
    by_id = {u.streams[0].id: u for u in running}
    kept = [u for u in running if u not in step.preempt]

    # every running stream is either in the order or preempted, once; the order keeps units together
    assert step.order == tuple(s.id for u in kept for s in u.streams)
    assert len(kept) + len(step.preempt) == len(running)
    assert not running or kept, "the head unit is never preempted"
    # groups sample whole or not at all, and only whole groups do
    for unit in kept:
        chosen = {s.id for s in unit.streams} & step.sampling
        assert chosen in (set(), {s.id for s in unit.streams})
        assert not chosen or (unit.guided and not unit.half_admitted)
        assert not chosen or all(s.remaining >= 1 for s in unit.streams)
    assert step.sampling <= {s.id for u in kept for s in u.streams}
    # what samples fits the budget
    tokens = sum(s.remaining for u in kept for s in u.streams if s.id in step.sampling)
    assert tokens <= budget
    # at most one half-admitted group stays
    assert sum(u.half_admitted for u in kept) <= 1
    # units are preempted only if blocks may be missing
    if step.preempt and sum(u.half_admitted for u in running) <= 1:
        bound = sum(needs.at_most(min(s.remaining, budget)) for u in running for s in u.streams)
        assert bound > min(headroom.leaders, headroom.followers, headroom.total)
    assert by_id.keys() >= {u.streams[0].id for u in step.preempt}
    # pure: the same snapshot gives the same plan
    assert plan(snap, needs) == step


def test_a_drafter_takes_a_part_of_the_budget_for_each_stream():
    """Each of the two streams has 1 + 3 tokens and one slot for the drafter."""
    assert plan(snapshot(pair("a", 4, 4), budget=10, drafting_slots=1), Needs()).sampling == {
        "a",
        "a-",
    }
    assert plan(snapshot(pair("a", 4, 4), budget=9, drafting_slots=1), Needs()).sampling == set()
    waiting = [WaitingUnit(("w", "w-"), (5, 5), guided=True)]
    assert plan(
        snapshot(waiting=waiting, free_slots=2, budget=12, drafting_slots=1), Needs()
    ).sampling == {"w", "w-"}
    assert (
        plan(snapshot(waiting=waiting, free_slots=2, budget=11, drafting_slots=1), Needs()).sampling
        == set()
    )


def test_all_may_decode_if_budget_and_every_role_have_room():
    assert all_may_decode(10, 5, 10, Headroom(5, 5, 5))
    assert not all_may_decode(11, 5, 10, Headroom(5, 5, 5))
    assert not all_may_decode(10, 5, 10, Headroom(9, 9, 4))


def suffixed(name, prompt=1, suffix=5, **kw):
    """A running stream with a suffix, which must compute `prompt` tokens of its own."""
    return Unit((StreamState(name, prompt + suffix, end=1 + suffix),), guided=True, **kw)


def test_a_suffix_is_computed_whole_or_not_at_all():
    for budget, joint in ((7, True), (6, True), (5, False), (1, False)):
        step = plan(snapshot(suffixed("s"), budget=budget), Needs())
        assert step.sampling == ({"s"} if joint else set()), budget
    assert plan(snapshot(suffixed("s"), chunk_limit=5), Needs()).sampling == set()
    assert plan(snapshot(suffixed("s", prompt=20), budget=25), Needs()).sampling == {"s"}


def test_a_prompt_whose_suffix_does_not_fit_stops_before_its_last_token():
    """So the tokens that it leaves are granted to others."""
    step = plan(snapshot(suffixed("s", prompt=20), pair("a"), budget=21), Needs())
    assert step.sampling == {"a", "a-"}
    step = plan(snapshot(suffixed("s", prompt=20), pair("a"), budget=20), Needs())
    assert step.sampling == set()


def test_the_blocks_of_a_suffix_are_reserved():
    needs = Needs({"s": 31, "p": 3})
    running = (plain("p"), suffixed("s", suffix=18))
    assert plan(snapshot(*running, headroom=Headroom(1, 1, 1)), needs).preempt == (running[1],)
    assert plan(snapshot(*running, headroom=Headroom(2, 2, 2)), needs).sampling == {"s"}
