"""The options of a deployment, under `args:` in its YAML file, checked before any engine starts.

This module imports neither vllm nor ray, so a mistake in a YAML file is reported in milliseconds,
on any machine. Serve's own options (replicas, autoscaling, resources) stay under `deployments:`,
where Serve users look for them. This module does not read them.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from cfg_core.grammars.trials import GrammarLimits
from cfg_core.logits_processors.config import check_config as check_processors
from cfg_core.params.follower import USUAL_MAX_FOLLOWERS
from deployments.config.access import AccessArgs
from deployments.config.admission import AdmissionArgs
from deployments.config.base import YamlArgs
from deployments.config.checks import check_body_limits, check_generator, check_unique
from deployments.config.encoders import EncoderArgs
from deployments.config.engine_keys import check_engine_keys, check_frontend
from deployments.config.http import HttpArgs
from deployments.config.limits import LimitsArgs
from deployments.config.model_paths import is_missing, last_part, resolve_model, resolved_frontend
from deployments.config.tracing import TracingArgs
from deployments.health.beacon import ASK_EVERY_S


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


class AppArgs(YamlArgs):
    """The `args:` of `import_path: deployments.app:build`.

    Immutable. An unknown key is an error.
    """

    section = "args"

    model: str | None = None
    """The model that generates text: its directory (relative to where you start Serve, or to this
    repository), a name on the Hugging Face hub, or `package:NAME/PATH`, the directory PATH inside
    the installed Python package NAME. Leave it out to serve encoders only.
    """

    served_model_name: str | None = None
    """The name that clients send as `model`. Default: the last part of `model`."""

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
    rarely to be worth this cost gets fewer drafts. 0 turns this reduction off. Default: 0.2.
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

    allow_untested_vllm: bool = False
    """Start the generator with a vLLM version that was not tested, if that version has all names
    and signatures that cfg-serve uses. Guidance may still be wrong on it.
    """

    engine: dict[str, Any] = Field(default_factory=dict)
    """Options of the vLLM engine, by the field names of vLLM's AsyncEngineArgs."""

    frontend: dict[str, Any] = Field(default_factory=dict)
    """Options of vLLM's OpenAI frontend, by the field names of vLLM's FrontendArgs:
    `chat_template`, `tool_call_parser`, and so on. `lora_modules` is a list of `{name: NAME, path:
    DIRECTORY}`; clients send an adapter's name as `model`.
    """

    encoders: tuple[EncoderArgs, ...] = ()
    """Models for embedding, reranking and classification, served beside `model`."""

    ready_timeout_s: float = Field(default=5.0, gt=0)
    """Seconds that /ready waits for the engines' answers. If one is still missing, /ready answers
    503.
    """

    num_retries: int = Field(default=1, ge=0)
    """How many times a request is sent to another replica if its engine is lost before the first
    byte of the answer.
    """

    silence_timeout_s: float = Field(default=5.0, gt=2 * ASK_EVERY_S)
    """Seconds without a sign of life after which a replica of the generator is treated as failed:
    its process hangs, its node died, or the network link is cut. Its requests are then sent to
    another replica, or end with an error. A replica that is only busy is not treated as failed,
    because a separate thread gives its signs of life. The value must be above 1.
    """

    hang_timeout_s: float = Field(default=120.0, gt=0)
    """Seconds after which a replica of the generator exits because its engine does not answer it,
    or because its own event loop does not run. Serve then starts another replica. Set this to more
    than the longest step of the engine takes. At the first requests a step may include compilation.
    """

    share_prefixes: bool = False
    """Let requests reuse the KV cache of equal prompt prefixes of other tenants. This saves
    computation, but tenants can then find out from response times which prompts others have sent.
    """

    direct_calls: bool = True
    """Let the ingress send requests for text to the replicas of the generator over TCP connections
    of its own, which costs less CPU than Ray Serve's path. Each replica listens on a free port of
    its node's address for this, and both sides must prove that they know a random secret. If a
    replica cannot be reached there, Serve's path is used. There are no direct calls with
    RAY_USE_TLS, or with an autoscaling policy other than GuidedLoad, because Serve does not count
    them. Each replica takes up to `max_ongoing_requests` of them, and further ones go through
    Serve. `false` turns them off.
    """

    max_text_chars: int = Field(default=4_000_000, ge=1)
    """Maximum number of characters in a request to /tokenize for the generator. The limit also
    applies to /detokenize, where each token counts as four characters. A longer request gets 400.
    """

    admission: AdmissionArgs = AdmissionArgs()
    """The queue in front of the generator."""

    access: AccessArgs = AccessArgs()
    """API keys and their limits, the size of bodies, and the logging of prompts."""

    tracing: TracingArgs = TracingArgs()
    """OpenTelemetry spans of requests, from the ingress to each stream."""

    grammars: GrammarLimits = GrammarLimits()
    """What compiling the grammars of requests may cost, and what they allow."""

    limits: LimitsArgs = LimitsArgs()
    """Limits on the requests and bodies that clients have in an ingress at the same time, on how
    slowly they may send and read, and on the size of answers.
    """

    http: HttpArgs = HttpArgs()
    """Which web pages, names of this server and proxies are trusted."""

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
        check_generator(dict(self))
        check_body_limits(self.access.max_body_bytes, self.limits)
        for args in (self, self.with_fallback()):
            check_frontend(args.frontend, args.engine)
            check_unique([encoder.deployment for encoder in args.encoders], args.served_names)
        return self

    @property
    def model_name(self) -> str | None:
        """The name that clients send as `model` for generated text; None without a generator."""
        return None if self.model is None else self.served_model_name or last_part(self.model)

    @property
    def served_names(self) -> list[str]:
        """Every name that clients may send as `model`: generator, adapters, then encoders."""
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
        """Worker processes of one engine: tensor parallel size times pipeline parallel size."""
        return int(self.engine.get("tensor_parallel_size", 1)) * int(
            self.engine.get("pipeline_parallel_size", 1)
        )

    def with_fallback(self) -> AppArgs:
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

    def resolved(self) -> AppArgs:
        """The same arguments with models as absolute paths, and API keys as digests.

        If the directory of `model` is missing, `fallback` is in its place. Paths are absolute
        because replicas may run in another directory. Raises ConfigError if a model's directory or
        a key does not exist.
        """
        if self.missing_model():
            return self.with_fallback().resolved()
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
        """Whether vLLM's scheduler orders by `priority`; else it refuses requests that have one."""
        return self.engine.get("scheduling_policy") == "priority"

    @property
    def followers_per_request(self) -> int:
        """The most followers of one request, in the ingress and in the engine."""
        return self.max_followers or USUAL_MAX_FOLLOWERS

    @property
    def plugin_kwargs(self) -> dict[str, Any]:
        """Keyword arguments of `cfg_core.vllm_plugin.guided_engine_args`."""
        return {
            "kv_split": self.kv_split,
            "logits_processors": self.logits_processors,
            "draft_cost": self.draft_cost,
            "grammars": _changed(self.grammars),
            "allow_untested_vllm": self.allow_untested_vllm,
            "max_followers": self.followers_per_request,
            "traced": self.tracing.otlp_traces_endpoint is not None,
        }

    def engine_kwargs(self) -> dict[str, Any]:
        """Keyword arguments of vLLM's AsyncEngineArgs, without those of the guided plugin.

        If an engine has several workers, they run as Ray actors in the replica's placement group,
        unless the YAML names another executor.
        """
        base: dict[str, Any] = {"model": self.model, "served_model_name": [self.model_name]}
        if self.num_workers > 1:
            base["distributed_executor_backend"] = "ray"
        return base | self.engine


def _changed(limits: GrammarLimits) -> dict[str, Any]:
    """The fields that differ from their defaults."""
    usual = dataclasses.asdict(GrammarLimits())
    given = dataclasses.asdict(limits)
    return {name: value for name, value in given.items() if value != usual[name]}
