"""What a deployment may say under `args:` in its YAML, checked before any engine starts.

Neither vllm nor ray is imported here: a mistake in a YAML file is reported in milliseconds, on any
machine. Serve's own options (replicas, autoscaling, resources) stay where Serve users look for them,
under `deployments:`, and are no business of this module.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, ValidationError, field_validator, model_validator

from cfg_core.errors import ConfigError
from cfg_core.prefill_only.options import EngineOptions
from cfg_core.processor_config import check_config as check_processors
from deployments.access import AccessArgs
from deployments.engine_keys import check_engine_keys, check_frontend
from deployments.grammars import GrammarArgs
from deployments.limits import LimitsArgs
from deployments.liveness import ASK_EVERY_S
from deployments.model_paths import last_part, resolve_model
from deployments.yaml_args import YamlArgs

RESERVED_DEPLOYMENTS = ("CfgRouter", "ModelReplica")


class EncoderArgs(YamlArgs):
    """One entry of `encoders:`. A model that is computed once per input: embedding, reranking, classification."""

    section = "encoders"

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
    scales_to_zero: bool = Field(
        default=False,
        description="Its deployment has `min_replicas: 0`: without a replica it is asleep, not broken, and /ready and "
        "/v1/models do not wake it.",
    )
    engine: dict[str, Any] = Field(
        default_factory=dict,
        description="Options of the prefill-only engine: the field names of cfg_core.prefill_only.EngineOptions.",
    )

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


class AdmissionArgs(YamlArgs):
    """The `admission:` of `args:`: who waits in front of the generator's replicas, and for how long.

    Each replica of CfgRouter has a queue of its own.
    """

    section = "admission"

    streams_per_replica: int | None = Field(
        default=None,
        ge=1,
        description="Streams that may be with one replica at once, a guided request has two; the rest waits. "
        "Default: 1.25 times the engine's max_num_seqs, so that it has the next at hand.",
    )
    max_queued_streams: int = Field(default=512, ge=0, description="Streams that may wait; beyond, clients get 429.")
    max_queued_tokens: int = Field(
        default=2_000_000,
        ge=0,
        description="Tokens that may wait, prompts and outputs of all streams, estimated; beyond, clients get 429.",
    )
    max_streams_per_request: int = Field(
        default=256, ge=2, description="Streams of one request, choices times prompts, twice if guided; beyond, 400."
    )
    streams_at_once_per_request: int | None = Field(
        default=None,
        ge=2,
        description="Streams that one request has in an engine at once; its other choices follow as these end. "
        "Default: half of the engine's max_num_seqs.",
    )
    max_share: float = Field(
        default=0.5,
        gt=0,
        le=1,
        description="Share of the engines' max_num_seqs that one tenant may have while another one is here; a tenant "
        "is an API key, or an address where there are no keys.",
    )
    default_timeout_s: float | None = Field(
        default=None, gt=0, description="The `timeout` of requests that bring none, to encoders too. Default: no limit."
    )


class AppArgs(YamlArgs):
    """The `args:` of `import_path: deployments.app:build`. Immutable; an unknown key is an error."""

    section = "args"

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
    frontend: dict[str, Any] = Field(
        default_factory=dict,
        description="Options of vLLM's OpenAI frontend, by the names of its FrontendArgs: `chat_template`, "
        "`tool_call_parser`, and so on. `lora_modules` is a list of `{name: NAME, path: DIRECTORY}`; clients send the "
        "name as `model`.",
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
    silence_timeout_s: float = Field(
        default=5.0,
        gt=2 * ASK_EVERY_S,
        description="After how long a replica is given up whose process does not answer, not even from a thread of its "
        "own: it was stopped, its node died, or the link is cut. A replica that is only busy answers.",
    )
    hang_timeout_s: float = Field(
        default=120.0,
        gt=0,
        description="After how long an engine that does not answer its own replica is given up, and a replica whose "
        "event loop does not run. Longer than the longest step: compilation at the first requests counts.",
    )
    share_prefixes: bool = Field(
        default=False,
        description="Let a tenant's requests use the KV of equal prompts of other tenants. It saves work, and lets "
        "tenants measure which prompts others send.",
    )
    max_text_chars: int = Field(
        default=4_000_000,
        ge=1,
        description="Characters that /tokenize takes, of the generator; a token of /detokenize counts as four.",
    )
    admission: AdmissionArgs = Field(default=AdmissionArgs(), description="The queue in front of the generator.")
    access: AccessArgs = Field(default=AccessArgs(), description="API keys, and limits on what requests may bring.")
    grammars: GrammarArgs = Field(
        default=GrammarArgs(), description="How large the grammars of requests may be, and what they may cost."
    )
    limits: LimitsArgs = Field(default=LimitsArgs(), description="What clients may hold of an ingress at once.")

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
        check_frontend(self.frontend, self.engine)
        check_unique(self)
        return self

    @property
    def model_name(self) -> str | None:
        """The name that clients send as `model` for generated text; None if there are only encoders."""
        return None if self.model is None else self.served_model_name or last_part(self.model)

    @property
    def served_names(self) -> list[str]:
        """Every name that clients may send as `model`: the generator's first, then its adapters'."""
        adapters = (adapter["name"] for adapter in self.frontend.get("lora_modules", ()))
        return [n for n in (self.model_name, *adapters, *(encoder.model_name for encoder in self.encoders)) if n]

    @property
    def num_workers(self) -> int:
        """Worker processes of one engine: tensor parallel times pipeline parallel."""
        return int(self.engine.get("tensor_parallel_size", 1)) * int(self.engine.get("pipeline_parallel_size", 1))

    def resolved(self) -> AppArgs:
        """The same arguments with models as absolute paths, for replicas may run in another directory, and API keys
        as digests. Raises ConfigError if a model's directory or a key does not exist.
        """
        fields: dict[str, Any] = {
            "encoders": tuple(encoder.resolved() for encoder in self.encoders),
            "access": self.access.resolved(),
        }
        if self.model is None:
            return self.model_copy(update=fields)
        fields |= {"model": resolve_model(self.model), "served_model_name": self.model_name}
        speculation = self.engine.get("speculative_config")
        if isinstance(speculation, dict) and isinstance(speculation.get("model"), str):
            speculation = {**speculation, "model": resolve_model(speculation["model"])}
            fields["engine"] = {**self.engine, "speculative_config": speculation}
        fields["frontend"] = resolved_frontend(self.frontend)
        return self.model_copy(update=fields)

    @property
    def engine_orders_by_priority(self) -> bool:
        """Whether vLLM's scheduler reads `priority`; else it refuses requests that have one."""
        return self.engine.get("scheduling_policy") == "priority"

    @property
    def plugin_kwargs(self) -> dict[str, Any]:
        """Keyword arguments of `cfg_core.vllm_plugin.guided_engine_args`."""
        return {
            "kv_split": self.kv_split,
            "logits_processors": self.logits_processors,
            "draft_cost": self.draft_cost,
            "grammars": self.grammars.fields,
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


def resolved_frontend(frontend: Mapping[str, Any]) -> dict[str, Any]:
    """With absolute paths of adapters, and of a chat template that is a file; it may be the template itself."""
    fields = dict(frontend)
    if adapters := fields.get("lora_modules"):
        fields["lora_modules"] = [{**adapter, "path": resolve_model(adapter["path"])} for adapter in adapters]
    template = fields.get("chat_template")
    if isinstance(template, str) and "\n" not in template and Path(template).is_file():
        fields["chat_template"] = str(Path(template).resolve())
    return fields


def check_generator(args: AppArgs) -> None:
    """Raise ConfigError if nothing is served, or if options of the generator stand there without it."""
    if args.model is None and not args.encoders:
        raise ConfigError("`args` names nothing to serve: give `model`, `encoders`, or both.")
    for key in ("engine", "frontend", "served_model_name", "logits_processors", "draft_cost"):
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
