"""Read a YAML file, or say which line is wrong."""

from __future__ import annotations

import difflib
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from cfg_serve.check.lines import Lines
from cfg_serve.errors import CommandError

_TIMESTAMP = "tag:yaml.org,2002:timestamp"


class _Loader(yaml.SafeLoader):
    """Refuses a key that stands twice in one mapping. YAML itself takes the last one in silence."""

    # A table of its own: lm-format-enforcer, which vLLM may import, makes texts of all dates.
    yaml_constructors = yaml.SafeLoader.yaml_constructors | {
        _TIMESTAMP: yaml.constructor.SafeConstructor.construct_yaml_timestamp
    }

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """As usual; a value that is none of its type, such as a date 2026-13-01, has its line."""
        try:
            return super().construct_object(node, deep)
        except ValueError as error:
            raise yaml.constructor.ConstructorError(
                None, None, str(error), node.start_mark
            ) from None

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        pairs = node.value if isinstance(node, yaml.MappingNode) else ()
        for key in (key for key, _ in pairs if isinstance(key, yaml.ScalarNode)):
            if key.value in seen and key.tag != "tag:yaml.org,2002:merge":
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key `{key.value}` stands here a second time", key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def read(path: Path) -> dict[str, Any]:
    """The mapping that the file holds. Raises CommandError that names the file, and the line."""
    return read_with_lines(path)[0]


def read_with_lines(path: Path) -> tuple[dict[str, Any], Lines]:
    """The same, and where its parts stand."""
    text = _text(path)
    given = parse(text, str(path))
    if given is None:
        raise CommandError(f"{path} is empty: it needs `applications:`.{_SEE}")
    if not isinstance(given, dict):
        raise CommandError(f"{path} holds {_kind(given)}, and not keys such as `applications:`.")
    return given, Lines(yaml.compose(text, _Loader))


_SEE = " `cfg-serve serve MODEL --print-config` shows a whole file."


def parse(text: str, name: str) -> Any:
    """What the YAML `text` says. Raises CommandError with the line of what is wrong.

    name: of the file, for the message.
    """
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        raise CommandError(_wrong_line(text, name, error)) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise CommandError(f"{name}:{line}: {error.reason}, #x{error.character:04x}.") from None
    except RecursionError:
        raise CommandError(f"{name} is nested too deeply.") from None


def _wrong_line(text: str, name: str, error: yaml.MarkedYAMLError) -> str:
    said = " ".join(x for x in (error.context, error.problem) if x)
    lines = text.splitlines()
    marks = [x.line for x in (error.problem_mark, error.context_mark) if x is not None]
    line = next((line for line in marks if line < len(lines)), None)
    if line is None:
        return f"{name} is no YAML: {said}."
    hint = " Indent with spaces." if "\t" in lines[line] else ""
    return f"{name}:{line + 1}: {said}.{hint}\n    {lines[line].strip()[:120]}"


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
