"""What the two streams of a request begin with, and which replica is believed to hold it: text in, chunk hashes out.

The ingress has no tokenizer, so prefixes are compared as text: chunks of 128 bytes, about 32 tokens, which is two KV
blocks. Each chunk's hash includes everything before it, as vLLM's block hashes do. The hash is BLAKE2b, not Python's
`hash`: it is the same in every process and in every run, so decisions can be replayed, and clients cannot make
chunks collide.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import count
from typing import Any, TypeAlias

from cfg_core.errors import CfgServeError
from deployments.protocol import Guidance, negative_body

CHUNK_TOKENS = 32
BYTES_PER_TOKEN = 4
"""Of UTF-8 text. English has about 4 bytes a token, Chinese 3 to 4, code 3."""

MAX_CHUNKS = 4096
"""Of one stream: what lies behind (131,072 tokens) is counted as tokens, and compared by nobody."""

HASH_BYTES = 8

Stream: TypeAlias = str | tuple[int, ...]
"""A stream's prompt: text, or token ids."""

Replica: TypeAlias = Hashable


@dataclass(frozen=True, slots=True)
class Prefix:
    """One stream's prompt. chain: a hash for each whole chunk, in order; num_tokens: estimated, of the whole prompt."""

    chain: tuple[bytes, ...]
    num_tokens: int

    @classmethod
    def of(cls, stream: Stream, salt: str = "") -> Prefix:
        """salt: what else must be equal for KV to be shared, such as the adapter's name."""
        if isinstance(stream, str):
            data, width = stream.encode("utf-8", "surrogatepass"), CHUNK_TOKENS * BYTES_PER_TOKEN
            num_tokens = math.ceil(len(data) / BYTES_PER_TOKEN)
        else:
            ids = array("q", stream)
            data, width, num_tokens = ids.tobytes(), CHUNK_TOKENS * ids.itemsize, len(ids)
        return cls(_chain(data, width, f"{type(stream).__name__} {salt}"), num_tokens)


def _chain(data: bytes, width: int, root: str) -> tuple[bytes, ...]:
    chain = []
    parent = blake2b(root.encode("utf-8", "surrogatepass"), digest_size=HASH_BYTES).digest()
    for start in range(0, min(len(data) // width, MAX_CHUNKS) * width, width):
        parent = blake2b(parent + data[start : start + width], digest_size=HASH_BYTES).digest()
        chain.append(parent)
    return tuple(chain)


# --- requests -------------------------------------------------------------------------------------


def prefixes_of(
    endpoint: str, body: Mapping[str, Any], guidance: Guidance | None, tenant: str | None = None
) -> tuple[Prefix, ...]:
    """The prefixes of a request's streams, the conditional first. Never raises.

    tenant: whose KV is found by nobody else; None: it is shared.
    """
    salt = f"{body.get('model')} {body.get('cache_salt')} {tenant}"  # adapters have KV of their own, and so do salts
    return tuple(Prefix.of(stream, salt) for stream in streams_of(endpoint, body, guidance))


def streams_of(endpoint: str, body: Mapping[str, Any], guidance: Guidance | None) -> list[Stream]:
    """The prompts of a request's streams: the conditional's and, if it is guided, the negative's.

    endpoint: "completion" or "chat". Of a list of prompts, the first. A negative that is not given starts at the
    prompt's last token, so its prompt is empty. What is not understood is empty too: vLLM will refuse it.
    """
    conditional = _prompt(endpoint, body)
    if guidance is None or not guidance.enabled:
        return [conditional]
    return [conditional, _negative(endpoint, body, guidance)]


def _negative(endpoint: str, body: Mapping[str, Any], guidance: Guidance) -> Stream:
    if (ids := guidance.params.negative_prompt_token_ids) is not None:
        return _token_ids(ids)
    if guidance.negative_field is None:
        return ()
    try:
        return _prompt(endpoint, negative_body(body, guidance))
    except CfgServeError:  # messages that are no list
        return ""


def _prompt(endpoint: str, body: Mapping[str, Any]) -> Stream:
    try:
        return _conversation(body) if endpoint == "chat" else _completion(body)
    except RecursionError:  # tools nested so deeply that they have no text
        return ""


def _completion(body: Mapping[str, Any]) -> Stream:
    prompt = body.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    return prompt if isinstance(prompt, str) else _token_ids(prompt)


def _token_ids(ids: object) -> tuple[int, ...]:
    if not isinstance(ids, list | tuple) or not all(type(i) is int and 0 <= i < 2**32 for i in ids):
        return ()
    return tuple(ids)


def _conversation(body: Mapping[str, Any]) -> str:
    """The messages in order, tools first, as templates have them. Not the template's text, but equal where it is
    equal: a shared system prompt is a shared prefix, and a conversation that goes on extends its own."""
    messages = body.get("messages")
    if not isinstance(messages, list):
        return ""
    tools = body.get("tools")
    return "".join([f"{tools}\n" if tools else "", *map(_message, messages)])


def _message(message: object) -> str:
    if not isinstance(message, Mapping):
        return ""
    calls = message.get("tool_calls")
    return f"\0{message.get('role')}\0{_content(message.get('content'))}{calls or ''}"


def _content(content: object) -> str:
    """The text of a message: its content, or the text parts of it."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return "".join(str(part["text"]) for part in parts if isinstance(part, Mapping) and "text" in part)


# --- which replica holds what ---------------------------------------------------------------------


class Popularity:
    """How often each chunk was asked for lately: counts that decay with exp(-age / window_s).

    The least recently asked are forgotten beyond `capacity` chunks. `now`: seconds, any clock that does not go back.
    """

    def __init__(self, window_s: float, capacity: int = 2**17) -> None:
        self._window_s, self._capacity = window_s, capacity
        self._counts: OrderedDict[bytes, tuple[float, float]] = OrderedDict()  # chunk -> count, and when

    def asked(self, chain: Sequence[bytes], now: float) -> None:
        for chunk in chain:
            self._counts[chunk] = self.count(chunk, now) + 1.0, now
            self._counts.move_to_end(chunk)
        while len(self._counts) > self._capacity:
            self._counts.popitem(last=False)

    def count(self, chunk: bytes, now: float) -> float:
        """Requests for `chunk` in the last window_s, older ones counting less."""
        count, at = self._counts.get(chunk, (0.0, now))
        return count * math.exp((at - now) / self._window_s)


class PrefixIndex:
    """The chunks that each replica is believed to hold: an LRU for each, as vLLM keeps its cached blocks.

    A chain is touched from its end to its root, so parents are always more recent than their children, and what
    is evicted first is a leaf. Called from one thread; `now` as for Popularity.
    """

    def __init__(self, window_s: float = 120.0, default_capacity: int = 4096) -> None:
        """window_s: how far back requests count; default_capacity: in chunks, of replicas whose KV is not known."""
        self.window_s = window_s
        self.lifetime_s = window_s
        """How long a chunk that nobody asks for stays, at most window_s: learnt from what is evicted."""
        self._default_capacity = default_capacity
        self._capacity: dict[Replica, int] = {}
        self._held: dict[Replica, OrderedDict[bytes, tuple[bytes, float]]] = {}  # chunk -> parent, last used
        self._users: defaultdict[Replica, Counter[bytes]] = defaultdict(Counter)  # chunk -> streams at work with it
        self._popularity = Popularity(window_s)
        self._serial = count()

    def resize(self, replica: Replica, num_chunks: int) -> None:
        """Set what a replica can hold; what is too much goes at the next `add`."""
        self._capacity[replica] = num_chunks

    def matched(self, replica: Replica, chain: Sequence[bytes]) -> int:
        """How many chunks from the start of `chain` the replica holds."""
        held = self._held.get(replica, OrderedDict())
        return next((i for i, chunk in enumerate(chain) if chunk not in held), len(chain))

    def add(self, replica: Replica, chain: Sequence[bytes], now: float, own_chunks: int = 0) -> None:
        """The replica computes `chain`, or has it and uses it again. own_chunks: how much KV the stream takes besides,
        for its output and for what fills no chunk: cached too, until evicted, but found by nobody."""
        held = self._held.setdefault(replica, OrderedDict())
        capacity = self._capacity.get(replica, self._default_capacity)
        for _ in range(min(own_chunks, capacity - len(chain))):
            held[b"own %d" % next(self._serial)] = chain[-1] if chain else b"", now
        for i in reversed(range(min(len(chain), capacity))):
            held[chain[i]] = chain[i - 1] if i else b"", now
            held.move_to_end(chain[i])
        while len(held) > capacity:
            _, (_, last_used) = held.popitem(last=False)
            self._learn_lifetime(now - last_used)
        self._popularity.asked(chain, now)

    def hold(self, replica: Replica, chain: Sequence[bytes]) -> None:
        """A stream there is at work with `chain`, until as many calls of `release`."""
        self._users[replica].update(chain)

    def release(self, replica: Replica, chain: Sequence[bytes]) -> None:
        users = self._users[replica]
        for chunk in chain:
            users[chunk] -= 1
            if users[chunk] <= 0:
                del users[chunk]

    def in_use(self, replica: Replica, chain: Sequence[bytes]) -> int:
        """How many chunks from the start of `chain` streams are at work with: one more takes no KV for them."""
        users = self._users.get(replica, Counter())
        return next((i for i, chunk in enumerate(chain) if chunk not in users), len(chain))

    def _learn_lifetime(self, idle_s: float) -> None:
        """A moving average over the last hundred evictions or so."""
        self.lifetime_s += (min(idle_s, self.window_s) - self.lifetime_s) / 100

    def expected_uses(self, chunk: bytes, now: float, num_replicas: int) -> float:
        """How often one replica would use `chunk` before evicting it, if all replicas shared its requests evenly."""
        rate = self._popularity.count(chunk, now) / self.window_s
        return rate * self.lifetime_s / num_replicas

    def forget(self, replica: Replica) -> None:
        """The replica is gone, and its cache with it."""
        for table in (self._held, self._users, self._capacity):
            table.pop(replica, None)

    def check_integrity(self) -> None:
        """Parents are held, and more recent than their children."""
        for held in self._held.values():
            place = {chunk: i for i, chunk in enumerate(held)}
            for chunk, (parent, last_used) in held.items():
                if parent:
                    assert place[parent] > place[chunk]
                    assert held[parent][1] >= last_used
        assert all(num > 0 for users in self._users.values() for num in users.values())
