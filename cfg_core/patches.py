"""Patch: one replacement inside another package, as a row of a table.

The tables are in `cfg_core/vllm_plugin/patches.py`, `cfg_core/prefill_only/patches.py` and
`deployments/patches.py`. Each row says what is replaced, in which process, why, what upstream has,
and which test fails when the patch is no longer needed. Standard library only.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Patch:
    """One row.

    target: what is replaced, as `package.module:Class.attribute` or `package.module:attribute`.
    by: a function or class of ours, as `package.module:name`. If `per_object` is false, `apply`
        calls it with the original, and puts what it returns in the original's place. If
        `per_object` is true, our code uses it where the object is made, and `apply` skips the row.
    process: the process in which the replacement happens.
    reason: why it is needed.
    upstream: what the other package has today.
    test: the test that fails when the patch is no longer needed, or no longer works.
    per_object: whether the attribute is replaced on single objects, not on its class or module.
    fault: a function of ours that is called with the original, and returns whether it has the fault
        that the patch mends. `apply` skips the row if it has not. Empty: the row always applies.
    adds: whether the other package has no such attribute, so that nothing is replaced.
    """

    target: str
    by: str
    process: str
    reason: str
    upstream: str
    test: str
    per_object: bool = False
    fault: str = ""
    adds: bool = False

    @property
    def owner(self) -> Any:
        """The class or module whose attribute is replaced, after an import of its module."""
        module, _, path = self.target.partition(":")
        owner: Any = importlib.import_module(module)
        for name in path.split(".")[:-1]:
            owner = getattr(owner, name)
        return owner

    @property
    def attribute(self) -> str:
        return self.target.rpartition(":")[2].rpartition(".")[2]


_originals: dict[str, Any] = {}
"""The originals that `apply` has replaced in this process, by target."""


def apply(patches: Iterable[Patch]) -> None:
    """Apply the patches of classes and modules, each once per process.

    Patches of single objects are skipped, and those whose fault the installed version has not.
    """
    for patch in patches:
        if patch.per_object or patch.target in _originals:
            continue
        original = inspect.getattr_static(patch.owner, patch.attribute, None)
        if patch.fault and not load(patch.fault)(original):
            continue
        _originals[patch.target] = original
        setattr(patch.owner, patch.attribute, load(patch.by)(original))


def stock(patch: Patch) -> Any:
    """Return the original at the patch's target, whether or not `apply` has replaced it."""
    current = inspect.getattr_static(patch.owner, patch.attribute, None)
    return _originals.get(patch.target, current)


def applied() -> list[str]:
    """Return the targets that `apply` has replaced in this process."""
    return list(_originals)


def load(path: str) -> Any:
    """Import the object that `path` (`package.module:name`) names, and return it."""
    module, _, name = path.partition(":")
    return attrgetter(name)(importlib.import_module(module))


def as_markdown(patches: Iterable[Patch]) -> str:
    """Return the table as Markdown. scripts/patches.py writes it to docs/patches.md."""
    rows = ["| replaced | in | why | upstream | test |", "|---|---|---|---|---|"]
    for patch in patches:
        target = patch.target.replace(":", ".") + (" of one object" if patch.per_object else "")
        cells = (target, patch.process, patch.reason, patch.upstream, patch.test)
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows) + "\n"
