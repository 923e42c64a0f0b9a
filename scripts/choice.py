"""Which device and which version of vLLM .venv is made for.

VLLM and CFG_SERVE_DEVICE choose. If one of them is given, device and version are kept in .venv and
hold until one is given again: after `make setup VLLM=0.32`, a `make serve` does not remove 9 GB to
install the default. Another device begins with its newest list. `make clean` forgets what is kept.
A default is not kept, so that a new GPU and a new list take effect.

Only the standard library is used, because scripts/setup.py asks before anything is installed.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import NamedTuple

from lists import DEVICES, runtime_lists, versions
from machine import SetupError, asked_device, detect_device


class Choice(NamedTuple):
    device: str
    vllm: str
    asked: bool
    """Whether the user asked for any of it, now or earlier. If not, it is the default."""

    @property
    def runtime(self) -> str:
        """Name of the list of pins."""
        return f"{self.device}-{self.vllm}"


def choose(file: Path) -> Choice:
    """What the user asks for; else what `file` keeps; else the newest list for this machine.

    Raises SetupError if there is no such list.
    """
    kept = read(file)
    asked = asked_device(), os.environ.get("VLLM", "")
    device = asked[0] or (kept.device if kept else detect_device())
    exist = versions(device)
    earlier = kept.vllm if kept and kept.device == device and kept.vllm in exist else ""
    vllm = asked[1] or earlier or exist[-1]
    if vllm not in exist:
        raise SetupError(refusal(device, vllm))
    return Choice(device, vllm, bool(kept or any(asked)))


def refusal(device: str, vllm: str) -> str:
    build = {"cpu": "CPU", "cuda": "CUDA"}[device]
    ways = [f"VLLM={version}" for version in versions(device)]
    ways += [f"CFG_SERVE_DEVICE={other}" for other in DEVICES if vllm in versions(other)]
    return (
        f"vLLM {vllm} has no {build} build here: requirements/ has {', '.join(runtime_lists())}."
        f" Use {', or '.join(ways)}."
    )


def read(file: Path) -> Choice | None:
    try:
        kept = Choice(**json.loads(file.read_text()), asked=True)
    except (OSError, ValueError, TypeError):
        return None
    return kept if kept.device in DEVICES else None


def keep(choice: Choice, file: Path) -> None:
    """Write `choice` for later runs, if the user asked for any of it."""
    if choice.asked:
        file.write_text(json.dumps({"device": choice.device, "vllm": choice.vllm}) + "\n")
