"""Check a configuration: its shape, every key, the names of deployments, and our `args:`.

It takes milliseconds, and needs neither Ray nor vLLM. What is wrong becomes one sentence each.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from cfg_core.errors import ConfigError
from cfg_core.keys import nearest
from cfg_serve.check import serve_fields, yaml_text
from cfg_serve.check.lines import Place, Problem
from cfg_serve.home import serve_settings
from deployments.config.args import AppArgs
from deployments.config.checks import check_message_sizes

IMPORT_PATHS = ("deployments.app:build", "cfg_serve:build")
ROUTER, GENERATOR = "CfgRouter", "ModelReplica"
_PORTS = range(1, 65536)
_SHAPES = {
    **dict.fromkeys(("model_type", "model_attributes_type", "dataclass_type", "dict_type"), "keys"),
    **dict.fromkeys(("tuple_type", "list_type"), "entries, a list"),
}
"""What should be there, for errors of pydantic whose words name classes of Python."""


def problems(path: Path) -> list[Problem]:
    """What is wrong with a file. Raises CommandError if it cannot be read."""
    return list(problems_of(yaml_text.read(path)))


def problems_of(config: Mapping[str, Any]) -> Iterator[Problem]:
    """What is wrong with a configuration, in the order of the file."""
    if "import_path" in config:
        said = "`import_path` belongs to an entry of `applications:`, a list: move it there."
        yield Problem(said, at=("import_path",))
        return
    yield from _unknown(config, "file", "the file", ())
    for section in ("http_options", "grpc_options", "logging_config"):
        yield from _section(config, section, section, ())
    yield from _http(config.get("http_options"))
    applications = config.get("applications")
    if not isinstance(applications, list) or not applications:
        said = "`applications` must be a list with one entry: `- name: cfg`, and what it has below."
        yield Problem(said, at=("applications",))
        return
    for at, application in enumerate(applications):
        where, place = f"applications[{at}]", ("applications", at)
        if isinstance(application, Mapping):
            yield from _application(application, where, place)
        else:
            said = f"`{where}` must have keys such as `name` and `import_path`."
            yield Problem(said, at=place)


def _application(application: Mapping[str, Any], where: str, at: Place) -> Iterator[Problem]:
    yield from _unknown(application, "applications", where, at)
    yield from _section(application, "logging_config", f"{where}.logging_config", at)
    ours = is_ours(application)
    if not ours and (sentence := _import_path(application.get("import_path"), where)):
        yield Problem(sentence, at=(*at, "import_path"))
        ours = True  # what else is wrong is told, too
    if not ours:
        return
    args = application.get("args") or {}
    if isinstance(args, Mapping):
        yield from _args(args, (*at, "args"))
    else:
        yield Problem("`args` must have keys such as `model`.", at=(*at, "args"))
        args = {}
    place = (*at, "deployments")
    yield from _deployments(application.get("deployments"), args, place)
    yield from _asleep(application.get("deployments"), args, place)


def is_ours(application: Mapping[str, Any]) -> bool:
    """Whether it is this project's application. Of others, `args` and deployments are unknown."""
    return application.get("import_path") in IMPORT_PATHS


def _import_path(path: object, where: str) -> str | None:
    """What is wrong with the path; None if it may be another application of the user's."""
    if not isinstance(path, str) or not path:
        return f"`{where}` needs `import_path: {IMPORT_PATHS[0]}`."
    if near := difflib.get_close_matches(path, IMPORT_PATHS, n=1, cutoff=0.7):
        return f"`import_path: {path}` leads to nothing: did you mean `{near[0]}`?"
    return None


def _args(args: Mapping[str, Any], at: Place) -> list[Problem]:
    """The mistakes in the `args:` of our application."""
    try:
        resolved = AppArgs.model_validate(args).resolved()
        largest = max(
            (encoder.options.max_answer_bytes for encoder in resolved.encoders), default=0
        )
        check_message_sizes(resolved.access.max_body_bytes, largest, serve_settings())
    except ValidationError as error:
        return [Problem(_sentence(item, args), at=(*at, *item["loc"])) for item in error.errors()]
    except ConfigError as error:
        return [Problem(str(error), at=at)]
    return []


def _sentence(item: Mapping[str, Any], args: Mapping[str, Any]) -> str:
    where = ".".join(map(str, item["loc"]))
    message = str(item["msg"]).removeprefix("Value error, ")
    if item["type"] in _SHAPES:
        message = f"this must have {_SHAPES[item['type']]}"
    if item["type"] != "value_error":
        return f"`{where}` in `args`: {message}."
    match item["loc"]:
        case ("models", int(at), *_):
            return f"`models[{at}]` ({args['models'][at].get('model', 'no model')}): {message}"
    return message


def generators_of(args: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The keys of each generator, as far as they can be read."""
    if isinstance(models := args.get("models"), list):
        return [entry for entry in models if isinstance(entry, Mapping)]
    return [args] if args.get("model") else []


def deployment_of(generator: Mapping[str, Any]) -> str:
    """The name of a generator's deployment."""
    return str(generator.get("deployment", GENERATOR))


def names_of(args: Mapping[str, Any]) -> list[str]:
    """The names of the deployments that `args` make, as far as they can be read."""
    encoders = args.get("encoders")
    entries = [x for x in encoders if isinstance(x, Mapping)] if isinstance(encoders, list) else []
    named = [str(entry.get("deployment", "Embedder")) for entry in entries]
    return [ROUTER, *map(deployment_of, generators_of(args)), *named]


def _deployments(given: object, args: Mapping[str, Any], at: Place) -> Iterator[Problem]:
    if given is None:
        return
    if not isinstance(given, list):
        said = "`deployments` must be a list with entries `- name: ModelReplica`, and so on."
        yield Problem(said, at=at)
        return
    seen: list[object] = []
    for number, entry in enumerate(given):
        place = (*at, number)
        if not isinstance(entry, Mapping):
            said = f"`deployments[{number}]` must have keys such as `name` and `num_replicas`."
            yield Problem(said, at=place)
            continue
        name = entry.get("name")
        if sentence := _name(name, number, args, seen):
            yield Problem(sentence, at=(*place, "name"))
        seen.append(name)
        yield from _deployment(entry, str(name), place)


def _name(name: object, number: int, args: Mapping[str, Any], seen: list[object]) -> str | None:
    """What is wrong with the name of an entry; None if nothing is."""
    names = names_of(args)
    if name is None:
        return f"`deployments[{number}]` needs a `name`: {', '.join(names)}."
    if name == GENERATOR and name not in names and not generators_of(args):
        return f"`{name}` in `deployments` belongs to `model` in `args`, which is missing."
    if name not in names:
        hint = nearest(name, names, "parts")
        return f"`deployments` has no part `{name}` to set options of: {hint}"
    if name in seen:
        return f"`{name}` stands twice in `deployments`: put its options into one entry."
    return None


def _deployment(entry: Mapping[str, Any], name: str, at: Place) -> Iterator[Problem]:
    yield from _unknown(entry, "deployments", name, at)
    for section in ("ray_actor_options", "autoscaling_config", "logging_config"):
        yield from _section(entry, section, f"{name}.{section}", at)


def _asleep(given: object, args: Mapping[str, Any], at: Place) -> Iterator[Problem]:
    """Whether the deployments of models agree with `scales_to_zero`.

    If not, a model that is broken would count as asleep, or /ready would wake one.
    """
    entries = [x for x in given if isinstance(x, Mapping)] if isinstance(given, list) else []
    scaling = {str(entry.get("name")): entry.get("autoscaling_config") for entry in entries}
    for generator in generators_of(args):
        name = deployment_of(generator)
        found = scaling.get(name)
        may_sleep = isinstance(found, Mapping) and found.get("min_replicas") == 0
        if generator.get("scales_to_zero") and not may_sleep:
            said = (
                "`scales_to_zero` needs `autoscaling_config: {min_replicas: 0}` of"
                f" `{name}` under `deployments`."
            )
            yield Problem(said, at=at)
        elif may_sleep and generator is not args and not generator.get("scales_to_zero"):
            said = (
                f"`{name}` has `min_replicas: 0`: set `scales_to_zero: true` in its entry of"
                " `models`, else /ready starts a replica."
            )
            yield Problem(said, at=at)


def _section(config: Mapping[str, Any], section: str, where: str, at: Place) -> Iterator[Problem]:
    given, place = config.get(section), (*at, section)
    if isinstance(given, Mapping):
        yield from _unknown(given, section, where, place)
    elif given is not None:
        yield Problem(f"`{where}` must have keys, and is {str(given)[:40]!r}.", at=place)


def _unknown(given: Mapping[str, Any], section: str, where: str, at: Place) -> Iterator[Problem]:
    """The keys that Ray Serve would drop in silence."""
    fields = serve_fields.known(section)
    inside = where if section == "file" else f"`{where}`"
    for key in given if fields is not None else ():
        if key not in (fields or ()):
            said = f"unknown key `{key}` in {inside}: {nearest(key, fields or ())}"
            yield Problem(said, at=(*at, str(key)))


def _http(options: object) -> Iterator[Problem]:
    if not isinstance(options, Mapping):
        return
    port = options.get("port", 8000)
    if isinstance(port, bool) or not isinstance(port, int) or port not in _PORTS:
        said = f"`http_options.port` is {str(port)[:40]!r}: give a number from 1 to 65535."
        yield Problem(said, at=("http_options", "port"))
    host = options.get("host", "127.0.0.1")
    if not isinstance(host, str) or not host or "/" in host:
        said = f"`http_options.host` is {str(host)[:80]!r}: give an address, such as 127.0.0.1."
        yield Problem(said, at=("http_options", "host"))
