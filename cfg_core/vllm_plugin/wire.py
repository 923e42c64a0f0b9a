"""What the processes of an engine send each other about guidance, in addition to vLLM's data.

    frontend -> scheduler   images, audio and video of followers                    with_media
    scheduler -> workers    which rows are blended, and which samples are dropped   StepGuidance
    workers -> scheduler    whose logits processors failed                          failures_of
    workers -> scheduler    how strongly tokens were guided                         strengths_of
    scheduler -> frontend   how many tokens of an output were guided                guided_tokens
    scheduler -> frontend   how strongly                                            token_strengths
    scheduler -> frontend   when the followers ran, in traced engines               follower_events
    workers -> frontend     the streams' own logprobs, as columns of vLLM's         StreamColumns

The media of followers are behind the leader's in `EngineCoreRequest.mm_features`, which vLLM
sends. The next three are extra attributes of vLLM's SchedulerOutput and ModelRunnerOutput, and are
pickled with them. The three after these are in the field `kv_transfer_params` of vLLM's
EngineCoreOutput, because that class has no field for extensions. The field is free: an engine with
KV connectors guides nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from cfg_core.logits_processors.sequences import ProcessorFailure
from cfg_core.policy.groups import Group

if TYPE_CHECKING:
    from vllm.multimodal.inputs import MultiModalFeatureSpec
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput

_GUIDANCE = "cfg_serve_guidance"
_FAILURES = "cfg_serve_failures"
_STRENGTHS = "cfg_serve_strengths"
_GUIDED_TOKENS = "cfg_serve_guided_tokens"
_FOLLOWER_EVENTS = "cfg_serve_follower_events"

FollowerEvent: TypeAlias = tuple[int, str, float]
"""Which follower (from 0), what (`queued`, `scheduled`, `preempted`, `prompt_tokens`,
`cached_tokens`), and when, by the monotonic clock, or how many."""


# --- frontend to scheduler ------------------------------------------------------------------------

_FOLLOWERS = 1 << 40
"""Added to the places of media of followers, once for each follower. No prompt is as long."""


def with_media(
    own: Sequence[MultiModalFeatureSpec], followers: Iterable[Sequence[MultiModalFeatureSpec]]
) -> list[MultiModalFeatureSpec]:
    """The media of a leader, and behind them those of its followers, marked with their numbers."""
    marked = (
        _moved(feature, (1 + i) * _FOLLOWERS)
        for i, features in enumerate(followers)
        for feature in features
    )
    return [*own, *marked]


def media_of(
    features: Sequence[MultiModalFeatureSpec],
) -> tuple[list[MultiModalFeatureSpec], dict[int, list[MultiModalFeatureSpec]]]:
    """The inverse of `with_media`: a leader's media, and those of its followers by number."""
    own: list[MultiModalFeatureSpec] = []
    followers: dict[int, list[MultiModalFeatureSpec]] = {}
    for feature in features:
        number, place = divmod(feature.mm_position.offset, _FOLLOWERS)
        if number:
            moved = _moved(feature, place - feature.mm_position.offset)
            followers.setdefault(number - 1, []).append(moved)
        else:
            own.append(feature)
    return own, followers


def _moved(feature: MultiModalFeatureSpec, by: int) -> MultiModalFeatureSpec:
    place = feature.mm_position
    return replace(feature, mm_position=replace(place, offset=place.offset + by))


# --- scheduler to workers -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Scoring:
    """The scores that one group wants of a step, which is its first joint step.

    tokens: the scored tokens, which end the prompts of all its streams.
    top: see `cfg_core.params.Scored`.
    """

    tokens: tuple[int, ...]
    top: int


@dataclass(frozen=True, slots=True)
class ScoredRead:
    """Rows of hidden states that predict scored tokens, among those that a stream computes.

    skip: rows of the stream in this step before the first of them.
    first: which of the scored tokens the first of them predicts, from 0.
    count: how many there are.
    """

    stream: str
    skip: int
    first: int
    count: int


class JointRow(NamedTuple):
    """One group of a joint step, or the leader of one in a probe.

    weights: those of this step, one for each stream or suffix; they sum to 1.
    scoring: None if no scores are wanted of this step.
    probe: whether the leader runs without its suffix, so that its samples count only up to where
        its gate is open (core/gates.py).
    """

    group: Group
    weights: tuple[float, ...]
    scoring: Scoring | None = None
    probe: bool = False

    @property
    def streams(self) -> tuple[str, ...]:
        """All stream ids, leader first."""
        return self.group.streams

    @property
    def suffix(self) -> tuple[int, ...]:
        """The suffix whose row is blended; empty if there is none."""
        return () if self.probe else self.group.suffix

    @property
    def blended(self) -> tuple[str, ...]:
        """What each weight is of. In a probe, the leader is its own negative."""
        return 2 * self.streams if self.probe else self.group.blended


class SuffixTokens(NamedTuple):
    """The last tokens that a leader computes in a step: its suffix, or the beginning of it."""

    leader: str
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepGuidance:
    """What the workers must know about the groups of one step.

    joint: the groups that sample in this step, and the leaders that probe their gates.
    solo: streams whose sample is taken back.
    drafter_rests: whether the drafter need not read this step's tokens.
    reads: hidden states of this step that scores need, now or in a later step.
    suffixes: of the joint groups that have one, and the beginnings of those that are not joint.
    """

    joint: tuple[JointRow, ...]
    solo: tuple[str, ...]
    drafter_rests: bool = False
    reads: tuple[ScoredRead, ...] = ()
    suffixes: tuple[SuffixTokens, ...] = ()

    @property
    def scores(self) -> bool:
        """Whether this step does anything for scores."""
        return bool(self.reads) or any(row.scoring is not None for row in self.joint)

    @staticmethod
    def of(scheduler_output: SchedulerOutput) -> StepGuidance | None:
        """The guidance of a step; None if no stream of a group samples or reads scored tokens."""
        return getattr(scheduler_output, _GUIDANCE, None)


def attach(scheduler_output: SchedulerOutput, guidance: StepGuidance) -> None:
    """Send `guidance` along with `scheduler_output`."""
    setattr(scheduler_output, _GUIDANCE, guidance)


# --- workers to scheduler -------------------------------------------------------------------------


DROPPED = 2.0
"""In place of the strength of a probe's row: its gate is open, so the row's sample was dropped."""


class Strengths(NamedTuple):
    """How strongly the tokens of a step were guided, in groups with limits or a rule.

    values: [2, rows] float32, of the step's rows of logits: how much of the push limits have left,
        and the strength that is shown, which with a rule is the scale that was used.
    rows: the rows of each leader among them, by its id.
    """

    values: np.ndarray
    rows: dict[str, slice]


def attach_strengths(model_runner_output: ModelRunnerOutput, strengths: Strengths) -> None:
    """Send `strengths` along with the output of a step."""
    setattr(model_runner_output, _STRENGTHS, strengths)


def strengths_of(model_runner_output: ModelRunnerOutput) -> Mapping[str, np.ndarray]:
    """The strengths [2, n] of a step's rows, by leader. Rows of rejected drafts are among them."""
    found: Strengths | None = getattr(model_runner_output, _STRENGTHS, None)
    if found is None:
        return {}
    return {leader: found.values[:, rows] for leader, rows in found.rows.items()}


def num_sampled(model_runner_output: ModelRunnerOutput, stream: str) -> int:
    """How many tokens a stream got in a step, accepted drafts included."""
    place = model_runner_output.req_id_to_index[stream]
    return len(model_runner_output.sampled_token_ids[place])


def attach_failures(
    model_runner_output: ModelRunnerOutput, failures: dict[str, ProcessorFailure]
) -> None:
    """Send `failures`, by request id, along with the output of a step."""
    setattr(model_runner_output, _FAILURES, failures)


def failures_of(model_runner_output: ModelRunnerOutput) -> dict[str, str]:
    """The requests that failed in a step, each with the reason.

    A processor's failure on a row counts only if a token was sampled from that row.
    """
    failures: dict[str, ProcessorFailure] = getattr(model_runner_output, _FAILURES, {})
    place_of, sampled = model_runner_output.req_id_to_index, model_runner_output.sampled_token_ids
    return {
        name: failure.reason
        for name, failure in failures.items()
        if len(sampled[place_of[name]]) > failure.row
    }


# --- scheduler to frontend ------------------------------------------------------------------------


@functools.lru_cache(maxsize=64)
def _marked(num_tokens: int) -> dict[str, Any]:
    """The mark for `num_tokens`. Outputs share the dict, so it must not be changed."""
    return {_GUIDED_TOKENS: num_tokens}


class GuidedCounts(NamedTuple):
    """Tokens of joint steps; and of these, of requests with limits or a rule, those of which limits
    have left all of the push, and nothing of it."""

    tokens: int = 0
    full_strength: int = 0
    gate_closed: int = 0


def mark_guided_tokens(
    guidance: StepGuidance | None,
    outputs: Iterable[EngineCoreOutput],
    strengths: Mapping[str, np.ndarray],
) -> GuidedCounts:
    """Note in each output of a joint group how many tokens it brings, accepted drafts included.

    strengths: of the rows of groups with limits or a rule, by leader. Those of the tokens are
        noted, too.

    Returns how many tokens they are together.
    """
    if guidance is None:
        return GuidedCounts()
    total, full, closed, rows = 0, 0, 0, {row.streams[0]: row for row in guidance.joint}
    for output in outputs:
        if output.new_token_ids and output.request_id in rows:
            count = len(output.new_token_ids)
            marked = _marked(count)
            if output.request_id in strengths:
                own = strengths[output.request_id][:, :count].tolist()
                if _is_idle_rule(rows[output.request_id]):
                    own[1] = [1.0] * count
                marked = {**marked, _STRENGTHS: own}
                full, closed = full + own[0].count(1.0), closed + own[0].count(0.0)
            output.kv_transfer_params = marked
            total += count
    return GuidedCounts(total, full, closed)


def _is_idle_rule(row: JointRow) -> bool:
    """Whether a rule would have computed the scale of a row that is guided at scale 1."""
    return row.probe and row.group.strength is not None and row.group.strength.rule is not None


def guided_tokens(output: EngineCoreOutput) -> int:
    """How many tokens of `output` came from joint steps."""
    marked = output.kv_transfer_params
    return int(marked.get(_GUIDED_TOKENS, 0)) if marked else 0


def token_strengths(output: EngineCoreOutput) -> tuple[list[float], list[float]]:
    """How strongly the tokens of `output` were guided: what limits have left, and what is shown.

    Both are empty for a request without limits and without a rule.
    """
    marked = output.kv_transfer_params
    left, shown = marked.get(_STRENGTHS, ((), ())) if marked else ((), ())
    return list(left), list(shown)


def mark_follower_events(output: EngineCoreOutput, events: Sequence[FollowerEvent]) -> None:
    """Note in the output of a leader what happened to its followers.

    The output must be marked with its guided tokens already; otherwise nothing is noted, because
    the field may be vLLM's.
    """
    marked = output.kv_transfer_params
    if marked and _GUIDED_TOKENS in marked:
        output.kv_transfer_params = {**marked, _FOLLOWER_EVENTS: list(events)}


def follower_events(output: EngineCoreOutput) -> list[FollowerEvent]:
    """What happened to the followers of a leader since its last output."""
    marked = output.kv_transfer_params
    return list(marked.get(_FOLLOWER_EVENTS, ())) if marked else []


def take_guided_tokens(output: EngineCoreOutput) -> None:
    """Remove the count, and what else we sent with it, from `output`."""
    if output.kv_transfer_params is not None and _GUIDED_TOKENS in output.kv_transfer_params:
        output.kv_transfer_params = None


# --- workers to frontend --------------------------------------------------------------------------


class StreamColumns(NamedTuple):
    """Columns that show a group's streams, after the columns of vLLM's own logprobs.

    The first holds the divergence of the blend, and the second its strength. Then each stream has
    a block, the leader's first: its log-probability of the sampled token, and its `top` most likely
    tokens in descending order.

    streams: 0 if nothing is shown.
    """

    streams: int = 0
    top: int = 0

    @property
    def width(self) -> int:
        """The number of columns."""
        return 2 + self.streams * (1 + self.top) if self.streams else 0

    def block(self, stream: int) -> range:
        """The columns of a stream."""
        first = 2 + stream * (1 + self.top)
        return range(first, first + 1 + self.top)

    def places_of(self, asked: StreamColumns) -> list[int]:
        """Where these columns have those of `asked`, which has no more streams, nor tokens."""
        blocks = (self.block(stream)[: 1 + asked.top] for stream in range(asked.streams))
        return [0, 1, *(column for block in blocks for column in block)] if asked.streams else []


def columns_of(joint: Sequence[JointRow]) -> StreamColumns:
    """The columns that the workers add to vLLM's logprobs in a step.

    They have room for the largest group of the step. A smaller group fills its last blocks with
    repeats.
    """
    asked = (row.group.logprobs for row in joint)
    top = max((top for top in asked if top is not None), default=None)
    if top is None:
        return StreamColumns()
    return StreamColumns(max(len(row.weights) for row in joint), top)


def narrowed(lists: LogprobsLists, width: int) -> LogprobsLists:
    """The first `width` columns of logprobs."""
    return lists._replace(
        logprob_token_ids=lists.logprob_token_ids[:, :width], logprobs=lists.logprobs[:, :width]
    )


def picked(lists: LogprobsLists, columns: Sequence[int]) -> LogprobsLists:
    """These columns of logprobs."""
    return lists._replace(
        logprob_token_ids=lists.logprob_token_ids[:, columns], logprobs=lists.logprobs[:, columns]
    )


def widened(lists: LogprobsLists, columns: int) -> LogprobsLists:
    """Logprobs with `columns` more that say: not guided (NaN)."""
    ids, values = lists.logprob_token_ids, lists.logprobs
    more = np.full((len(values), columns), np.nan, dtype=values.dtype)
    return lists._replace(
        logprob_token_ids=np.concatenate([ids, ids[:, :1].repeat(columns, 1)], 1),
        logprobs=np.concatenate([values, more], 1),
    )
