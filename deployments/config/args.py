"""What a deployment may say under `args:` in its YAML, checked before any engine starts.

Neither vllm nor ray is imported here: a mistake in a YAML file is reported in milliseconds, on any
machine. Serve's own options (replicas, autoscaling, resources) stay where Serve users look for
them, under `deployments:`, and are no business of this module.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from cfg_core.logits_processors.config import check_config as check_processors
from deployments.config.access import AccessArgs
from deployments.config.admission import AdmissionArgs
from deployments.config.base import YamlArgs
from deployments.config.checks import check_generator, check_unique
from deployments.config.encoders import EncoderArgs
from deployments.config.engine_keys import check_engine_keys, check_frontend
from deployments.config.grammars import GrammarArgs
from deployments.config.limits import LimitsArgs
from deployments.config.model_paths import last_part, resolve_model
from deployments.lifecycle.beacon import ASK_EVERY_S


class AppArgs(YamlArgs):
    """The `args:` of `import_path: deployments.app:build`. Immutable; an unknown key is an
    error."""

    section = "args"

    model: str | None = Field(
        default=None,
        description=(
            "The model that generates text: its directory (relative to where you start Serve, or to"
            " this repository), a name on the Hugging Face hub, or `package:NAME/PATH`. Leave it"
            " out to serve encoders only."
        ),
    )
    served_model_name: str | None = Field(
        default=None,
        description="The name that clients send as `model`. Default: the last part of `model`.",
    )
    kv_split: Literal["elastic", "even"] = Field(
        default="elastic",
        description=(
            "How leaders and followers share the KV pool: `elastic` moves the boundary with demand,"
            " `even` gives each half of it."
        ),
    )
    draft_cost: float | None = Field(
        default=None,
        ge=0,
        description=(
            "Under speculation (`engine.speculative_config`): what one more draft costs, in steps"
            " without drafts. A guided request whose drafts are kept too rarely for that gets"
            " fewer; 0 never backs off. Default: 0.2."
        ),
    )
    logits_processors: dict[str, Any] = Field(
        default_factory=dict,
        description=(
            "Factories of logits processors that requests may name: `name: package.module:Class`,"
            " or `name: {factory: package.module:Class, ...}` with its options."
        ),
    )
    engine: dict[str, Any] = Field(
        default_factory=dict,
        description="Options of the vLLM engine: the field names of vLLM's AsyncEngineArgs.",
    )
    frontend: dict[str, Any] = Field(
        default_factory=dict,
        description=(
            "Options of vLLM's OpenAI frontend, by the names of its FrontendArgs: `chat_template`,"
            " `tool_call_parser`, and so on. `lora_modules` is a list of `{name: NAME, path:"
            " DIRECTORY}`; clients send the name as `model`."
        ),
    )
    encoders: tuple[EncoderArgs, ...] = Field(
        default=(),
        description="Models for embedding, reranking and classification, served beside `model`.",
    )
    ready_timeout_s: float = Field(
        default=5.0,
        gt=0,
        description="How long /ready waits for the engines' answers before it says 503.",
    )
    num_retries: int = Field(
        default=1,
        ge=0,
        description=(
            "How often a request is sent to another replica when its engine is lost before the"
            " first byte."
        ),
    )
    silence_timeout_s: float = Field(
        default=5.0,
        gt=2 * ASK_EVERY_S,
        description=(
            "After how long a replica is given up whose process does not answer, not even from a"
            " thread of its own: it was stopped, its node died, or the link is cut. A replica that"
            " is only busy answers."
        ),
    )
    hang_timeout_s: float = Field(
        default=120.0,
        gt=0,
        description=(
            "After how long an engine that does not answer its own replica is given up, and a"
            " replica whose event loop does not run. Longer than the longest step: compilation at"
            " the first requests counts."
        ),
    )
    share_prefixes: bool = Field(
        default=False,
        description=(
            "Let a tenant's requests use the KV of equal prompts of other tenants. It saves work,"
            " and lets tenants measure which prompts others send."
        ),
    )
    max_text_chars: int = Field(
        default=4_000_000,
        ge=1,
        description=(
            "Characters that /tokenize takes, of the generator; a token of /detokenize counts as"
            " four."
        ),
    )
    admission: AdmissionArgs = Field(
        default=AdmissionArgs(), description="The queue in front of the generator."
    )
    access: AccessArgs = Field(
        default=AccessArgs(), description="API keys, and limits on what requests may bring."
    )
    grammars: GrammarArgs = Field(
        default=GrammarArgs(),
        description="How large the grammars of requests may be, and what they may cost.",
    )
    limits: LimitsArgs = Field(
        default=LimitsArgs(), description="What clients may hold of an ingress at once."
    )

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
        """The name that clients send as `model` for generated text; None if there are only
        encoders."""
        return None if self.model is None else self.served_model_name or last_part(self.model)

    @property
    def served_names(self) -> list[str]:
        """Every name that clients may send as `model`: the generator's first, then its
        adapters'."""
        adapters = (adapter["name"] for adapter in self.frontend.get("lora_modules", ()))
        return [
            n
            for n in (
                self.model_name,
                *adapters,
                *(encoder.model_name for encoder in self.encoders),
            )
            if n
        ]

    @property
    def num_workers(self) -> int:
        """Worker processes of one engine: tensor parallel times pipeline parallel."""
        return int(self.engine.get("tensor_parallel_size", 1)) * int(
            self.engine.get("pipeline_parallel_size", 1)
        )

    def resolved(self) -> AppArgs:
        """The same arguments with models as absolute paths, for replicas may run in another
        directory, and API keys as digests. Raises ConfigError if a model's directory or a key does
        not exist.
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

        Several workers run as Ray actors in the replica's placement group, unless the YAML names
        another executor.
        """
        base: dict[str, Any] = {"model": self.model, "served_model_name": [self.model_name]}
        if self.num_workers > 1:
            base["distributed_executor_backend"] = "ray"
        return base | self.engine


def resolved_frontend(frontend: Mapping[str, Any]) -> dict[str, Any]:
    """With absolute paths of adapters, and of a chat template that is a file; it may be the
    template itself."""
    fields = dict(frontend)
    if adapters := fields.get("lora_modules"):
        fields["lora_modules"] = [
            {**adapter, "path": resolve_model(adapter["path"])} for adapter in adapters
        ]
    template = fields.get("chat_template")
    if isinstance(template, str) and "\n" not in template and Path(template).is_file():
        fields["chat_template"] = str(Path(template).resolve())
    return fields
