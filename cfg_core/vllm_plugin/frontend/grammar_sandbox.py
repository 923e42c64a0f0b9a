"""GrammarSandbox: tries each grammar in a process that can be killed, before vLLM gets it.

It runs in the frontend process of an engine. It is asynchronous, and the event loop compiles no
grammar. A grammar that has passed its trial is marked. vLLM's own validation would parse the
grammar again on the event loop, so it is skipped for a marked one (vllm_patches.py).
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

from vllm.sampling_params import SamplingParams

from cfg_core.errors import OverloadedError, RequestError
from cfg_core.grammars import schemas
from cfg_core.grammars.bounds import KINDS, STRUCTURED_OUTPUTS, check_outputs
from cfg_core.grammars.keywords import UnenforcedKeyword
from cfg_core.grammars.trials import WALL_S, FairPlaces, GrammarLimits, Verdicts
from cfg_core.lanes import LONG_TEXT
from cfg_core.vllm_plugin.config import grammar_limits_of
from cfg_core.vllm_plugin.frontend.helper_process import HelperGoneError, HelperProcess
from cfg_core.vllm_plugin.grammar_backends import GUIDANCE, XGRAMMAR
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

FIRST_CPU_S = 1.0
"""Seconds of CPU time that the compiler of vLLM's choice has, if another one may be taken.

Most schemas and tools take it less than 0.1 s. One `maxLength` of 400 takes 2 s with 49,152 tokens,
and 12 s with 262,144; llguidance compiles it in 2 ms.
"""

MOST_NAMED = 5
"""Keywords that are named in a refusal."""

TEXTS = 64
"""Number of schemas and structural tags whose canonical form is remembered."""

_OPTIONS = ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern")
_GONE = "The process that checks grammars is not available at the moment: send the request again."


class GrammarSandbox:
    """Tries the grammars of one engine's requests."""

    def __init__(self, config: VllmConfig, limits: GrammarLimits | None = None) -> None:
        """limits: by default those of the engine's configuration."""
        self._limits: GrammarLimits = limits or grammar_limits_of(config)
        self._settings = settings_of(config)
        self._places = FairPlaces(self._limits.places)
        self._texts: dict[tuple[str, str], str] = {}
        self._verdicts = Verdicts()
        self._may_choose = config.structured_outputs_config.backend == "auto"
        self._process: HelperProcess | None = None

    def begin(self) -> None:
        """Start to load the helper, if the limits say `at_start`. Returns at once."""
        if self._limits.at_start:
            self._process = HelperProcess(self._settings, self._limits)

    async def loaded(self) -> None:
        """Return when the helper that `begin` started can be asked, or has failed to load."""
        if self._process is not None:
            try:
                await self._process.ready()
            except HelperGoneError as error:
                logger.warning("the process that checks grammars did not start: %s", error)

    async def start(self) -> None:
        """Load the helper now. Raises HelperGoneError if it cannot be loaded."""
        await self._ready()

    def close(self) -> None:
        """End the helper and all trials."""
        if self._process is not None:
            self._process.close()
            self._process = None

    async def check(
        self,
        params: SamplingParams,
        tenant: str = "",
        *,
        strict: bool = False,
        of_tools: bool = False,
    ) -> None:
        """Put the grammar of `params` on trial.

        If it passes, `params.structured_outputs` becomes what vLLM's validation would make of it.
        Raises RequestError with the reason if it does not pass, and OverloadedError if there is no
        place, no helper or no time. Cancelling the call ends the trial.

        tenant: who sent the request. Places for trials are shared fairly between tenants.
        strict: whether to refuse a schema with a keyword that no compiler enforces.
        of_tools: whether vLLM made the grammar of tools, see `ways.CompileOptions`.
        """
        outputs = params.structured_outputs
        if outputs is None or outputs.all_constraints_none() or is_tried(outputs):
            return
        fields = await self._read(fields_of(outputs))
        verdict = await self._verdict(fields, params.allowed_token_ids, tenant, of_tools)
        if "refused" in verdict:
            raise RequestError(verdict["refused"], STRUCTURED_OUTPUTS)
        if strict and verdict["lost"]:
            raise RequestError(_not_enforced(verdict["lost"]), STRUCTURED_OUTPUTS)
        _adopt(outputs, fields, verdict)

    async def _read(self, fields: dict[str, Any]) -> dict[str, Any]:
        """`fields` with schemas as text in one order of keywords: equal ones are tried once.

        Raises RequestError if they are larger than the bounds. Large ones are read in a thread. The
        last ones are remembered, because agents send the same tools with each request.
        """
        kind = next((kind for kind in schemas.CANONICAL if fields.get(kind) is not None), None)
        check_outputs({name: fields[name] for name in fields if name != kind})
        if kind is None:
            return fields
        text = fields[kind] if isinstance(fields[kind], str) else _json_of(fields[kind])
        canonical = self._texts.get((kind, text))
        if canonical is None:
            read = partial(_bounded_text, kind, text)
            canonical = await asyncio.to_thread(read) if len(text) > LONG_TEXT else read()
            self._texts[kind, text] = canonical
            if len(self._texts) > TEXTS:
                del self._texts[next(iter(self._texts))]
        return {**fields, kind: canonical}

    async def _verdict(
        self, fields: dict[str, Any], allowed: list[int] | None, tenant: str, of_tools: bool
    ) -> dict[str, Any]:
        limits = self._limits
        request = {"outputs": fields, "allowed": allowed, "mask_ms": limits.mask_ms}
        request |= {"whitespace": limits.json_whitespace, "of_tools": of_tools}
        key = hashlib.sha256(_json_of(request).encode()).digest()
        if (verdict := self._verdicts.get(key)) is not None:
            return verdict
        async with self._places.hold(tenant):
            # Another request may have tried the same one meanwhile.
            verdict = self._verdicts.get(key)
            if verdict is None:
                verdict = await self._tried(request)
                self._verdicts.keep(key, verdict)
        return verdict

    async def _tried(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The verdict on a grammar that was not tried before.

        Under `auto`, a grammar that costs the compiler of vLLM's choice more than FIRST_CPU_S goes
        to llguidance, which computes masks only when they are needed. If llguidance cannot express
        it, or gives up, the first compiler tries again. Both have as much time then as the limits
        allow.
        """
        if not self._may_choose:
            return await self._try(request, None, self._limits.cpu_s)
        patience = min(FIRST_CPU_S, self._limits.cpu_s)
        first = await self._try(request, None, patience)
        if not first.get("costly"):
            return first
        second = await self._try(request, GUIDANCE, self._limits.cpu_s)
        if "refused" not in second or second.get("out_of_cpu"):
            return second
        if not first.get("out_of_cpu"):
            return second if second["costly"] else first
        return await self._try(request, XGRAMMAR, self._limits.cpu_s)

    async def _try(
        self, request: Mapping[str, Any], compiler: str | None, cpu_s: float
    ) -> dict[str, Any]:
        """The verdict of one trial. If the helper is lost, a new one tries once more.

        compiler: None for all, or the only one to use.
        """
        payload = json.dumps({**request, "compiler": compiler, "cpu_s": cpu_s}).encode()
        for _ in range(2):
            try:
                kind, answer = await (await self._ready()).ask(payload)
            except HelperGoneError as error:
                logger.warning("the process that checks grammars was lost: %s", error)
                continue
            if kind == frames.VERDICT:
                verdict: dict[str, Any] = json.loads(answer)
                return verdict
            if answer != frames.GONE:
                return self._killed(answer, cpu_s)
        raise OverloadedError(_GONE, 5.0, "grammars")

    def _killed(self, answer: bytes, cpu_s: float) -> dict[str, Any]:
        """The verdict on a grammar whose trial was ended.

        Raises OverloadedError if it did not get the CPU time that it may have: that says nothing
        about the grammar.
        """
        if answer == frames.OUT_OF_TIME:
            raise OverloadedError(
                f"The grammar was not compiled within {WALL_S:g} s, because this"
                " server is busy: send the request again later.",
                5.0,
                "grammars",
            )
        if answer == frames.OUT_OF_CPU:
            sentence = (
                f"The grammar takes too long to compile: more than {cpu_s:g} s of CPU"
                " time. Make it smaller, or nest fewer repetitions."
            )
        else:
            sentence = (
                "The grammar cannot be compiled: its compiler ran out of memory or stack. Make it"
                " smaller or flatter."
            )
        return {"refused": sentence, "costly": True, "out_of_cpu": answer == frames.OUT_OF_CPU}

    async def _ready(self) -> HelperProcess:
        """The helper. It is started if there is none."""
        if self._process is None or self._process.gone:
            self._process = HelperProcess(self._settings, self._limits)
        process = self._process
        await process.ready()
        return process


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


def _not_enforced(lost: list[list[str]]) -> str:
    """Why a strict schema is refused. lost: JSON pointers and keywords."""
    named = ", ".join(str(UnenforcedKeyword(*one)) for one in lost[:MOST_NAMED])
    more = f" and {len(lost) - MOST_NAMED} more" if len(lost) > MOST_NAMED else ""
    return (
        f"The schema is strict, and this server cannot enforce {named}{more}. Leave these keywords"
        " out, or leave `strict` out: then they are ignored."
    )


def _bounded_text(kind: str, text: str) -> str:
    check_outputs({kind: text})
    return schemas.canonical_text(kind, text)


def _json_of(value: Any) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(
            f"{STRUCTURED_OUTPUTS} is not valid JSON: {error}.", STRUCTURED_OUTPUTS
        ) from None


def _adopt(
    outputs: StructuredOutputsParams, tried: Mapping[str, Any], verdict: Mapping[str, Any]
) -> None:
    """Set the fields of `outputs` to what was tried, and what validation made of it."""
    for name, value in {**tried, **verdict["changed"]}.items():
        setattr(outputs, name, value)
    outputs._backend, outputs._backend_was_auto = verdict["backend"], verdict["was_auto"]
    setattr(outputs, TRIED, True)


def validate_structured_outputs(stock: Callable[..., None]) -> Callable[..., None]:
    """Replaces `SamplingParams._validate_structured_outputs`.

    It skips the validation of grammars that have passed their trial.
    """

    @wraps(stock)
    def validate(self: SamplingParams, *args: Any, **kwargs: Any) -> None:
        if not is_tried(self.structured_outputs):
            stock(self, *args, **kwargs)

    return validate
