"""Prefixes of prompts as chains of hashes, which tell which replicas hold a prompt's KV cache.

A prompt is cut into chunks: text into chunks of 128 bytes, which is about 32 tokens or two KV
blocks, and token ids into chunks of 32. Chunks are larger far behind the start of a prompt, because
placing a request takes time for each of them. Each chunk's hash includes everything before the
chunk, as vLLM's block hashes do. The hash is BLAKE2b and not Python's `hash`. So it is the same in
every process and every run, decisions can be replayed, and clients cannot make chunks collide.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise
from math import ceil

from deployments.requests.streams import BYTES_PER_TOKEN, Prompt

CHUNK_TOKENS = 32
"""Tokens of a chunk, and the unit of what replicas are believed to hold."""

SMALL_CHUNKS = 128
"""So many chunks at the start of a prompt have one unit. All others have LARGE units."""

LARGE = 16

MAX_CHUNKS = 2048
"""Maximum number of chunks that are compared for one stream.

Tokens after them (after 987,136 tokens) are only counted.
"""

HASH_BYTES = 8


def units(num_chunks: int) -> int:
    """Units in the first `num_chunks` chunks of a prompt."""
    return num_chunks + (LARGE - 1) * max(0, num_chunks - SMALL_CHUNKS)


def whole_chunks(num_units: int) -> int:
    """Chunks that are whole within the first `num_units` units of a prompt."""
    return min(num_units, SMALL_CHUNKS + max(0, num_units - SMALL_CHUNKS) // LARGE)


def tokens(num_chunks: int) -> int:
    """Tokens in the first `num_chunks` chunks of a prompt."""
    return CHUNK_TOKENS * units(num_chunks)


@dataclass(frozen=True, slots=True)
class Prefix:
    """The prompt of one stream.

    chain: a hash for each whole chunk. num_tokens: length of the whole prompt.
    """

    chain: tuple[bytes, ...]
    num_tokens: int

    @classmethod
    def of(cls, prompt: Prompt, salt: str = "") -> Prefix:
        """Make the prefix of a prompt.

        salt: what else must be equal for KV to be shared, such as the adapter's name.
        """
        if isinstance(prompt, str):
            data = prompt.encode("utf-8", "surrogatepass")
            width, num_tokens = CHUNK_TOKENS * BYTES_PER_TOKEN, ceil(len(data) / BYTES_PER_TOKEN)
        else:
            data, width, num_tokens = prompt.packed, CHUNK_TOKENS * 4, len(prompt)
        return cls(_chain(data, width, f"{type(prompt).__name__} {salt}"), num_tokens)


def _chain(data: bytes, width: int, root: str) -> tuple[bytes, ...]:
    """width: bytes of a unit."""
    chain = []
    parent = blake2b(root.encode("utf-8", "surrogatepass"), digest_size=HASH_BYTES).digest()
    ends = [width * units(n) for n in range(1 + min(MAX_CHUNKS, whole_chunks(len(data) // width)))]
    for start, end in pairwise(ends):
        parent = blake2b(parent + data[start:end], digest_size=HASH_BYTES).digest()
        chain.append(parent)
    return tuple(chain)
