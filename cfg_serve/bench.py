"""`cfg-serve bench`: the short set of benchmarks of the checkout."""

from __future__ import annotations

import subprocess
import sys

from cfg_serve.errors import CommandError
from cfg_serve.home import checkout


def run() -> int:
    """Run `python -m benchmarks` in the checkout; returns its exit status.

    Raises CommandError where there is none.
    """
    root = checkout()
    if root is None or not (root / "benchmarks" / "__main__.py").is_file():
        raise CommandError(
            "the benchmarks are in the repository, and not in the installed package: clone it, run"
            " `make setup`, and then `make bench`."
        )
    try:
        return subprocess.call([sys.executable, "-m", "benchmarks"], cwd=root)
    except KeyboardInterrupt:
        return 130
