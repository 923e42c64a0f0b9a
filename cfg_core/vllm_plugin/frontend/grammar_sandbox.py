"""GrammarSandbox: tries each grammar in a process that can be killed, before vLLM gets it.

It runs in the frontend process of an engine. It is asynchronous, and the event loop compiles no
grammar. A grammar that has passed its trial is marked. vLLM's own validation would parse the
grammar again on the event loop, so it is skipped for a marked one (patches.py).
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from vllm.sampling_params import SamplingParams

from cfg_core.errors import OverloadedError, RequestError
from cfg_core.grammars.bounds import KINDS, STRUCTURED_OUTPUTS, GrammarBounds
from cfg_core.grammars.limits import GrammarLimits
from cfg_core.grammars.places import FairPlaces
from cfg_core.vllm_plugin.config import grammar_bounds_of, grammar_limits_of
from cfg_core.vllm_plugin.frontend.helper_process import HelperGoneError, HelperProcess
from cfg_core.vllm_plugin.grammar_helper import frames
from cfg_core.vllm_plugin.grammar_helper.settings import settings_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.sampling_params import StructuredOutputsParams

logger = logging.getLogger(__name__)

TRIED = "_cfg_serve_tried"
"""Attribute of a StructuredOutputsParams that has passed its trial.

It is not a field, so a copy that changes something loses it.
"""

_OPTIONS = ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern")
_GONE = "The process that checks grammars is not available at the moment: send the request again."


class GrammarSandbox:
    """Tries the grammars of one engine's requests."""

    def __init__(
        self,
        config: VllmConfig,
        bounds: GrammarBounds | None = None,
        limits: GrammarLimits | None = None,
    ) -> None:
        """bounds, limits: by default those of the engine's configuration."""
        self._bounds: GrammarBounds = bounds or grammar_bounds_of(config)
        self._limits: GrammarLimits = limits or grammar_limits_of(config)
        self._settings = settings_of(config)
        self._places = FairPlaces(self._limits.places, self._limits.max_waiting)
        self._verdicts: OrderedDict[bytes, dict[str, Any]] = OrderedDict()
        self._process: HelperProcess | None = None

    def begin(self) -> None:
        """Start to load the helper, if the limits say `at_start`. Returns at once."""
        if self._limits.at_start:
            self._process = HelperProcess(self._settings, self._limits)

    async def start(self) -> None:
        """Load the helper now. Raises HelperGoneError if it cannot be loaded."""
        await self._ready()

    def close(self) -> None:
        """End the helper and all trials."""
        if self._process is not None:
            self._process.close()
            self._process = None

    async def check(self, params: SamplingParams, tenant: str = "") -> None:
        """Put the grammar of `params` on trial.

        If it passes, `params.structured_outputs` becomes what vLLM's validation would make of it.
        Raises RequestError with the reason if it does not pass, and OverloadedError if there is no
        place or no helper. Cancelling the call ends the trial.

        tenant: who sent the request. Places for trials are shared fairly between tenants.
        """
        outputs = params.structured_outputs
        if outputs is None or outputs.all_constraints_none() or is_tried(outputs):
            return
        fields = fields_of(outputs)
        self._bounds.check_outputs(fields)
        verdict = await self._verdict(fields, params.allowed_token_ids, tenant)
        if "refused" in verdict:
            raise RequestError(verdict["refused"], STRUCTURED_OUTPUTS)
        _adopt(outputs, verdict)

    async def _verdict(
        self, fields: dict[str, Any], allowed: list[int] | None, tenant: str
    ) -> dict[str, Any]:
        request = {"outputs": fields, "allowed": allowed, "mask_ms": self._limits.mask_ms}
        try:
            payload = json.dumps(request).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(
                f"{STRUCTURED_OUTPUTS} is not valid JSON: {error}.", STRUCTURED_OUTPUTS
            ) from None
        key = hashlib.sha256(payload).digest()
        if (verdict := self._remembered(key)) is not None:
            return verdict
        async with self._places.hold(tenant):
            verdict = self._remembered(key)  # another request may have tried the same one meanwhile
            if verdict is None:
                verdict = await self._try(payload)
                self._remember(key, verdict)
        return verdict

    async def _try(self, payload: bytes) -> dict[str, Any]:
        """The verdict. If the helper is lost, a new one tries once more."""
        for _ in range(2):
            try:
                kind, answer = await (await self._ready()).ask(payload)
            except HelperGoneError as error:
                logger.warning("the process that checks grammars was lost: %s", error)
                continue
            return (
                json.loads(answer) if kind == frames.VERDICT else {"refused": self._killed(answer)}
            )
        raise OverloadedError(_GONE, 5.0, "grammars")

    def _killed(self, answer: bytes) -> str:
        if answer == frames.OUT_OF_TIME:
            return (
                f"The grammar takes too long to compile: more than {self._limits.cpu_s:g} s of CPU"
                f" time, or {self._limits.wall_s:g} s of wall-clock time. Make it smaller, or nest"
                " fewer repetitions."
            )
        return (
            "The grammar cannot be compiled: its compiler ran out of memory or stack. Make it"
            " smaller or flatter."
        )

    async def _ready(self) -> HelperProcess:
        """The helper. It is started if there is none."""
        if self._process is None or self._process.gone:
            self._process = HelperProcess(self._settings, self._limits)
        process = self._process
        await process.ready()
        return process

    def _remembered(self, key: bytes) -> dict[str, Any] | None:
        if key in self._verdicts:
            self._verdicts.move_to_end(key)
        return self._verdicts.get(key)

    def _remember(self, key: bytes, verdict: dict[str, Any]) -> None:
        self._verdicts[key] = verdict
        while len(self._verdicts) > self._limits.remembered:
            self._verdicts.popitem(last=False)


def is_tried(outputs: StructuredOutputsParams | None) -> bool:
    """Whether `outputs` have passed a trial, and have not changed since."""
    return hasattr(outputs, TRIED)


def fields_of(outputs: StructuredOutputsParams) -> dict[str, Any]:
    """The fields of a StructuredOutputsParams that are set, as plain values."""
    fields = {name: getattr(outputs, name) for name in (*KINDS, *_OPTIONS)}
    return {
        name: value
        for name, value in fields.items()
        if value is not None and (value or name in KINDS)
    }


def _adopt(outputs: StructuredOutputsParams, verdict: Mapping[str, Any]) -> None:
    """Set the fields of `outputs` to what validation in the helper made of them."""
    for name, value in verdict["changed"].items():
        setattr(outputs, name, value)
    outputs._backend, outputs._backend_was_auto = verdict["backend"], verdict["was_auto"]
    setattr(outputs, TRIED, True)


def validate_structured_outputs(stock: Callable[..., None]) -> Callable[..., None]:
    """Replaces `SamplingParams._validate_structured_outputs`.

    It skips the validation of grammars that have passed their trial.
    """

    @functools.wraps(stock)
    def validate(self: SamplingParams, *args: Any, **kwargs: Any) -> None:
        if not is_tried(self.structured_outputs):
            stock(self, *args, **kwargs)

    return validate
