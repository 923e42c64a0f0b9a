"""The command `python -m deployments.access`: make an API key, or print the digest of one.

A key itself is never stored, sent to a replica or logged. Configurations hold its SHA-256 digest,
or name the environment variable that holds the key. The limits of a key are in config/access.py.
Imports neither ray, vllm nor torch.
"""

from __future__ import annotations

import argparse
import secrets
import sys
from collections.abc import Sequence

from deployments.config.access import _SENDABLE, digest_of

# --- making keys ----------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> None:
    """Print a new key on stderr, and its entry for the YAML file on stdout.

    So a redirected stdout never holds a key. With `--hash`: read a key from stdin, and print its
    SHA-256 digest.
    """
    parser = argparse.ArgumentParser(
        prog="python -m deployments.access", description="Make an API key."
    )
    parser.add_argument(
        "--hash",
        action="store_true",
        help="read a key from stdin, print its SHA-256 digest instead",
    )
    if parser.parse_args(argv).hash:
        key = sys.stdin.readline().rstrip("\r\n")
        if not _SENDABLE.fullmatch(key):
            sys.exit("Put the key alone on one line: ASCII characters, no spaces.")
        print(digest_of(key).hex())
        return
    key = secrets.token_urlsafe(32)
    print(
        f"The API key (give it to its holder; it is not stored): {key}\n"
        "The entry for `access.keys`:",
        file=sys.stderr,
    )
    print(f'- name: CHANGE-ME\n  sha256: "{digest_of(key).hex()}"')


if __name__ == "__main__":
    main()
