"""Which names of other packages our source uses that the installed packages do not have."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from cfg_core.compat.classes import own_attributes
from cfg_core.compat.reader import imports, read
from cfg_core.compat.uses import Use, mismatch
from cfg_core.patching import Patch, Row, load, stock


def modules(package: str) -> Iterator[tuple[str, Path]]:
    """The dotted name and the file of each module in `package`, subpackages included."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"there is no package {package}")
    folder = Path(spec.submodule_search_locations[0])
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).with_suffix("").parts
        yield ".".join((package, *(part for part in parts if part != "__init__"))), path


def uses(path: Path, module: str) -> list[Use]:
    """As reader.read. If the file cannot be imported, this tells which import is to blame."""
    try:
        return read(path, module)
    except Exception as error:  # whatever goes wrong in our module with another package
        found = imports(path)
        if not any(use.problem for use in found):
            name = getattr(error, "name", None) or module
            told = f"cannot be imported: {type(error).__name__}: {error}"
            found.append(Use(module, f"{name}:", told))
        return found


def problems(path: Path, module: str) -> list[str]:
    """The problems of one file, one sentence each. module: its dotted name."""
    return [as_sentence(use) for use in uses(path, module) if use.problem]


def as_sentence(use: Use) -> str:
    """The problem of a use as a sentence: where, what, why."""
    return f"{use.where}: {use.target.rstrip(':')}: {use.problem}"


def row_uses(rows: Iterable[Row]) -> list[Use]:
    """A use for each row of a table: what it changes must exist, and a patch be called alike."""
    return [Use(row.by, row.target, _misfit(row), overrides=True) for row in rows]


def _misfit(row: Row) -> str | None:
    try:
        owner = row.owner
    except (ImportError, AttributeError) as error:
        return f"does not exist ({error})"
    if row.attribute == "__class__":
        return None
    original = stock(row)
    if isinstance(row, Patch) and row.adds:
        return None if original is None else "exists, and ours would replace it"
    if original is None and not (
        inspect.isclass(owner) and any(row.attribute in own_attributes(b) for b in owner.__mro__)
    ):
        return "does not exist"
    return _patch_misfit(row, original) if isinstance(row, Patch) and original else None


def _patch_misfit(patch: Patch, original: Any) -> str | None:
    try:
        if patch.fault and not load(patch.fault)(original):
            return None  # it is not applied
        replacement = load(patch.by)(original)
    except Exception as error:  # whatever goes wrong in our function with another original
        return f"our replacement cannot be made: {type(error).__name__}: {error}"
    ours, theirs = (getattr(f, "__func__", f) for f in (replacement, original))
    if not (inspect.isfunction(ours) and inspect.isfunction(theirs)):
        return None
    return mismatch(inspect.signature(ours, follow_wrapped=False), inspect.signature(theirs))
