"""The options of a deployment, under `args:` in its YAML file, checked before any engine starts.

This module imports neither vllm nor ray, so a mistake in a YAML file is reported in milliseconds,
on any machine. Serve's own options (replicas, autoscaling, resources) stay under `deployments:`,
where Serve users look for them. This module does not read them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from pydantic import Field, model_validator

from cfg_core.errors import ConfigError
from cfg_core.grammars.trials import GrammarLimits
from deployments.config.access import AccessArgs
from deployments.config.admission import AdmissionArgs
from deployments.config.checks import check_body_limits, check_generator, check_unique
from deployments.config.encoders import EncoderArgs
from deployments.config.generators import GeneratorArgs, ModelArgs
from deployments.config.http import HttpArgs
from deployments.config.limits import LimitsArgs
from deployments.config.tracing import TracingArgs
from deployments.health.beacon import ASK_EVERY_S


class AppArgs(GeneratorArgs):
    """The `args:` of `import_path: deployments.app:build`.

    Immutable. An unknown key is an error.
    """

    section = "args"

    models: tuple[ModelArgs, ...] = ()
    """Several models that generate text, in place of `model` and the keys that belong to it. Each
    has a deployment, engines and a queue of its own; the field `model` of a request chooses one.
    """

    allow_untested_vllm: bool = False
    """Start the generator with a vLLM version that was not tested, if that version has all names
    and signatures that cfg-serve uses. Guidance may still be wrong on it.
    """

    encoders: tuple[EncoderArgs, ...] = ()
    """Models for embedding, reranking and classification, served beside `model`."""

    ready_timeout_s: float = Field(default=5.0, gt=0)
    """Seconds that /ready waits for the engines' answers. If one is still missing, /ready answers
    503.
    """

    num_retries: int = Field(default=2, ge=0)
    """How many times a request is sent to another replica if its engine is lost before the first
    byte of the answer. A request that ends engines ends one more than that.
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
    """The queue in front of the generator, or of each entry of `models` that has none itself."""

    access: AccessArgs = AccessArgs()
    """API keys and their limits, the size of bodies, and the logging of prompts."""

    tracing: TracingArgs = TracingArgs()
    """OpenTelemetry spans of requests, from the ingress to each stream."""

    grammars: GrammarLimits = GrammarLimits()
    """What compiling the grammars of requests may cost, and what they allow. An entry of `models`
    may have its own.
    """

    limits: LimitsArgs = LimitsArgs()
    """Limits on the requests and bodies that clients have in an ingress at the same time, on how
    slowly they may send and read, and on the size of answers.
    """

    http: HttpArgs = HttpArgs()
    """Which web pages, names of this server and proxies are trusted."""

    @model_validator(mode="after")
    def _consistent(self) -> AppArgs:
        check_generator(dict(self), self.model_fields_set & GeneratorArgs.model_fields.keys())
        check_body_limits(self.access.max_body_bytes, self.limits)
        generators = [entry.deployment for entry in self._entries]
        encoders = [encoder.deployment for encoder in self.encoders]
        for args in (self, self.with_fallback()):
            check_unique(generators, encoders, args.served_names)
        return self

    @property
    def _entries(self) -> tuple[GeneratorArgs, ...]:
        """The own keys of each generator."""
        return self.models or (() if self.model is None else (self,))

    @property
    def generators(self) -> tuple[AppArgs, ...]:
        """The arguments of each generator, as they would be if it were the only one."""
        if self.models:
            return tuple(self._alone(entry) for entry in self.models)
        return () if self.model is None else (self,)

    def _alone(self, entry: ModelArgs) -> AppArgs:
        given = {name: getattr(entry, name) for name in ModelArgs.model_fields}
        shared = {"models": (), "admission": self.admission, "grammars": self.grammars}
        return self.model_copy(
            update=shared | {name: value for name, value in given.items() if value is not None}
        )

    @property
    def generator_names(self) -> list[str]:
        """The names of the generators, without their adapters."""
        return [str(entry.model_name) for entry in self._entries]

    @property
    def served_names(self) -> list[str]:
        """Every name that clients may send as `model`: generators, adapters, then encoders."""
        generators = [
            name for entry in self._entries for name in (str(entry.model_name), *entry.adapters)
        ]
        return [*generators, *(encoder.model_name for encoder in self.encoders)]

    def with_fallback(self) -> AppArgs:
        """The same arguments with each `fallback` in place of its `model`."""
        models = tuple(entry.with_fallback() for entry in self.models)
        return super().with_fallback().model_copy(update={"models": models})

    def missing_models(self) -> list[str]:
        """A sentence for each model in whose place another one is served."""
        sentences = (entry.missing_model() for entry in (self, *self.models))
        return [sentence for sentence in sentences if sentence]

    def resolved(self) -> AppArgs:
        """The same arguments with models as absolute paths, and API keys as digests.

        If the directory of a model is missing, its `fallback` is in its place. Paths are absolute
        because replicas may run in another directory. Raises ConfigError if a model's directory or
        a key does not exist.
        """
        fields = {
            "models": tuple(_resolved(entry) for entry in self.models),
            "encoders": tuple(encoder.resolved() for encoder in self.encoders),
            "access": self.access.resolved(),
        }
        return super().resolved().model_copy(update=fields)

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


def _resolved(entry: ModelArgs) -> ModelArgs:
    try:
        return entry.resolved()
    except ConfigError as error:
        raise ConfigError(f"`{entry.model_name}` in `models`: {error}") from None


def _changed(limits: GrammarLimits) -> dict[str, Any]:
    """The fields that differ from their defaults."""
    usual = dataclasses.asdict(GrammarLimits())
    given = dataclasses.asdict(limits)
    return {name: value for name, value in given.items() if value != usual[name]}
