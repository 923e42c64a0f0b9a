"""From what `cfg-serve serve` was given to the configuration that it serves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cfg_serve.check import yaml_text
from cfg_serve.check.file import GENERATOR, deployment_of, generators_of, problems_of
from cfg_serve.errors import CommandError
from cfg_serve.generate.choices import KVSplit, Wanted, configuration
from cfg_serve.generate.model_facts import ModelFacts, facts_of
from cfg_serve.machine import Machine, this_machine
from cfg_serve.start.server import Plan

YAML = (".yaml", ".yml")


def plan_for(
    what: str | None,
    host: str | None,
    port: int | None,
    replicas: int | None,
    encoder: Sequence[str] | None,
    tp: int,
    kv_split: KVSplit | None,
    **others: Any,
) -> Plan:
    """What the options of `serve` ask for: a YAML file, or what suits a model.

    others: fields of Wanted. Raises CommandError if it cannot be served.
    """
    if what is not None and (what.endswith(YAML) or Path(what).is_file()):
        only_models = {"tp": tp > 1, "encoder": encoder, "kv_split": kv_split, **others}
        return for_file(Path(what), host, port, replicas, **only_models)
    wanted = Wanted(
        host=host or "127.0.0.1",
        port=port or 8000,
        tensor_parallel=tp,
        replicas=replicas or 1,
        kv_split=kv_split or "elastic",
        **others,
    )
    return _for_model(what, encoder or (), wanted, this_machine())


def for_file(
    path: Path, host: str | None, port: int | None, replicas: int | None, **others: object
) -> Plan:
    """The file, with host, port and replicas written into it.

    others: options that only a model's name takes, by their flags. Raises CommandError for one that
    is given, or if the file is wrong.
    """
    for flag, value in others.items():
        if value:
            raise CommandError(
                f"--{flag.replace('_', '-')} chooses for a model's name. {path} is a file: write it"
                " there. --host, --port and --replicas are for files, too."
            )
    config, lines = yaml_text.read_with_lines(path)
    if found := list(problems_of(config)):
        raise CommandError("\n".join(lines.told(path, found)))
    options = dict(config.get("http_options") or {})
    options["host"] = host or options.get("host", "127.0.0.1")
    options["port"] = port or options.get("port", 8000)
    config["http_options"] = options
    if replicas is not None:
        _set_replicas(config, replicas, path)
    return Plan(name=str(path), config=config)


def _set_replicas(config: Mapping[str, Any], replicas: int, path: Path) -> None:
    for application in config["applications"]:
        generators = generators_of(application.get("args") or {})
        if len(generators) > 1:
            raise CommandError(
                f"--replicas: {path} has several models. Set `num_replicas` of each under"
                " `deployments`."
            )
        name = next(map(deployment_of, generators), GENERATOR)
        parts = application.setdefault("deployments", [])
        entry = next((part for part in parts if part["name"] == name), None)
        if entry is None:
            entry = {"name": name}
            parts.append(entry)
        if "autoscaling_config" in entry:
            raise CommandError(
                f"--replicas: {name} of {path} has `autoscaling_config`, which decides that."
            )
        entry["num_replicas"] = replicas


def _for_model(
    model: str | None, encoders: Sequence[str], wanted: Wanted, machine: Machine
) -> Plan:
    if model is None and not encoders:
        raise CommandError("name a model, a YAML file, or an encoder with --encoder.")
    facts = None if model is None else _generator(model)
    others = [facts_of(name) for name in encoders]
    config = configuration(wanted, facts, others, machine)
    return Plan(name=model or encoders[0], config=config)


def _generator(model: str) -> ModelFacts:
    facts = facts_of(model)
    if not facts.generates:
        raise CommandError(
            f"{model} generates no text: serve it as an encoder, with --encoder {model}."
        )
    return facts
