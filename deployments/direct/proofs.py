"""How two sides of a connection prove to each other that they know the same secret.

Each side sends a random challenge, and answers the other's with a keyed hash (HMAC-SHA256, RFC
2104) of both challenges and its own role. The role keeps a listener's proof from being used as a
caller's.
"""

from __future__ import annotations

import hmac
import secrets

CHALLENGE_BYTES = 32
PROOF_BYTES = 32

CALLER, LISTENER = b"caller", b"listener"
"""The roles."""


def new_challenge() -> bytes:
    return secrets.token_bytes(CHALLENGE_BYTES)


def proof(secret: bytes, role: bytes, listener_challenge: bytes, caller_challenge: bytes) -> bytes:
    """The proof of `role` for the challenges of both sides."""
    return hmac.digest(secret, role + listener_challenge + caller_challenge, "sha256")


def is_proof(
    given: bytes, secret: bytes, role: bytes, listener_challenge: bytes, caller_challenge: bytes
) -> bool:
    """Whether `given` is that proof; takes the same time whatever is wrong with it."""
    wanted = proof(secret, role, listener_challenge, caller_challenge)
    return hmac.compare_digest(given, wanted)
