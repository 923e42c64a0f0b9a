"""The keys of a generator: an entry of `models:`, or the same keys in `args:` itself."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from cfg_core.grammars.trials import GrammarLimits
from cfg_core.logits_processors.config import check_config as check_processors
from cfg_core.params.follower import USUAL_MAX_FOLLOWERS
from deployments.config.admission import AdmissionArgs
from deployments.config.base import YamlArgs
from deployments.config.engine_keys import check_engine_keys, check_frontend
from deployments.config.model_paths import is_missing, last_part, resolve_model, resolved_frontend

DEPLOYMENT = "ModelReplica"
"""The usual name of a generator's deployment."""


class FallbackArgs(YamlArgs):
    """The model that is served in place of `model`, and how its options differ."""

    section = "fallback"

    model: str
    """The model that is served if the directory of `model` does not exist when the application is
    built.
    """

    served_model_name: str | None = None
    """The name that clients send as `model`. Default: the last part of `model`."""

    engine: dict[str, Any] = Field(default_factory=dict)
    """Options that replace those of the same names in `engine`."""

    @field_validator("engine")
    @classmethod
    def _known_engine_keys(cls, engine: dict[str, Any]) -> dict[str, Any]:
        check_engine_keys(engine)
        return engine

    @property
    def model_name(self) -> str:
        """The name that clients send as `model`."""
        return self.served_model_name or last_part(self.model)


class GeneratorArgs(YamlArgs):
    """What one generator has of its own, whether it is the only one or an entry of `models`."""

    model: str | None = None
    """The model that generates text: its directory (relative to where you start Serve, or to this
    repository), a name on the Hugging Face hub, or `package:NAME/PATH`, the directory PATH inside
    the installed Python package NAME. Leave it out to serve encoders only.
    """

    served_model_name: str | None = None
    """The name that clients send as `model`. Default: the last part of `model`."""

    deployment: str = Field(default=DEPLOYMENT, min_length=1)
    """Name of the model's Serve deployment. Use it under `deployments:` to set the replicas, the
    autoscaling and the resources. Each model needs a name of its own.
    """

    scales_to_zero: bool = False
    """Set this to true if the deployment has `min_replicas: 0`. A model without replicas then
    counts as asleep, not as broken: /ready and /v1/models do not start a replica of it. The next
    request for it does, and waits.
    """

    fallback: FallbackArgs | None = None
    """What is served if `model` is a directory that does not exist. A warning in the log says so.
    """

    kv_split: Literal["elastic", "even"] = "elastic"
    """How the KV cache is shared between leaders (the conditional streams, and requests without
    guidance) and followers (the negative streams). `elastic` moves the boundary with demand, `even`
    gives half of the blocks to each.
    """

    draft_cost: float | None = Field(default=None, ge=0)
    """For speculative decoding (`engine.speculative_config`): the cost of one more draft token,
    where the cost of a step without drafts is 1. A guided request whose drafts are accepted too
    rarely to be worth this cost gets fewer drafts. 0 turns this reduction off. Default: measured
    while the engine runs, and 0.2 where it is not.
    """

    max_followers: int | None = Field(default=None, ge=1)
    """Maximum number of followers of one request: its negative, or the entries of
    `guidance_streams`. Default: 8.
    """

    logits_processors: dict[str, Any] = Field(default_factory=dict)
    """Logits processors that requests may ask for by name. Each entry names the factory that makes
    one: `name: package.module:Class`, or, with options for the factory, `name: {factory:
    package.module:Class, option: value}`.
    """

    drain_after_s: float | None = Field(default=2.0, ge=0)
    """Seconds for which a replica that is to stop (a scale-down, a rolling update, a node that is
    drained) lets its answers end by themselves. Then they go on on other replicas that have the
    same model and room for them, the oldest first. What cannot go on elsewhere ends where it is,
    within Serve's `graceful_shutdown_timeout_s`. `null`: nothing goes on elsewhere.
    """

    engine: dict[str, Any] = Field(default_factory=dict)
    """Options of the vLLM engine, by the field names of vLLM's AsyncEngineArgs."""

    frontend: dict[str, Any] = Field(default_factory=dict)
    """Options of vLLM's OpenAI frontend, by the field names of vLLM's FrontendArgs:
    `chat_template`, `tool_call_parser`, and so on. `lora_modules` is a list of `{name: NAME, path:
    DIRECTORY}`; clients send an adapter's name as `model`.
    """

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
    def _frontend_fits(self) -> Self:
        for args in (self, self.with_fallback()):
            check_frontend(args.frontend, args.engine)
        return self

    @property
    def model_name(self) -> str | None:
        """The name that clients send as `model` for generated text; None without a generator."""
        return None if self.model is None else self.served_model_name or last_part(self.model)

    @property
    def adapters(self) -> list[str]:
        """The names of the adapters in `frontend`, which clients send as `model`."""
        return [adapter["name"] for adapter in self.frontend.get("lora_modules", ())]

    @property
    def num_workers(self) -> int:
        """Worker processes of one engine: tensor parallel size times pipeline parallel size."""
        return int(self.engine.get("tensor_parallel_size", 1)) * int(
            self.engine.get("pipeline_parallel_size", 1)
        )

    @property
    def engine_orders_by_priority(self) -> bool:
        """Whether vLLM's scheduler orders by `priority`; else it refuses requests that have one."""
        return self.engine.get("scheduling_policy") == "priority"

    @property
    def followers_per_request(self) -> int:
        """The most followers of one request, in the ingress and in the engine."""
        return self.max_followers or USUAL_MAX_FOLLOWERS

    def with_fallback(self) -> Self:
        """The same arguments with `fallback`, if there is one, in place of `model`."""
        other = self.fallback
        if other is None:
            return self
        fields = {
            "model": other.model,
            "served_model_name": other.model_name,
            "engine": {**self.engine, **other.engine},
            "fallback": None,
        }
        return self.model_copy(update=fields)

    def missing_model(self) -> str | None:
        """A sentence about what is served in place of `model`; None if `model` itself is."""
        if self.model is None or self.fallback is None or not is_missing(self.model):
            return None
        return (
            f"The model directory `{self.model}` does not exist, so `{self.fallback.model}` is"
            " served instead: run `make setup`, which tries to provide the model."
        )

    def resolved(self) -> Self:
        """The same arguments with models as absolute paths.

        If the directory of `model` is missing, `fallback` is in its place. Paths are absolute
        because replicas may run in another directory. Raises ConfigError if a model's directory
        does not exist.
        """
        if self.missing_model():
            return self.with_fallback().resolved()
        if self.model is None:
            return self
        fields: dict[str, Any] = {
            "model": resolve_model(self.model),
            "served_model_name": self.model_name,
            "frontend": resolved_frontend(self.frontend),
        }
        speculation = self.engine.get("speculative_config")
        if isinstance(speculation, dict) and isinstance(speculation.get("model"), str):
            speculation = {**speculation, "model": resolve_model(speculation["model"])}
            fields["engine"] = {**self.engine, "speculative_config": speculation}
        return self.model_copy(update=fields)


class ModelArgs(GeneratorArgs):
    """One entry of `models:`: a model that generates text, with engines and a queue of its own."""

    section = "models"

    model: str
    """The model that generates text: its directory (relative to where you start Serve, or to this
    repository), a name on the Hugging Face hub, or `package:NAME/PATH`, the directory PATH inside
    the installed Python package NAME.
    """

    admission: AdmissionArgs | None = None
    """The queue in front of this model. Default: as `admission` of `args`; each model has a queue
    of its own in either case.
    """

    grammars: GrammarLimits | None = None
    """What compiling the grammars of requests for this model may cost, and what they allow.
    Default: as `grammars` of `args`.
    """
