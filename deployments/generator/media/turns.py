"""Images and videos are prepared in pieces, one request of a client at a time.

vLLM prepares all media of a request at once (scales them, cuts them, makes floats of them), in one
thread for all requests, first come, first served. It must be one thread, because its cache of media
needs an order. So images of others would wait for all images of a request, and for all requests of
one client. Here they wait for one piece of each client.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
from PIL import Image
from typing_extensions import override
from vllm.multimodal.cache import BaseMultiModalProcessorCache
from vllm.multimodal.parse import parse_mm_uuids
from vllm.multimodal.processing import BaseMultiModalProcessor
from vllm.multimodal.processing.context import TimingContext
from vllm.multimodal.processing.inputs import ProcessorInputs
from vllm.renderers.base import BaseRenderer
from vllm.utils.async_utils import make_async
from vllm.utils.cache import CacheInfo
from vllm.utils.torch_utils import set_default_torch_num_threads

from deployments.generator.media.memory import current_share, owner_of

PIECE_VALUES = 24_000_000
"""Values (pixels times colours) that are prepared at once, if one item does not have more.

Eight million pixels take 0.1 s on one core.
"""

KINDS = ("image", "video")
"""What is cut into pieces. vLLM resamples audio before it asks its cache, so each piece would cost
again."""

Media = Mapping[str, Any]
"""Items by kind, as vLLM's `multi_modal_data` has them."""

Item = tuple[Any, Sequence[Any]]
"""A prepared item as vLLM's cache has it: its tensors, and what they change in the prompt."""


class PreparedCache(BaseMultiModalProcessorCache):  # type: ignore[misc]  # vLLM is not typed
    """vLLM's cache of media, and before it what is prepared of one request but not sent yet.

    vLLM's cache says what the engine has, in the engine's order. So the items of a request enter it
    when the whole request is rendered.
    """

    def __init__(self, sent: BaseMultiModalProcessorCache) -> None:
        self._sent = sent
        self._prepared: dict[str, Item] = {}
        self._is_preparing = False

    @contextmanager
    def having(self, prepared: dict[str, Item], *, is_preparing: bool) -> Iterator[None]:
        """Know these items. Used in the one thread that prepares media.

        is_preparing: add new items to them, and leave vLLM's cache as it is.
        """
        self._prepared, self._is_preparing = prepared, is_preparing
        try:
            yield
        finally:
            self._prepared, self._is_preparing = {}, False

    @override
    def is_cached_item(self, mm_hash: str) -> bool:
        return mm_hash in self._prepared or self._sent.is_cached_item(mm_hash)

    @override
    def get_and_update_item(self, mm_item: Item | None, mm_hash: str) -> tuple[Any, Sequence[Any]]:
        item = mm_item or self._prepared.get(mm_hash)
        if not self._is_preparing:
            sent: tuple[Any, Sequence[Any]] = self._sent.get_and_update_item(item, mm_hash)
            return sent
        if item is None:
            return None, ()  # the engine has it
        self._prepared[mm_hash] = item
        return item

    @override
    def touch_sender_cache_item(self, mm_hash: str) -> None:
        if not self._is_preparing:
            self._sent.touch_sender_cache_item(mm_hash)

    @override
    def release_sender_touches(self) -> None:
        self._sent.release_sender_touches()

    @override
    def clear_cache(self) -> None:
        self._sent.clear_cache()

    @override
    def invalidate(self, mm_hash: str) -> None:
        self._sent.invalidate(mm_hash)

    @override
    def validate_input_item(self, mm_item: Any, mm_hash: str) -> None:
        self._sent.validate_input_item(mm_item, mm_hash)

    @override
    def make_stats(self, *, delta: bool = False) -> CacheInfo:
        return self._sent.make_stats(delta=delta)

    @override
    def close(self) -> None:
        self._sent.close()


class MediaTurns:
    """Stands in for a renderer's `_process_multimodal_async`, with its arguments and result.

    caches: of a request, by its `skip_mm_cache`. Without one, its media are prepared at once.
    """

    def __init__(self, renderer: BaseRenderer, caches: Mapping[bool, PreparedCache]) -> None:
        self._renderer = renderer
        self._processor = renderer.get_mm_processor()
        self._caches = caches
        self._prepare_async = make_async(self._prepare, executor=renderer._mm_executor)
        self._finish_async = make_async(self._finish, executor=renderer._mm_executor)
        self._at_once_async = renderer._process_multimodal_async

    async def __call__(
        self,
        prompt: list[int],
        mm_data: Media,
        mm_uuids: Media | None = None,
        mm_processor_kwargs: Mapping[str, object] | None = None,
        media_io_kwargs: Mapping[str, Any] | None = None,
        *,
        skip_mm_cache: bool = False,
    ) -> Any:
        whole = (prompt, mm_data, mm_uuids, mm_processor_kwargs, media_io_kwargs)
        cache = self._caches.get(skip_mm_cache)
        async with current_share().client.preparing:
            pieces = [] if cache is None else list(self._pieces(mm_data, parse_mm_uuids(mm_uuids)))
            if cache is None or not pieces:
                return await self._at_once_async(*whole, skip_mm_cache=skip_mm_cache)
            prepared: dict[str, Item] = {}
            for data, uuids in pieces:
                piece = (prompt, data, uuids, mm_processor_kwargs, media_io_kwargs)
                await self._prepare_async(prepared, cache, *piece)
            return await self._finish_async(prepared, cache, *whole, skip_mm_cache=skip_mm_cache)

    def _pieces(self, data: Media, uuids: Media) -> Iterator[tuple[Media, Media]]:
        """The pieces of a request, each with its identifiers; none if it is one piece.

        Raises ValueError for more items than the model takes.
        """
        for kind in KINDS:
            if isinstance(given := data.get(kind), list):
                self._processor.info.validate_num_items(kind, len(given))
                for part in cuts([num_values(item) for item in given]):
                    yield {kind: given[part]}, {kind: uuids[kind][part]} if kind in uuids else {}

    def _prepare(
        self,
        prepared: dict[str, Item],
        cache: PreparedCache,
        prompt: list[int],
        data: Media,
        uuids: Media,
        processor_kwargs: Mapping[str, object] | None,
        io_kwargs: Mapping[str, Any] | None,
    ) -> None:
        inputs = ProcessorInputs(
            prompt,
            self._processor.info.parse_mm_data(data),
            uuids,
            hf_processor_mm_kwargs=processor_kwargs or {},
            media_io_kwargs=io_kwargs or {},
            cache=cache,
        )
        with cache.having(prepared, is_preparing=True), set_default_torch_num_threads():
            self._processor._cached_apply_hf_processor(inputs, TimingContext(enabled=False))

    def _finish(
        self, prepared: dict[str, Item], cache: PreparedCache, *whole: Any, skip_mm_cache: bool
    ) -> Any:
        with cache.having(prepared, is_preparing=False):
            return self._renderer._process_multimodal(*whole, skip_mm_cache=skip_mm_cache)


def cuts(sizes: Sequence[int]) -> Iterator[slice]:
    """Cut items of these numbers of values into pieces; nothing if they are one piece."""
    ends, total = [0], 0
    for index, size in enumerate(sizes):
        if total and total + size > PIECE_VALUES:
            ends.append(index)
            total = 0
        total += size
    if len(ends) > 1:
        yield from (slice(*piece) for piece in pairwise([*ends, len(sizes)]))


def num_values(item: Any) -> int:
    """Pixels times colours of an image or a video; 0 of what is neither, such as embeddings."""
    media = owner_of(item)
    if isinstance(media, Image.Image):
        return media.width * media.height * len(media.getbands())
    return media.size if isinstance(media, np.ndarray) else 0


def take_turns(renderer: BaseRenderer) -> None:
    """Make `renderer` prepare media in turns.

    All of a request is one piece for a model whose items depend on each other, or without a cache.
    """
    if renderer.mm_processor is None:
        return
    caches = {}
    usual = BaseMultiModalProcessor._cached_apply_hf_processor
    is_usual = type(renderer.mm_processor)._cached_apply_hf_processor is usual
    if is_usual and renderer._mm_processor_cache and renderer._mm_processor_only_cache:
        renderer._mm_processor_cache = PreparedCache(renderer._mm_processor_cache)
        renderer._mm_processor_only_cache = PreparedCache(renderer._mm_processor_only_cache)
        caches = {False: renderer._mm_processor_cache, True: renderer._mm_processor_only_cache}
    renderer._process_multimodal_async = MediaTurns(renderer, caches)
