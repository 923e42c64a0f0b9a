"""Prefixes of prompts as chains of hashes, by which replicas that hold their KV are recognised.

Prefixes are compared as text: chunks of 128 bytes, about 32 tokens, which is two KV blocks. Each
chunk's hash includes everything before it, as vLLM's block hashes do. The hash is BLAKE2b, not
Python's `hash`: it is the same in every process and in every run, so decisions can be replayed, and
clients cannot make chunks collide.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from hashlib import blake2b
from math import ceil

from deployments.requests.streams import BYTES_PER_TOKEN, Prompt

CHUNK_TOKENS = 32

MAX_CHUNKS = 4096
"""Of one stream. What follows (131,072 tokens) is counted, and not compared."""

HASH_BYTES = 8


@dataclass(frozen=True, slots=True)
class Prefix:
    """One stream's prompt. chain: a hash for each whole chunk. num_tokens: of the whole prompt."""

    chain: tuple[bytes, ...]
    num_tokens: int

    @classmethod
    def of(cls, prompt: Prompt, salt: str = "") -> Prefix:
        """salt: what else must be equal for KV to be shared, such as the adapter's name."""
        if isinstance(prompt, str):
            data = prompt.encode("utf-8", "surrogatepass")
            width, num_tokens = CHUNK_TOKENS * BYTES_PER_TOKEN, ceil(len(data) / BYTES_PER_TOKEN)
        else:
            ids = array("q", prompt)
            data, width, num_tokens = ids.tobytes(), CHUNK_TOKENS * ids.itemsize, len(ids)
        return cls(_chain(data, width, f"{type(prompt).__name__} {salt}"), num_tokens)


def _chain(data: bytes, width: int, root: str) -> tuple[bytes, ...]:
    chain = []
    parent = blake2b(root.encode("utf-8", "surrogatepass"), digest_size=HASH_BYTES).digest()
    for start in range(0, min(len(data) // width, MAX_CHUNKS) * width, width):
        parent = blake2b(parent + data[start : start + width], digest_size=HASH_BYTES).digest()
        chain.append(parent)
    return tuple(chain)
