"""Named factories of logits processors: ours, those of installed packages, and configured ones.

    logits_processors:                        # under `args:` in the YAML, or in guided_engine_args
      shout: my_package.processors:ShoutFactory
      short_thoughts: {factory: my_package.processors:BudgetFactory, limit: 100}

An installed package registers a factory under the entry-point group `cfg_serve.logits_processors`.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import math
import re
from collections.abc import Collection, Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any

from cfg_core.errors import ConfigError, RequestError
from cfg_core.keys import nearest
from cfg_core.logits_processors.base import EngineInfo, LogitsProcessorFactory, Named, SequenceInfo
from cfg_core.logits_processors.config import FIELD
from cfg_core.logits_processors.sequences import ProcessorError, close_all

ENTRY_POINTS = "cfg_serve.logits_processors"
MAX_PER_REQUEST = 16
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_MAX_NAME = 100
_MAX_DEPTH = 8
_MAX_REASON = 300
_EXAMPLE = '{"name": "no_repeat_ngram", "n": 3}'

SHIPPED = {
    "no_repeat_ngram": "cfg_core.logits_processors.shipped:NoRepeatNgram",
    "section_budget": "cfg_core.logits_processors.shipped:SectionBudget",
    "vocabulary_gate": "cfg_core.logits_processors.shipped:VocabularyGate",
}


class Registry:
    """Factories of logits processors, by name."""

    def __init__(self, factories: Mapping[str, LogitsProcessorFactory]) -> None:
        self._factories = dict(factories)

    @classmethod
    def load(cls, config: Mapping[str, Any], engine: EngineInfo) -> Registry:
        """Load our factories, then those of installed packages, then those of `config`.

        If two have the same name, the later one is used. Raises ConfigError if a factory cannot be
        loaded.
        """
        installed = {point.name: point.value for point in entry_points(group=ENTRY_POINTS)}
        return cls(
            {
                name: _load(name, entry, engine)
                for name, entry in {**SHIPPED, **installed, **config}.items()
            }
        )

    def read(self, asked: object) -> Sequence[Mapping[str, Any]]:
        """Return the entries of a request's field if a processor can be made for each of them.

        Raises RequestError otherwise. The field may also be JSON text, because `vllm_xargs` of
        vLLM's own server cannot carry objects.
        """
        if isinstance(asked, str):
            with contextlib.suppress(ValueError, RecursionError):
                asked = json.loads(asked)
        if not isinstance(asked, Sequence) or isinstance(asked, (str, bytes)):
            raise _refused(f"{FIELD} must be a list such as [{_EXAMPLE}].")
        if len(asked) > MAX_PER_REQUEST:
            raise _refused(
                f"{FIELD} has {len(asked)} entries: at most {MAX_PER_REQUEST} are allowed."
            )
        for i, entry in enumerate(asked):
            self._check_entry(entry, f"{FIELD}[{i}]")
        return asked

    def _check_entry(self, entry: object, where: str) -> None:
        if not isinstance(entry, Mapping) or not isinstance(entry.get("name"), str):
            raise _refused(f"{where} must be an object such as {_EXAMPLE}.")
        name, arguments = _split(entry)
        factory = self._factories.get(name)
        if factory is None:
            unknown = f"{where}: there is no logits processor"
            if len(name) > _MAX_NAME:
                raise _refused(f"{unknown} with a name of {len(name)} characters.")
            hint = nearest(name, self._factories, "logits processors")
            raise _refused(f"{unknown} {name!r}: {hint}")
        if not _is_plain(arguments, _MAX_DEPTH):
            raise _refused(
                f"{where}: arguments must be text, finite numbers within 64 bits, true, false,"
                f" null, or lists and objects of these, nested at most {_MAX_DEPTH} deep."
            )
        try:
            inspect.signature(factory.make).bind(None, **arguments)
            factory.check(**arguments)
        except Exception as error:
            # Whatever a factory raises for bad arguments, the fault is the client's.
            says_why = isinstance(error, (TypeError, ValueError))
            reason = str(error) if says_why else f"{type(error).__name__}: {error}"
            raise _refused(f"{where}: {name}: {reason[:_MAX_REASON].rstrip('.')}.") from None

    def forced(self, asked: Sequence[Mapping[str, Any]]) -> list[tuple[str, Collection[int]]]:
        """Return the processors of a request that force tokens, by name, each with its tokens.

        asked: what `read` returned. A name may occur several times.
        """
        given = (
            (name, self._factories[name].forces(**arguments))
            for name, arguments in map(_split, asked)
        )
        return [(name, tokens) for name, tokens in given if tokens]

    def make(self, asked: Sequence[Mapping[str, Any]], sequence: SequenceInfo) -> list[Named]:
        """Make one processor for each entry that `read` returned, or raise ProcessorError."""
        made: list[Named] = []
        for entry in asked:
            name, arguments = _split(entry)
            try:
                made.append((name, self._factories[name].make(sequence, **arguments)))
            except Exception as error:
                close_all(made)
                raise ProcessorError(
                    f"logits processor {name!r} could not be made: {type(error).__name__}: {error}"
                ) from error
        return made


def _refused(sentence: str) -> RequestError:
    return RequestError(sentence, FIELD)


def _is_plain(value: object, depth: int) -> bool:
    """Return whether `value` can be sent to the engine unchanged.

    JSON must be able to express it, and msgpack its numbers.
    depth: how many levels of lists and objects it may have.
    """
    if isinstance(value, str):
        return not _LONE_SURROGATE.search(value)
    if isinstance(value, float):
        return math.isfinite(value)
    if value is None or isinstance(value, (bool, int)):
        return value is None or -(2**63) <= value < 2**63
    if depth == 0 or not isinstance(value, (list, tuple, dict)):
        return False
    parts = [*value, *value.values()] if isinstance(value, dict) else value
    return all(_is_plain(part, depth - 1) for part in parts)


def _split(entry: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    return entry["name"], {key: value for key, value in entry.items() if key != "name"}


def _load(name: str, entry: str | Mapping[str, Any], engine: EngineInfo) -> LogitsProcessorFactory:
    options = {} if isinstance(entry, str) else {k: v for k, v in entry.items() if k != "factory"}
    path = entry if isinstance(entry, str) else entry["factory"]
    module, _, attribute = path.partition(":")
    try:
        cls = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"logits processor `{name}`: `{path}` cannot be loaded: {error}."
        ) from error
    if not (isinstance(cls, type) and issubclass(cls, LogitsProcessorFactory)):
        raise ConfigError(
            f"logits processor `{name}`: `{path}` is not a subclass of LogitsProcessorFactory."
        )
    try:
        return cls(engine, **options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"logits processor `{name}`: {error}.") from error
