"""The HTTP routes of the encoders."""

# No `from __future__ import annotations`, and the class comes last: see ingress/app.py.

from collections.abc import Mapping
from functools import partial
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from cfg_core.prefill_only.models.checkpoint import ModelInfo
from cfg_core.prefill_only.sizes import TOKEN_CHARS
from deployments.admission.entries import Share
from deployments.http.text_answers import json_answer
from deployments.ingress.app import Routes, app, client_of, tenant_of
from deployments.replica_client.answers import deadline_in, in_time
from deployments.requests.encode.capabilities import EncodeEndpoint, meant_at_root
from deployments.requests.encode.jobs import EncodeJob, check_job, work_of_text
from deployments.requests.encode.readers import read_job
from deployments.requests.encode.tokens import count_of, read_detokenize, read_tokenize
from deployments.requests.streams import num_tokens
from deployments.requests.terms import take_timeout


def share_of(request: Request) -> Share:
    """The tenant of a request, as the queue of an encoder sees it."""
    return Share(tenant=client_of(request), weight=tenant_of(request).weight)


class EncodeRoutes(Routes):
    @app.post("/v1/embeddings")
    async def embeddings(self, request: Request) -> Response:
        """Compute embeddings, in OpenAI's format."""
        return await self._compute("embeddings", request)

    @app.post("/v1/rerank")
    @app.post("/v2/rerank")
    @app.post("/rerank")
    async def rerank(self, request: Request) -> Response:
        """Rank documents for a query, in Cohere's or Jina's format (documents) or TEI's (texts)."""
        return await self._compute("rerank", request)

    @app.post("/v1/score")
    @app.post("/score")
    async def score(self, request: Request) -> Response:
        """Compute a score for each pair of texts, in vLLM's format."""
        return await self._compute("score", request)

    @app.post("/pooling")
    async def pooling(self, request: Request) -> Response:
        """Return whatever the model computes, in vLLM's format."""
        return await self._compute("pooling", request)

    @app.post("/v1/classify")
    @app.post("/classify")
    async def classify(self, request: Request) -> Response:
        """Compute a label for each input, in vLLM's format."""
        return await self._compute("classify", request)

    @app.post("/embed_sparse")
    async def embed_sparse(self, request: Request) -> Response:
        """Compute weights of vocabulary tokens, in TEI's format."""
        return await self._compute("embed_sparse", request)

    @app.post("/v2/embed")
    async def cohere_embed(self, request: Request) -> Response:
        """Compute embeddings of several types, in Cohere's format."""
        return await self._compute("cohere_embed", request)

    @app.post("/embed")
    async def embed(self, request: Request) -> Response:
        """Compute embeddings, in TEI's format."""
        return await self._compute("embed", request)

    @app.post("/embed_all")
    async def embed_all(self, request: Request) -> Response:
        """Compute a vector for each token, in TEI's format."""
        return await self._compute("embed_all", request)

    @app.post("/predict")
    async def predict(self, request: Request) -> Response:
        """Compute the scores of all labels, in TEI's format."""
        return await self._compute("predict", request)

    @app.post("/similarity")
    async def similarity(self, request: Request) -> Response:
        """Compare one sentence with several, in TEI's format."""
        return await self._compute("similarity", request)

    @app.post("/", include_in_schema=False)
    async def at_root(self, request: Request) -> Response:
        """Answer a request to TEI that names no path, as Hugging Face's client sends it."""
        body = await self._bodies.read(request)
        embeds = await self._encoders.can_serve("embed", body.get("model"))
        return await self._compute(meant_at_root(body, embeds), request)

    async def _compute(self, endpoint: EncodeEndpoint, request: Request) -> Response:
        """Check the request, and send all of it to one replica of the encoder that it names."""
        body = await self._bodies.read(request)
        timeout_s = take_timeout(body, request.headers, self._args.admission.default_timeout_s)
        async with in_time(deadline_in(timeout_s)):
            name, info = await self._encoders.choose(endpoint, body.get("model"))
            tenant = tenant_of(request)
            self._gate.allow_model(tenant, name)
            job, estimated, work = await self._bodies.apart(
                request, partial(self._read_job, endpoint, body, name, info)
            )
            share = share_of(request)
            with self._gate.charge(tenant, estimated) as charge:
                computed = await self._encoders.call(
                    name, share, work, "compute", job, share.tenant, share.weight
                )
                charge.settle(computed.num_tokens)
            return json_answer(computed.text)

    def _read_job(
        self, endpoint: EncodeEndpoint, body: Mapping[str, Any], name: str, info: ModelInfo
    ) -> tuple[EncodeJob, int, int]:
        """The job, its estimated tokens and its estimated work; may run in a thread.

        Whatever takes time in proportion to the size of the body is done here.
        """
        job = read_job(endpoint, body, name, info)
        check_job(job, self._encoders.args(name).options)
        return job, job.num_tokens, job.work

    async def _tokenize_with(
        self, encoder: str, body: Mapping[str, Any], request: Request
    ) -> Response:
        """Answer /tokenize for an encoder."""
        asked = read_tokenize(body)
        with self._gate.charge(tenant_of(request), num_tokens(asked.text)) as charge:
            text = await self._encoders.call(
                encoder, share_of(request), work_of_text(len(asked.text)), "tokenize", asked
            )
            charge.settle(count_of(text))
        return json_answer(text)

    async def _detokenize_with(
        self, encoder: str, body: Mapping[str, Any], request: Request
    ) -> Response:
        """Answer /detokenize for an encoder."""
        info = await self._encoders.info(encoder)
        ids = await self._bodies.apart(request, partial(read_detokenize, body, info))
        with self._gate.charge(tenant_of(request), len(ids)) as charge:
            work = work_of_text(TOKEN_CHARS * len(ids))
            text = await self._encoders.call(encoder, share_of(request), work, "detokenize", ids)
            charge.settle(len(ids))
        return json_answer(text)
