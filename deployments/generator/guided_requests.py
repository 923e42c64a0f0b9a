"""Turns a call into the request object of vLLM's serving classes, with the guidance in it.

The guidance waits in PENDING until admission takes it. Its name there travels in the request's
extra arguments (`vllm_xargs`). The negative is rendered here, exactly as vLLM renders a prompt.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from starlette.datastructures import State
from vllm.exceptions import VLLMValidationError
from vllm.v1.engine.async_llm import AsyncLLM

from cfg_core.errors import GuidanceError, RequestError
from cfg_core.logits_processors.config import FIELD as LOGITS_PROCESSORS
from cfg_core.params import FollowerParams, GuidanceParams, TokenIds
from cfg_core.params.fields import NEGATIVE_IDS, NEGATIVE_MESSAGES, SCORE_TOKENS
from cfg_core.vllm_plugin import embeddings
from cfg_core.vllm_plugin.frontend.follower_media import PENDING, PENDING_GUIDANCE
from cfg_core.vllm_plugin.frontend.follower_prompts import largest
from deployments.generator import endpoints
from deployments.generator.media.in_bodies import check_body
from deployments.generator.refusals.engine_errors import checked, own_error
from deployments.generator.refusals.validation import parsed
from deployments.messages import GenerateCall
from deployments.requests.endpoints import BODY_FIELDS, Endpoint, follower_body
from deployments.requests.guidance_fields import Guidance
from deployments.requests.guidance_streams import adapter_of

RESERVED_XARGS = ("kv_transfer_params", "ec_transfer_params", "kv_cache_report_mode")
"""Keys of `vllm_xargs` that vLLM reads for itself, as objects that the server made."""


class PreparedRequest(NamedTuple):
    """What a call becomes: vLLM's request object.

    negative_tokens: the length of its followers' own prompts together.
    has_no_tokens: whether its negative is an empty text of which the tokenizer makes no token.
    pending: names of what its followers have in PENDING. The caller must drop them at the end.
    in_xargs: the guidance that its `vllm_xargs` ask for, which admission reads; None if they do
        not. Our ingress refuses it there.
    """

    request: Any
    negative_tokens: int = 0
    has_no_tokens: bool = False
    pending: Sequence[str] = ()
    in_xargs: Guidance | None = None


class GuidedRequests:
    """Makes vLLM's request objects for one engine.

    state: the state of vLLM's API server.
    """

    def __init__(self, engine: AsyncLLM, state: State) -> None:
        self._engine = engine
        self._state = state

    async def make(self, call: GenerateCall) -> PreparedRequest:
        """Make the request object. Raises RequestError if body or negative cannot be used."""
        body = dict(call.body)
        check_body(call.endpoint, body)
        processors = body.pop(LOGITS_PROCESSORS, None)
        conversation = BODY_FIELDS[call.endpoint].messages
        request: Any = await parsed(endpoints.SERVED[call.endpoint].request, body, conversation)
        xargs: dict[str, Any] = dict(getattr(request, "vllm_xargs", None) or {})
        check_xargs(xargs)
        request.cache_salt = own_salt(request.cache_salt, call.tenant)
        if processors is not None:
            # As text, because vLLM validates these arguments again for some endpoints, and they
            # may hold no objects then.
            is_text = isinstance(processors, str)
            xargs[LOGITS_PROCESSORS] = processors if is_text else json.dumps(processors)
        asked = GuidanceParams.from_fields(xargs)
        in_xargs = None if asked is None else Guidance(params=asked)
        guidance, prepared = call.guidance, PreparedRequest(request, in_xargs=in_xargs)
        if guidance is not None and guidance.enabled:
            self._check_previous(request)
            prompts = _FollowerPrompts(self._engine, self._state, call.endpoint, body)
            prepared = await prompts.prepare(request, guidance)
            xargs[PENDING_GUIDANCE] = prepared.pending[-1]
        elif guidance is not None and guidance.params.score_tokens is not None:
            # Admission checks the number. The scores are vLLM's own.
            xargs[SCORE_TOKENS] = guidance.params.score_tokens
        if xargs:
            request.vllm_xargs = xargs
        return prepared

    def _check_previous(self, request: Any) -> None:
        """Raise NotFoundError for a response to go on from, as vLLM does for a plain request."""
        name = getattr(request, "previous_response_id", None)
        if name is not None:
            checked(self._state.openai_serving_responses._make_not_found_error(name))


class _FollowerPrompts:
    """Makes the prompts of one request's followers, and puts them in PENDING."""

    def __init__(
        self, engine: AsyncLLM, state: State, endpoint: Endpoint, body: dict[str, Any]
    ) -> None:
        self._engine, self._state = engine, state
        self._endpoint, self._body = endpoint, body
        self._pending: list[str] = []

    async def prepare(self, request: Any, guidance: Guidance) -> PreparedRequest:
        """Put the guidance in PENDING, with prompts as token ids. Its own name comes last."""
        try:
            params, lengths, has_no_tokens = await self._params(guidance)
        except BaseException:
            PENDING.drop(self._pending)
            raise
        self._pending.append(PENDING.put(params))
        return PreparedRequest(request, sum(lengths), has_no_tokens, self._pending)

    async def _params(self, guidance: Guidance) -> tuple[GuidanceParams, list[int], bool]:
        """The parameters for admission, the lengths of the prompts, and `has_no_tokens`."""
        params = guidance.params
        if params.has_suffix:  # admission makes its tokens, and counts them
            return params, [], False
        if params.streams is not None:
            followers = [await self._follower(stream) for stream in params.streams]
            lengths = [len(follower.token_ids or ()) for follower in followers]
            return replace(params, streams=tuple(followers)), lengths, False
        ids, media = await self._negative(guidance)
        params = replace(
            params,
            negative_prompt=None,
            negative_prompt_token_ids=ids,
            negative_media=media,
            negative_embeds=None,
        )
        return params, [len(ids or [0])], ids is None and guidance.negative_field is not None

    async def _negative(self, guidance: Guidance) -> tuple[TokenIds | None, str | None]:
        """The negative stream's prompt as token ids, and where its images or embeddings are.

        None for a prompt if the request has none of its own, and for images if it has none.
        """
        field, params = guidance.negative_field, guidance.params
        if field is None:
            return None, None
        return await self._prompt(
            (params.negative_prompt_token_ids or ()) if field == NEGATIVE_IDS else None,
            params.negative_embeds,
            params.negative_prompt,
            lambda: guidance.negative_body(self._endpoint, self._body),
            field,
            NEGATIVE_MESSAGES,
        )

    async def _follower(self, follower: FollowerParams) -> FollowerParams:
        """The same follower with its prompt as token ids, and its adapter as vLLM knows it.

        One without a prompt of its own stays without: admission gives it each leader's prompt.
        """
        where, text, messages = follower.where, follower.prompt, follower.messages
        names = ("token_ids", "prompt_embeds", "prompt", "messages")
        name = next((name for name in names if getattr(follower, name) is not None), None)
        ids, pending = None, None
        if name is not None:
            ids, pending = await self._prompt(
                follower.token_ids,
                follower.prompt_embeds,
                text,
                lambda: follower_body(self._endpoint, self._body, text, messages),
                f"{where}.{name}",
                f"{where}.messages",
            )
            if ids is None:
                raise GuidanceError(
                    f"{where}.prompt is empty and has no tokens for this model: send a text.",
                    f"{where}.prompt",
                )
        models = self._state.openai_serving_models
        lora = adapter_of(follower.lora, where, models.lora_requests, models.is_base_model)
        return replace(
            follower,
            prompt=None,
            messages=None,
            token_ids=ids,
            prompt_embeds=None,
            multi_modal_data=pending,
            lora=lora,
        )

    async def _prompt(
        self,
        ids: Sequence[int] | None,
        embeds: str | None,
        text: str | None,
        body_of: Callable[[], Any],
        field: str,
        conversation: str,
    ) -> tuple[TokenIds | None, str | None]:
        """A follower's prompt as token ids, and its name in PENDING if it has more than these.

        None for an empty text if the tokenizer puts no special tokens around a text.

        body_of: makes the follower's body from the request's own.
        field: what errors name. conversation: the field that can hold the whole conversation.
        """
        if ids is not None:
            return self._checked(TokenIds.of(ids), field), None
        if embeds is not None:
            embedded = embeddings.read(self._engine.model_config, embeds, field)
            return self._pending_prompt({"type": "embeds", "prompt_embeds": embedded}, field)
        if text == "" and self._endpoint == "completion":
            return self._special_tokens(), None
        return self._pending_prompt(await self._rendered(body_of, field, conversation), field)

    def _checked(self, ids: TokenIds, field: str) -> TokenIds:
        """A follower's token ids, if this model has them all and their number fits."""
        try:
            self._engine.renderer.validate_token_ids([largest(ids)])
        except (RequestError, VLLMValidationError) as error:
            raise GuidanceError(f"{field} cannot be used. {own_error(error)}", field) from None
        return self._bounded(ids, field)

    async def _rendered(
        self, body_of: Callable[[], Any], field: str, conversation: str
    ) -> Mapping[str, Any]:
        """What vLLM renders of a follower's body."""
        try:
            own = body_of()
            check_body(self._endpoint, own)
            return await endpoints.render(self._endpoint, self._state, own, conversation)
        except (RequestError, VLLMValidationError) as error:
            # A fault of the request itself is not the negative's: this raises its own error.
            await endpoints.render(self._endpoint, self._state, self._body, conversation)
            raise GuidanceError(f"{field} cannot be used. {own_error(error)}", field) from None

    def _pending_prompt(
        self, rendered: Mapping[str, Any], field: str
    ) -> tuple[TokenIds, str | None]:
        """The token ids of a rendered prompt, and its name in PENDING if it has more than these.

        The places of embeddings have the token 0, which nothing reads.
        """
        if rendered["type"] == "embeds":
            ids = self._bounded(TokenIds(bytes(4 * len(rendered["prompt_embeds"]))), field)
        else:
            ids = self._bounded(TokenIds.of(rendered["prompt_token_ids"]), field)
        if rendered["type"] == "token":
            return ids, None
        self._pending.append(PENDING.put(rendered))
        return ids, self._pending[-1]

    def _bounded(self, ids: TokenIds, field: str) -> TokenIds:
        limit = self._engine.model_config.max_model_len - 1  # leaves room for one output token
        if not 0 < len(ids) <= limit:
            raise GuidanceError(
                f"{field} has {len(ids)} tokens: this model takes 1 to {limit}.", field
            )
        return ids

    def _special_tokens(self) -> TokenIds | None:
        """The tokens of an empty text, which vLLM refuses to render; None if there are none."""
        tokenizer = self._engine.renderer.get_tokenizer()
        add = self._body.get("add_special_tokens", True)
        ids = tokenizer.encode("", add_special_tokens=add)
        return TokenIds.of(ids) if ids else None


def own_salt(salt: str | None, tenant: str | None) -> str | None:
    """The cache salt of a request, with which a tenant finds the KV of its own requests alone.

    Otherwise it could tell from timings what others have sent.

    tenant: None if prefixes are shared.
    """
    if tenant is None:
        return salt
    return hashlib.sha256(f"{tenant}\0{salt or ''}".encode()).hexdigest()


def check_xargs(xargs: Mapping[str, Any] | None) -> None:
    """Raise RequestError if `vllm_xargs` holds what vLLM reads for itself."""
    for name in RESERVED_XARGS:
        if name in (xargs or ()):
            raise RequestError(f"vllm_xargs must not contain {name}: leave it out.", "vllm_xargs")
