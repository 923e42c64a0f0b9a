"""What we change inside other packages, as rows of tables: patches, and uses of private names.

A `Patch` replaces an attribute of a class or module, for all of the process; `apply` does it. A
`PrivateUse` changes one object that our code holds, where it holds it; no table applies it. The
tables are in `cfg_core/vllm_plugin/vllm_patches.py`, `cfg_core/prefill_only/private_uses.py` and
`deployments/serve_patches.py`, and docs/patches.md shows them. Standard library only.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

NO_WAY = "no way to notice"
"""`Row.needed_while` where nothing in the other package tells that a row is no longer needed."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One change.

    target: what is changed, as `package.module:Class.attribute` or `package.module:attribute`.
    by: the function or class of ours that changes it or is put there, as `package.module:name`.
    process: the process in which it happens.
    reason: why it is needed.
    upstream: what the other package has today.
    test: the test that fails when the change no longer works.
    needed_while: what holds in the installed package as long as the change is needed. A contract
        test fails once it does not. `package.module:function calls NAME`: the function makes or
        calls it by its name, so there is no hook to choose another. `tests/..py::test_..`: that
        test passes. NO_WAY: nothing tells.
    """

    target: str
    by: str
    process: str
    reason: str
    upstream: str
    test: str
    needed_while: str

    @property
    def owner(self) -> Any:
        """The class or module that has the attribute, after an import of its module."""
        module, _, path = self.target.partition(":")
        owner: Any = importlib.import_module(module)
        for name in path.split(".")[:-1]:
            owner = getattr(owner, name)
        return owner

    @property
    def attribute(self) -> str:
        return self.target.rpartition(":")[2].rpartition(".")[2]


@dataclass(frozen=True, kw_only=True)
class Patch(Row):
    """A replaced attribute of a class or module.

    by: called with the original; what it returns takes the original's place.
    fault: a function of ours that is called with the original, and returns whether it has the fault
        that the patch mends. `apply` skips the row if it has not. Empty: the row always applies.
    adds: whether the other package has no such attribute, so that nothing is replaced.
    """

    fault: str = ""
    adds: bool = False


@dataclass(frozen=True, kw_only=True)
class PrivateUse(Row):
    """A changed attribute, or class, of one object."""


_originals: dict[str, Any] = {}
"""The originals that `apply` has replaced in this process, by target."""


def apply(patches: Iterable[Patch], process: str) -> None:
    """Apply the patches of this process, each once. Those whose fault is not there are skipped."""
    for patch in patches:
        if patch.process != process or patch.target in _originals:
            continue
        original = inspect.getattr_static(patch.owner, patch.attribute, None)
        if patch.fault and not load(patch.fault)(original):
            continue
        _originals[patch.target] = original
        setattr(patch.owner, patch.attribute, load(patch.by)(original))


def stock(row: Row) -> Any:
    """Return the original at the row's target, whether or not `apply` has replaced it."""
    current = inspect.getattr_static(row.owner, row.attribute, None)
    return _originals.get(row.target, current)


def applied() -> list[str]:
    """Return the targets that `apply` has replaced in this process."""
    return list(_originals)


def load(path: str) -> Any:
    """Import the object that `path` (`package.module:name`) names, and return it."""
    module, _, name = path.partition(":")
    return attrgetter(name)(importlib.import_module(module))
