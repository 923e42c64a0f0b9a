"""What a deployment may say under `args:` in its YAML, checked before any engine starts.

Neither vllm nor ray is imported here: a mistake in a YAML file is reported in milliseconds, on any
machine. Serve's own options (replicas, autoscaling, resources) stay where Serve users look for them,
under `deployments:`, and are no business of this module.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
import sys
from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from cfg_core.errors import ConfigError
from cfg_core.keys import check_keys
from cfg_core.prefill_only.options import EngineOptions
from cfg_core.processor_config import check_config as check_processors

REPOSITORY = Path(__file__).resolve().parent.parent

RESERVED_ENGINE_KEYS = {
    "model": "name it one level up, as `model`",
    "served_model_name": "name it one level up, as `served_model_name`",
    "scheduler_cls": "the guided scheduler is always used; it serves plain requests unchanged",
    "worker_cls": "the guided worker is always used; it serves plain requests unchanged",
}
"""Engine options that the application sets itself, each with what to do instead."""

RESERVED_DEPLOYMENTS = ("CfgRouter", "ModelReplica")

PACKAGE = "package:"
"""`package:NAME/PATH` is the directory PATH inside the installed Python package NAME."""


class EncoderArgs(BaseModel):
    """One entry of `encoders:`. A model that is computed once per input: embedding, reranking, classification."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    model: str = Field(
        description="Directory of the model, a name on the Hugging Face hub, or `package:NAME/PATH`: a directory "
        "inside an installed Python package.",
    )
    served_model_name: str | None = Field(
        default=None, description="The name that clients send as `model`. Default: the last part of `model`."
    )
    deployment: str = Field(
        default="Embedder",
        min_length=1,
        description="Its name under `deployments:`, where its replicas and resources are set. One for each encoder.",
    )
    engine: dict[str, Any] = Field(
        default_factory=dict,
        description="Options of the prefill-only engine: the field names of cfg_core.prefill_only.EngineOptions.",
    )

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, values: Any) -> Any:
        if isinstance(values, Mapping):
            check_keys(values, cls.model_fields, "encoders")
        return values

    @field_validator("engine")
    @classmethod
    def _known_options(cls, engine: dict[str, Any]) -> dict[str, Any]:
        EngineOptions.from_mapping(engine)
        return engine

    @property
    def model_name(self) -> str:
        """The name that clients send as `model`."""
        return self.served_model_name or last_part(self.model)

    @property
    def options(self) -> EngineOptions:
        return EngineOptions.from_mapping(self.engine)

    def resolved(self) -> EncoderArgs:
        """As AppArgs.resolved."""
        return self.model_copy(update={"model": resolve_model(self.model), "served_model_name": self.model_name})


class AppArgs(BaseModel):
    """The `args:` of `import_path: deployments.app:build`. Immutable; an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    model: str | None = Field(
        default=None,
        description="The model that generates text: its directory (relative to where you start Serve, or to this "
        "repository), a name on the Hugging Face hub, or `package:NAME/PATH`. Leave it out to serve encoders only.",
    )
    served_model_name: str | None = Field(
        default=None, description="The name that clients send as `model`. Default: the last part of `model`."
    )
    kv_split: Literal["elastic", "even"] = Field(
        default="elastic",
        description="How leaders and followers share the KV pool: `elastic` moves the boundary with demand, "
        "`even` gives each half of it.",
    )
    draft_cost: float | None = Field(
        default=None,
        ge=0,
        description="Under speculation (`engine.speculative_config`): what one more draft costs, in steps without "
        "drafts. A guided request whose drafts are kept too rarely for that gets fewer; 0 never backs off. "
        "Default: 0.2.",
    )
    logits_processors: dict[str, Any] = Field(
        default_factory=dict,
        description="Factories of logits processors that requests may name: `name: package.module:Class`, or "
        "`name: {factory: package.module:Class, ...}` with its options.",
    )
    engine: dict[str, Any] = Field(
        default_factory=dict,
        description="Options of the vLLM engine: the field names of vLLM's AsyncEngineArgs.",
    )
    encoders: tuple[EncoderArgs, ...] = Field(
        default=(), description="Models for embedding, reranking and classification, served beside `model`."
    )
    ready_timeout_s: float = Field(
        default=5.0, gt=0, description="How long /ready waits for the engines' answers before it says 503."
    )
    num_retries: int = Field(
        default=1,
        ge=0,
        description="How often a request is sent to another replica when its engine is lost before the first byte.",
    )

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, values: Any) -> Any:
        if isinstance(values, Mapping):
            check_keys(values, cls.model_fields, "args")
        return values

    @field_validator("logits_processors")
    @classmethod
    def _well_formed_processors(cls, processors: dict[str, Any]) -> dict[str, Any]:
        return check_processors(processors)

    @field_validator("engine")
    @classmethod
    def _known_engine_keys(cls, engine: dict[str, Any]) -> dict[str, Any]:
        check_engine_keys(engine)
        return engine

    @model_validator(mode="after")
    def _consistent(self) -> AppArgs:
        check_generator(self)
        check_unique(self)
        return self

    @property
    def model_name(self) -> str | None:
        """The name that clients send as `model` for generated text; None if there are only encoders."""
        return None if self.model is None else self.served_model_name or last_part(self.model)

    @property
    def served_names(self) -> list[str]:
        """Every name that clients may send as `model`: the generator's first."""
        return [name for name in (self.model_name, *(encoder.model_name for encoder in self.encoders)) if name]

    @property
    def num_workers(self) -> int:
        """Worker processes of one engine: tensor parallel times pipeline parallel."""
        return int(self.engine.get("tensor_parallel_size", 1)) * int(self.engine.get("pipeline_parallel_size", 1))

    def resolved(self) -> AppArgs:
        """The same arguments with models as absolute paths: replicas may run in another directory.

        Raises ConfigError if a model's directory does not exist.
        """
        encoders = tuple(encoder.resolved() for encoder in self.encoders)
        if self.model is None:
            return self.model_copy(update={"encoders": encoders})
        fields = {"model": resolve_model(self.model), "served_model_name": self.model_name, "encoders": encoders}
        speculation = self.engine.get("speculative_config")
        if isinstance(speculation, dict) and isinstance(speculation.get("model"), str):
            speculation = {**speculation, "model": resolve_model(speculation["model"])}
            fields["engine"] = {**self.engine, "speculative_config": speculation}
        return self.model_copy(update=fields)

    @property
    def plugin_kwargs(self) -> dict[str, Any]:
        """Keyword arguments of `cfg_core.vllm_plugin.guided_engine_args`."""
        return {
            "kv_split": self.kv_split,
            "logits_processors": self.logits_processors,
            "draft_cost": self.draft_cost,
        }

    def engine_kwargs(self) -> dict[str, Any]:
        """Keyword arguments of vLLM's AsyncEngineArgs, still without those of the guided plugin.

        Several workers run as Ray actors in the replica's placement group, unless the YAML names another
        executor.
        """
        base: dict[str, Any] = {"model": self.model, "served_model_name": [self.model_name]}
        if self.num_workers > 1:
            base["distributed_executor_backend"] = "ray"
        return base | self.engine


def check_generator(args: AppArgs) -> None:
    """Raise ConfigError if nothing is served, or if options of the generator stand there without it."""
    if args.model is None and not args.encoders:
        raise ConfigError("`args` names nothing to serve: give `model`, `encoders`, or both.")
    for key in ("engine", "served_model_name", "logits_processors", "draft_cost"):
        if args.model is None and getattr(args, key):
            hint = "name the model, or move it to an encoder"
            raise ConfigError(f"`{key}` in `args` belongs to `model`, which is missing: {hint}.")


def check_unique(args: AppArgs) -> None:
    """Raise ConfigError if clients or Serve could not tell two models apart."""
    names = [encoder.deployment for encoder in args.encoders]
    for name in names:
        if name in RESERVED_DEPLOYMENTS:
            raise ConfigError(f"`deployment: {name}` in `encoders` is the name of another part: choose its own name.")
        if names.count(name) > 1:
            raise ConfigError(
                f"{names.count(name)} encoders have the deployment name `{name}`: give each a `deployment` of its own, "
                "and use these names under `deployments:`."
            )
    for name in args.served_names:
        if args.served_names.count(name) > 1:
            raise ConfigError(f"two models are served as `{name}`: give each a `served_model_name` of its own.")


def check_engine_keys(engine: Collection[str]) -> None:
    """Raise ConfigError on an option that this vLLM does not have, or that the application sets itself."""
    for key, instead in RESERVED_ENGINE_KEYS.items():
        if key in engine:
            raise ConfigError(f"`{key}` in `engine` is set by the application: {instead}.")
    known = vllm_engine_fields()
    if known is not None:
        check_keys(engine, known - RESERVED_ENGINE_KEYS.keys(), "engine")


@cache
def vllm_engine_fields() -> frozenset[str] | None:
    """Field names of vLLM's AsyncEngineArgs, read from its source: importing vllm takes ten seconds.

    None if vllm is not installed here, as on the head node of a cluster; the replica then checks.
    """
    spec = importlib.util.find_spec("vllm")
    roots = (spec.submodule_search_locations if spec else None) or []
    sources = [path for root in roots if (path := Path(root) / "engine" / "arg_utils.py").is_file()]
    if not sources:
        return None
    tree = ast.parse(sources[0].read_text(encoding="utf-8"))
    return frozenset(
        field.target.id
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name in ("EngineArgs", "AsyncEngineArgs")
        for field in node.body
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and not field.target.id.startswith("_")
    )


def last_part(model: str) -> str:
    """What a model is called if nobody gave it a name."""
    return model.removeprefix(PACKAGE).rstrip("/").rsplit("/", 1)[-1]


def resolve_model(name: str, cwd: Path | None = None) -> str:
    """The absolute path of a model directory, or `name` itself if it can only be a name on the hub.

    Relative names are looked for in `cwd` (default: the current directory), then in this repository;
    those that begin with `package:` in an installed Python package. Raises ConfigError if `name` is meant as
    a path (`/`, `.`, `~`, or inside a directory that exists) and there is no such directory.
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
        raise ConfigError(f"model directory `{name}` does not exist.{_nearest_directory(path, parents)}")
    return name


def package_directory(name: str) -> Path:
    """The directory `PACKAGE/PATH`, without importing the package. ConfigError if either is not there."""
    package, _, path = name.partition("/")
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    if spec is None:
        hint = f"install it here (`pip install --no-deps {package.replace('_', '-')}`)"
        raise ConfigError(f"there is no Python package `{package}` for `{PACKAGE}{name}`: {hint}, or name a directory.")
    for root in spec.submodule_search_locations or ():
        if (directory := Path(root, path)).is_dir():
            return directory.resolve()
    raise ConfigError(f"the Python package `{package}` has no directory `{path}`: see what is in it, or update it.")


def _nearest_directory(path: Path, parents: list[Path]) -> str:
    """A hint that names the sibling directory whose name is nearest to the missing one."""
    siblings = [entry.name for parent in parents if parent.is_dir() for entry in parent.iterdir() if entry.is_dir()]
    near = difflib.get_close_matches(path.name, siblings, n=1)
    return f" Did you mean `{path.parent / near[0]}`?" if near else ""


def complaints(path: Path) -> list[str]:
    """What is wrong with the `args:` in a Serve config file, a sentence each; empty if nothing is."""
    found = []
    for application in yaml.safe_load(path.read_text(encoding="utf-8"))["applications"]:
        try:
            AppArgs.model_validate(application.get("args") or {}).resolved()
        except ValidationError as error:
            found += [_sentence(item) for item in error.errors()]
        except ConfigError as error:
            found.append(str(error))
    return found


def _sentence(item: Mapping[str, Any]) -> str:
    where = ".".join(map(str, item["loc"]))
    message = item["msg"].removeprefix("Value error, ")
    return message if item["type"] == "value_error" else f"`{where}` in `args`: {message}."


if __name__ == "__main__":  # python -m deployments.config FILE: checks a file in no time, before `serve run` does
    if errors := complaints(Path(sys.argv[1])):
        sys.exit("\n".join(f"{sys.argv[1]}: {error}" for error in errors))
