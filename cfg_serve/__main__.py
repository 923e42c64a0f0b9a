"""`python -m cfg_serve` is the command `cfg-serve`."""

from __future__ import annotations

import sys

from cfg_serve.cli import main

if __name__ == "__main__":
    sys.exit(main())
