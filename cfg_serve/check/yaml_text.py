"""Read a YAML file, or say which line is wrong."""

from __future__ import annotations

import difflib
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from cfg_serve.errors import CommandError


class _Loader(yaml.SafeLoader):
    """Refuses a key that stands twice in one mapping. YAML itself takes the last one in silence."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen and key.tag != "tag:yaml.org,2002:merge":
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key `{key.value}` stands here a second time", key.start_mark
                )
            if isinstance(key.value, str):
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def read(path: Path) -> dict[str, Any]:
    """The mapping that the file holds. Raises CommandError that names the file, and the line."""
    given = parse(_text(path), str(path))
    if given is None:
        raise CommandError(f"{path} is empty: it needs `applications:`.{_SEE}")
    if not isinstance(given, dict):
        raise CommandError(f"{path} holds {_kind(given)}, and not keys such as `applications:`.")
    return given


_SEE = " `cfg-serve serve MODEL --print-config` shows a whole file."


def parse(text: str, name: str) -> Any:
    """What the YAML `text` says. Raises CommandError with the line of what is wrong.

    name: of the file, for the message.
    """
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise CommandError(_wrong_line(text, name, mark, error)) from None
    except yaml.YAMLError as error:
        raise CommandError(f"{name} is no YAML: {' '.join(str(error).split())}") from None


def _wrong_line(text: str, name: str, mark: Any, error: yaml.MarkedYAMLError) -> str:
    said = " ".join(x for x in (error.context, error.problem) if x)
    if mark is None:
        return f"{name} is no YAML: {said}."
    lines = text.splitlines()
    shown = lines[mark.line] if mark.line < len(lines) else ""
    hint = " Indent with spaces." if "\t" in shown else ""
    return f"{name}, line {mark.line + 1}: {said}.{hint}\n    {shown.strip()[:120]}"


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise CommandError(f"{path} does not exist.{_nearest(path)}") from None
    except IsADirectoryError:
        raise CommandError(f"{path} is a folder: name a YAML file.") from None
    except UnicodeDecodeError as error:
        raise CommandError(
            f"{path} is not UTF-8 at byte {error.start}: save it as UTF-8."
        ) from None
    except OSError as error:
        raise CommandError(f"{path} cannot be read: {error.strerror}.") from None


def _nearest(path: Path) -> str:
    """The file beside it whose name is nearest."""
    names = [other.name for other in path.parent.glob("*.y*ml")] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, names, n=1)
    return f" Did you mean {path.parent / near[0]}?" if near else ""


def _kind(given: object) -> str:
    return (
        "a list" if isinstance(given, list) else "a text" if isinstance(given, str) else "a value"
    )
