"""Which names of other packages our source uses that the installed packages do not have."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Iterable, Iterator
from pathlib import Path

from cfg_core.foreign.classes import own_attributes
from cfg_core.foreign.reader import imports, read
from cfg_core.foreign.uses import Use, mismatch
from cfg_core.patches import Patch, load, stock


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
    return [told(use) for use in uses(path, module) if use.problem]


def told(use: Use) -> str:
    """The problem of a use as a sentence: where, what, why."""
    return f"{use.where}: {use.target.rstrip(':')}: {use.problem}"


def patch_uses(patches: Iterable[Patch]) -> list[Use]:
    """A use for each row of a table of patches: what it replaces must exist and be called alike."""
    return [Use(patch.by, patch.target, _misfit(patch), overrides=True) for patch in patches]


def _misfit(patch: Patch) -> str | None:
    try:
        owner = patch.owner
    except (ImportError, AttributeError) as error:
        return f"does not exist ({error})"
    if patch.attribute == "__class__":
        return None
    original = stock(patch)
    if patch.adds:
        return None if original is None else "exists, and ours would replace it"
    if original is None and not (
        inspect.isclass(owner) and any(patch.attribute in own_attributes(b) for b in owner.__mro__)
    ):
        return "does not exist"
    if patch.per_object or original is None:
        return None
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
