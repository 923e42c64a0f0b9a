"""Images, audio and video of followers in the engine core, and what the encoder has room for.

The media of followers are taken out of a request before vLLM makes its Request object
(arrivals.py), so that hashes, lengths and the encoder of the leader never see them. The Request has
them as an attribute.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from cfg_core.policy.media_budget import MediaItem, Room
from cfg_core.vllm_plugin import wire

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreRequest

_MEDIA = "cfg_serve_follower_media"


def take(request: EngineCoreRequest) -> dict[int, list[MultiModalFeatureSpec]]:
    """Remove the media of followers from a request, and return them by the follower's number."""
    own, followers = wire.media_of(request.mm_features or ())
    if followers:
        request.mm_features = own or None
    return followers


def give(leader: Request, followers: Mapping[int, list[MultiModalFeatureSpec]]) -> None:
    """Keep with a leader what `take` returned.

    Raises RuntimeError if an item has no data. The request then fails before it is scheduled.
    """
    if followers:
        setattr(leader, _MEDIA, _with_data(leader.mm_features, followers))


def of_follower(leader: Request, index: int) -> list[MultiModalFeatureSpec]:
    """The media of a follower, by its number from 0, in the order of their places."""
    media: Mapping[int, list[MultiModalFeatureSpec]] = getattr(leader, _MEDIA, {})
    return list(media.get(index, ()))


def _with_data(
    own: Sequence[MultiModalFeatureSpec], followers: Mapping[int, list[MultiModalFeatureSpec]]
) -> dict[int, list[MultiModalFeatureSpec]]:
    """The followers' media, with the data that admission did not send twice; may raise (`give`)."""
    everything = [*own, *(feature for features in followers.values() for feature in features)]
    data = {f.mm_hash: f.data for f in everything if f.data is not None}
    if any(feature.mm_hash not in data for feature in everything):
        raise RuntimeError("an image, audio or video of a follower came without its data")
    return {
        number: [replace(feature, data=data[feature.mm_hash]) for feature in features]
        for number, features in followers.items()
    }


def room_of(scheduler: Scheduler) -> Room:
    """What the encoder may compute in the next step, and what its cache has room for."""
    cache = scheduler.encoder_cache_manager
    return Room(scheduler.max_num_encoder_input_tokens, cache.num_freeable_slots)


def items_of(scheduler: Scheduler, request: Request, computed: int) -> tuple[MediaItem, ...]:
    """The media that a stream still reads, and that are not held for a running stream yet.

    computed: number of its tokens that are computed.
    """
    if not request.mm_features:
        return ()
    return tuple(_items(scheduler, request, computed))


def _items(scheduler: Scheduler, request: Request, computed: int) -> Iterable[MediaItem]:
    cached = scheduler.encoder_cache_manager.cached
    for feature in request.mm_features:
        place, name = feature.mm_position, feature.identifier
        if place.offset + place.length <= computed or cached.get(name):
            continue
        size = place.get_num_embeds()
        ahead = computed + scheduler.num_prefill_lookahead
        yield MediaItem(name, max(0, place.offset - ahead), 0 if name in cached else size, size)
