"""Prefixes of text, and the index of who holds them, against oracles of plain loops."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cfg_core.params import FollowerParams, GuidanceParams, TokenIds
from deployments.requests.group import group_request
from deployments.requests.guidance_fields import Guidance, read_guidance
from deployments.requests.prefix_hashes import (
    CHUNK_TOKENS,
    MAX_CHUNKS,
    Prefix,
    tokens,
    units,
    whole_chunks,
)
from deployments.requests.streams import streams_of
from deployments.routing.prefix_index import Popularity, PrefixIndex

CHUNK = 128  # bytes


def prompts_of(endpoint, body, guidance):
    return [stream.prompt for stream in streams_of(endpoint, body, guidance)[0]]


def prefixes_of(endpoint, body, guidance):
    return group_request(endpoint, body, streams_of(endpoint, body, guidance)).prefixes


def common(a, b):
    """The length of the common beginning."""
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


# --- chains ---------------------------------------------------------------------------------------


@given(st.text("ab", max_size=500), st.text("ab", max_size=500), st.text("é字a", max_size=300))
def test_two_texts_share_the_chunks_that_lie_in_their_common_beginning(a, b, start):
    one, other = start + a, start + b
    shared = common(one.encode(), other.encode()) // CHUNK
    assert common(Prefix.of(one).chain, Prefix.of(other).chain) == shared


@given(st.lists(st.integers(0, 3), max_size=200), st.lists(st.integers(0, 3), max_size=200))
def test_two_lists_of_ids_share_chunks_in_the_same_way(a, b):
    shared = common(a, b) // CHUNK_TOKENS
    assert common(Prefix.of(TokenIds.of(a)).chain, Prefix.of(TokenIds.of(b)).chain) == shared


def test_a_chunk_counts_only_after_the_same_beginning():
    same = "s" * CHUNK
    assert not set(Prefix.of("a" * CHUNK + same).chain) & set(Prefix.of("b" * CHUNK + same).chain)


def test_hashes_are_the_same_in_every_process():
    assert Prefix.of("x" * CHUNK).chain[0].hex() == "924148bc2bfb9470"
    assert Prefix.of(TokenIds.of(range(CHUNK_TOKENS))).chain[0].hex() == "e7e91fa82c084074"


def test_text_ids_and_salts_are_kept_apart():
    text = "x" * CHUNK
    chains = [Prefix.of(text), Prefix.of(text, "adapter"), Prefix.of(TokenIds.of(text.encode()))]
    assert len({prefix.chain[0] for prefix in chains}) == 3


@pytest.mark.parametrize(
    ("stream", "num_tokens", "num_chunks"),
    [
        ("", 0, 0),
        (TokenIds(b""), 0, 0),
        ("abc", 1, 0),
        ("a" * 127, 32, 0),
        ("a" * 128, 32, 1),
        ("字" * 128, 96, 3),
        ("\ud800" * 128, 96, 3),
        (TokenIds.of(range(31)), 31, 0),
        (TokenIds.of(range(64)), 64, 2),
    ],
)
def test_tokens_are_estimated_for_text_and_counted_for_ids(stream, num_tokens, num_chunks):
    prefix = Prefix.of(stream)
    assert (prefix.num_tokens, len(prefix.chain)) == (num_tokens, num_chunks)


def test_a_chain_has_a_limit_and_the_tokens_have_none():
    prefix = Prefix.of("a" * (CHUNK * (units(MAX_CHUNKS) + 100)))
    assert len(prefix.chain) == MAX_CHUNKS
    assert prefix.num_tokens == CHUNK_TOKENS * (units(MAX_CHUNKS) + 100)


def test_long_prompts_have_few_chunks():
    """Placing a request takes microseconds for each chunk, on the event loop."""
    rng = random.Random(1)
    ids = TokenIds.of([rng.randrange(2**18) for _ in range(100_000)])
    chain = Prefix.of(ids).chain
    assert len(chain) < 350
    assert tokens(len(chain)) <= 100_000 < tokens(len(chain) + 1)
    for length in (31, 32, 4_095, 4_096, 4_607, 4_608, 60_000, 99_999):
        part = Prefix.of(ids[:length]).chain
        assert part == chain[: len(part)]
        assert tokens(len(part)) <= length < tokens(len(part) + 1)
        assert whole_chunks(length // CHUNK_TOKENS) == len(part)


def test_large_chunks_count_for_what_they_hold():
    """A replica's capacity is in tokens, however long the prompts are."""
    rng = random.Random(2)
    index, capacity = PrefixIndex(), 2 * units(200)
    index.resize("a", capacity)
    chains = [Prefix.of(rng.randbytes(CHUNK * units(200) // 2).hex()).chain for _ in range(3)]
    for now, chain in enumerate(chains):
        assert len(chain) == 200
        index.add("a", chain, now, 1)
        index.check_integrity()
    assert index.matched("a", chains[2]) == 200
    assert 195 < index.matched("a", chains[1]) < 200
    assert index.matched("a", chains[0]) == 0


# --- streams of a request -------------------------------------------------------------------------


def test_each_prompt_of_embeddings_counts():
    body = {"prompt_embeds": ["AA", "BB"], "prompt": ["a", "b", "c"]}
    assert len(streams_of("completion", body, None)) == 5


@pytest.mark.parametrize(
    ("body", "streams"),
    [
        ({"prompt": "a"}, ["a"]),
        ({"prompt": "a", "guidance_scale": 1}, ["a"]),
        ({"prompt": "a", "guidance_scale": 2}, ["a", ()]),
        ({"prompt": "a", "guidance_scale": 2, "negative_prompt": "n"}, ["a", "n"]),
        ({"prompt": "a", "cfg_scale": 2, "negative_prompt_ids": [4, 5]}, ["a", (4, 5)]),
        ({"prompt": [1, 2], "guidance_scale": 2, "negative_prompt": "n"}, [(1, 2), "n"]),
        ({"prompt": ["a", "b"]}, ["a"]),
        ({"prompt": [[1, 2], [3]]}, [(1, 2)]),
        ({"prompt": []}, [()]),
        ({"prompt": [1, "a"]}, [()]),
        ({"prompt": [True]}, [()]),
        ({"prompt": [-1]}, [()]),
        ({"prompt": 7}, [()]),
        ({}, [()]),
        ({"prompt_embeds": "AAAA"}, [""]),
        ({"prompt_embeds": ["AA", "BB"], "prompt": "a"}, [""]),
        ({"prompt_embeds": "AA", "guidance_scale": 2, "negative_prompt": "n"}, ["", "n"]),
        ({"prompt": "a", "guidance_scale": 2, "negative_prompt_embeds": "AA"}, ["a", ""]),
        ({"prompt": "a", "guidance_streams": [{"weight": 1, "prompt_embeds": "A"}]}, ["a", ""]),
    ],
)
def test_streams_of_completions(body, streams):
    assert prompts_of("completion", body, read_guidance(body, "completion")) == streams


FOLLOWERS = [
    {"weight": 1, "prompt": "n"},
    {"weight": 1, "prompt": ""},
    {"weight": 1, "token_ids": [4, 5]},
    {"weight": 1, "lora": "b"},
]


@pytest.mark.parametrize(
    ("endpoint", "body", "streams"),
    [
        ("completion", {"prompt": "a"}, ["a", "n", "", (4, 5), "a"]),
        ("completion", {"prompt": ["a", "b"]}, ["a", "n", "", (4, 5), "a"]),
        (
            "chat",
            {"messages": [{"role": "user", "content": "q"}]},
            [
                "\0user\0q",
                "\0system\0n\0user\0q",
                "\0user\0q",
                (4, 5),
                "\0user\0q",
            ],
        ),
        ("chat", {"messages": "no list"}, ["", "", "", (4, 5), ""]),
    ],
)
def test_streams_of_a_group_with_several_followers(endpoint, body, streams):
    body = {**body, "guidance_streams": FOLLOWERS}
    assert prompts_of(endpoint, body, read_guidance(body, endpoint)) == streams


def test_a_stream_without_a_prompt_has_each_leaders():
    streams = [{"weight": -1, "lora": "b"}, {"weight": 1, "prompt": "n"}]
    body = {"prompt": ["a", "bb"], "guidance_streams": streams}
    groups = streams_of("completion", body, read_guidance(body, "completion"))
    assert [[stream.prompt for stream in group] for group in groups] == [
        ["a", "a", "n"],
        ["bb", "bb", "n"],
    ]
    assert [stream.adapter for stream in groups[1]] == [None, "b", None]


def test_a_conversation_of_a_stream():
    streams = [{"weight": -1, "messages": [{"role": "user", "content": "other"}]}]
    body = {"messages": [{"role": "user", "content": "q"}], "guidance_streams": streams}
    assert prompts_of("chat", body, read_guidance(body, "chat"))[1] == "\0user\0other"


def test_streams_of_a_chat():
    def streams(**body):
        body["messages"] = [
            {"role": "system", "content": "Be kind."},
            {"role": "user", "content": "Hello"},
        ]
        return prompts_of("chat", body, read_guidance(body, "chat"))

    conditional = "\0system\0Be kind.\0user\0Hello"
    assert streams() == [conditional]
    assert streams(guidance_scale=2) == [conditional, ()]
    assert streams(guidance_scale=2, negative_prompt="Be rude.") == [
        conditional,
        "\0system\0Be rude.\0user\0Hello",
    ]
    assert streams(guidance_scale=2, negative_prompt_token_ids=[3]) == [conditional, (3,)]
    negative = [{"role": "user", "content": "Bye"}]
    assert streams(guidance_scale=2, negative_messages=negative) == [conditional, "\0user\0Bye"]


def test_messages_with_parts_tools_and_calls():
    parts = [
        {"type": "text", "text": "a"},
        {"type": "image_url", "image_url": {}},
        {"type": "text", "text": "b"},
        7,
    ]
    messages = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None, "tool_calls": [{"id": 1}]},
    ]
    (text,) = prompts_of("chat", {"messages": messages, "tools": [{"name": "f"}]}, None)
    assert text == "[{'name': 'f'}]\n\0user\0ab\0image_url\0\0\0assistant\0[{'id': 1}]"


def test_a_conversation_that_goes_on_extends_its_own_prefix():
    rng = random.Random(1)
    messages = [{"role": "system", "content": "s" * 600}]
    chains = []
    for _ in range(6):
        messages.append(
            {"role": rng.choice(["user", "assistant"]), "content": rng.randbytes(200).hex()}
        )
        chains.append(prefixes_of("chat", {"messages": messages}, None)[0].chain)
    for before, after in pairwise(chains):
        assert len(after) > len(before)
        assert after[: len(before)] == before
    other = [messages[0], {"role": "user", "content": "something else"}]
    assert (
        common(prefixes_of("chat", {"messages": other}, None)[0].chain, chains[-1]) == 600 // CHUNK
    )


def test_adapters_share_nothing():
    body = {"prompt": "x" * 300}
    chains = [
        prefixes_of("completion", {**body, "model": model}, None)[0].chain
        for model in ("a", "b", "a")
    ]
    assert chains[0] == chains[2]
    assert not set(chains[0]) & set(chains[1])


def test_a_stream_shares_with_requests_for_its_adapter():
    """Not with the leader, although their prompts are the same."""
    prompt = "x" * 300
    loras = ["b", False, None]
    body = {
        "model": "a",
        "prompt": prompt,
        "guidance_streams": [{"weight": 1, "prompt": prompt, "lora": lora} for lora in loras],
    }
    leader, b, base, own = prefixes_of("completion", body, read_guidance(body, "completion"))
    of_b = prefixes_of("completion", {"model": "b", "prompt": prompt}, None)[0]
    assert b == of_b
    assert own == leader
    assert len({leader.chain, b.chain, base.chain}) == 3
    salted = {**body, "cache_salt": "s"}
    other = prefixes_of("completion", salted, read_guidance(salted, "completion"))
    assert not {p.chain for p in other} & {leader.chain, b.chain, base.chain}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)
MESSAGES = st.lists(
    JSON | st.fixed_dictionaries({"role": JSON, "content": JSON, "tool_calls": JSON}), max_size=3
)
GUIDANCE = st.sampled_from(
    [
        None,
        Guidance(params=GuidanceParams(scale=2.0)),
        Guidance(params=GuidanceParams(scale=2.0, negative_prompt="n")),
        Guidance(params=GuidanceParams(scale=2.0, negative_prompt_token_ids=(1, 2))),
        Guidance(
            params=GuidanceParams(scale=2.0),
            negative_messages=[{"role": 1}, 2, {"role": [], "content": [[]]}],
        ),
        Guidance(
            params=GuidanceParams(
                streams=(
                    FollowerParams(weight=1, prompt="n"),
                    FollowerParams(weight=1, messages=(2, {"role": [], "content": [[]]})),
                    FollowerParams(weight=1, token_ids=(2**32 - 1,)),
                    FollowerParams(weight=1, lora="b"),
                )
            )
        ),
    ]
)


@given(st.sampled_from(["completion", "chat"]), JSON, JSON | MESSAGES, JSON, GUIDANCE)
def test_whatever_a_client_sends_has_prefixes(endpoint, prompt, messages, tools, guidance):
    """If the router raised, the request would wait forever."""
    body = {
        "prompt": prompt,
        "messages": messages,
        "tools": tools,
        "model": prompt,
        "cache_salt": tools,
    }
    prefixes = prefixes_of(endpoint, body, guidance)
    assert len(prefixes) == (1 if guidance is None else guidance.streams)


def test_very_deep_nesting_has_prefixes_too():
    tools = []
    for _ in range(100_000):
        tools = [tools]
    assert prompts_of("chat", {"messages": [], "tools": tools}, None) == [""]
    while tools:  # otherwise freeing it recurses, too
        tools = tools.pop()


# --- popularity -----------------------------------------------------------------------------------


def test_popularity_is_a_count_that_decays():
    popularity = Popularity(window_s=10)
    for now in (0, 5, 5, 20):
        popularity.asked([b"a"], now)
    expected = sum(math.exp(-(30 - at) / 10) for at in (0, 5, 5, 20))
    assert popularity.count(b"a", 30) == pytest.approx(expected)
    assert popularity.count(b"b", 30) == 0


def test_a_steady_rate_counts_as_rate_times_window():
    popularity = Popularity(window_s=50)
    for i in range(10_000):
        popularity.asked([b"a"], i / 4)
    assert popularity.count(b"a", 2500) == pytest.approx(4 * 50, rel=0.01)


def test_the_least_recently_requested_are_forgotten():
    popularity = Popularity(window_s=10, capacity=2)
    for chunk in (b"a", b"b", b"a", b"c"):
        popularity.asked([chunk], 0)
    assert [popularity.count(chunk, 0) for chunk in (b"a", b"b", b"c")] == [2, 0, 1]


# --- the index ------------------------------------------------------------------------------------


class Oracle:
    """An LRU cache of chains, in plain loops.

    Each use stamps a chain from its end to its root, with the request's own chunks first. When the
    cache is over its capacity, the leaf with the oldest stamp is evicted.
    """

    def __init__(self, capacity):
        self.capacity, self.stamp, self.parent, self.clock = capacity, {}, {}, 0

    def add(self, chain, own):
        chain = chain[: self.capacity]
        own = [("own", self.clock, i) for i in range(min(own, self.capacity - len(chain)))]
        nodes = [(chunk, parent) for parent, chunk in zip((None, *chain), chain, strict=False)]
        for chunk, parent in [(chunk, chain[-1] if chain else None) for chunk in own] + nodes[::-1]:
            self.clock += 1
            self.stamp[chunk], self.parent[chunk] = self.clock, parent
        while len(self.stamp) > self.capacity:
            parents = {self.parent[chunk] for chunk in self.stamp}
            oldest = min(
                (chunk for chunk in self.stamp if chunk not in parents), key=self.stamp.__getitem__
            )
            del self.stamp[oldest]

    def matched(self, chain):
        return next((i for i, chunk in enumerate(chain) if chunk not in self.stamp), len(chain))


def random_chain(rng):
    """A chain from a tree with few branches, so that chains share beginnings of all lengths."""
    return tuple(
        Prefix.of("".join(rng.choice("ab") * CHUNK for _ in range(rng.randint(0, 6)))).chain
    )


@pytest.mark.parametrize("seed", range(30))
def test_the_index_holds_what_the_oracle_holds(seed):
    rng = random.Random(seed)
    capacity = rng.randint(0, 30)
    index, oracles = PrefixIndex(), {}
    for now in range(200):
        replica, chain, own = rng.randrange(3), random_chain(rng), rng.randint(0, 3)
        if rng.random() < 0.02:
            index.forget(replica)
            oracles.pop(replica, None)
        if replica not in oracles:
            index.resize(replica, capacity)
            oracles[replica] = Oracle(capacity)
        index.add(replica, chain, now, own)
        oracles[replica].add(chain, own)
        index.check_integrity()
        for chain in (random_chain(rng) for _ in range(5)):
            assert [index.matched(r, chain) for r in oracles] == [
                oracle.matched(chain) for oracle in oracles.values()
            ]


def test_a_replica_that_is_unknown_or_forgotten_holds_nothing():
    index, chain = PrefixIndex(), Prefix.of("x" * 500).chain
    index.add("a", chain, 0)
    index.hold("a", chain)
    assert (index.matched("a", chain), index.in_use("a", chain)) == (3, 3)
    index.forget("a")
    assert (index.matched("a", chain), index.in_use("a", chain), index.matched("b", chain)) == (
        0,
        0,
        0,
    )


def test_of_a_long_prompt_few_chunks_are_looked_up():
    """A prompt of 100,000 tokens has 3,125, and each request is compared on up to 32 replicas."""

    class Chain(tuple):
        looked_up = 0

        def __iter__(self):
            for chunk in super().__iter__():
                Chain.looked_up += 1
                yield chunk

        def __getitem__(self, place):
            Chain.looked_up += 1
            return super().__getitem__(place)

    chunks = [b"chunk %d" % i for i in range(3125)]
    index = PrefixIndex(default_capacity=2000)
    index.add("a", chunks, 0.0)
    index.hold("a", chunks[:700])
    for found, expected in ((index.matched, whole_chunks(2000)), (index.in_use, 700)):
        Chain.looked_up = 0
        assert found("a", Chain(chunks)) == expected
        assert Chain.looked_up <= 12


def test_chunks_are_in_use_until_the_last_stream_ends():
    index = PrefixIndex()
    short, long = (Prefix.of("x" * CHUNK * n).chain for n in (2, 5))
    for chain in (short, long, long):
        index.hold("a", chain)
    index.release("a", long)
    assert index.in_use("a", long) == 5
    index.release("a", long)
    assert index.in_use("a", long) == 2
    index.check_integrity()
    index.release("a", short)
    assert index.in_use("a", long) == 0


def test_a_smaller_capacity_takes_effect():
    index, chain = PrefixIndex(), Prefix.of("x" * 1280).chain
    index.add("a", chain, 0)
    index.resize("a", 4)
    index.add("a", (), 1)
    assert index.matched("a", chain) == 4


def test_the_lifetime_is_measured_from_evictions():
    index = PrefixIndex(window_s=100)
    index.resize("a", 20)
    assert index.lifetime_s == 100
    for now in range(1000):  # a new chunk a second: each is evicted when it is 20 s old
        index.add("a", Prefix.of(f"{now:08}" * 16).chain, now)
    assert index.lifetime_s == pytest.approx(20, abs=1)


def test_expected_uses_are_those_of_one_replica_in_one_lifetime():
    index, chain = PrefixIndex(window_s=100), Prefix.of("x" * CHUNK).chain
    for i in range(5000):  # five a second
        index.add("a", chain, i / 5)
    assert index.expected_uses(chain[0], 1000, num_replicas=4) == pytest.approx(
        5 * 100 / 4, rel=0.01
    )
    assert index.expected_uses(chain[0], 1000 + 100 * math.log(2), 4) == pytest.approx(
        5 * 100 / 8, rel=0.01
    )
    assert index.expected_uses(b"never asked", 1000, 4) == 0
