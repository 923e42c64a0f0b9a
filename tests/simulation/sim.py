"""The real GuidedScheduler and KV cache manager, driven by a fake model runner.

For every slot of every physical KV block, the fake runner records *which prefix* was written there.
For each sampled row, it checks that the stream's block table holds exactly its own prefix. So it
finds a lost block, a block that was allocated twice, a token computed at the wrong place, or a
stream out of lockstep at once, without the cost of a model. It follows the protocols of both
runners, with async scheduling and pipeline stages: see `PATHS`.

    python -m tests.simulation --joint-steps 1000000     a long run
    python -m tests.simulation --paths states            only with states, which nothing can undo
    python -m tests.simulation --seed 7 --path v2-async  replays one
"""

from __future__ import annotations

import itertools
import os
import random
import zlib
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from transformers import LlamaConfig
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import (
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
)
from vllm.v1.outputs import (
    EMPTY_MODEL_RUNNER_OUTPUT,
    DraftTokenIds,
    LogprobsTensors,
    ModelRunnerOutput,
)
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from cfg_core.params import GuidanceParams, ResolvedFollower, ResolvedGuidance, TokenIds
from cfg_core.params.begun import BEGUN
from cfg_core.policy.groups import FOLLOWER_SUFFIX
from cfg_core.policy.pool import EVEN
from cfg_core.vllm_plugin import config, guided_engine_args
from cfg_core.vllm_plugin.core import grammar_manager
from cfg_core.vllm_plugin.core.gates import PROBE_WEIGHTS
from cfg_core.vllm_plugin.wire import (
    JointRow,
    StepGuidance,
    Strengths,
    attach_strengths,
    guided_tokens,
    token_strengths,
)
from cfg_core.vllm_plugin.worker import gates
from cfg_core.vllm_plugin.worker.scoring import Scorer
from tests.support.fixed_cost import FixedCost

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

VOCAB = 256
GARBAGE = 3  # a draft that is always wrong
MOST_TOKENS = 40  # no output is as long


class EnginePath(NamedTuple):
    """A path through vLLM: which runner's protocol, async scheduling, pipeline stages."""

    v2: bool = False
    asynchronous: bool = False
    stages: int = 1
    drafts: int = 0
    states: str = ""
    """Recurrent states beside attention: vLLM's `mamba_cache_mode`; empty for none."""

    @property
    def name(self) -> str:
        words = [
            "v2" if self.v2 else "v1",
            *["async"] * self.asynchronous,
            *[f"pp{self.stages}"] * (self.stages > 1),
            *[f"drafts{self.drafts}"] * (self.drafts > 0),
            *[f"states-{self.states}"] * bool(self.states),
        ]
        return "-".join(words)


V1 = EnginePath()
PATHS = [
    V1,
    EnginePath(asynchronous=True),
    EnginePath(stages=2),  # vLLM has no async scheduling on V1 with a pipeline
    *(
        EnginePath(True, asynchronous, stages)
        for asynchronous in (False, True)
        for stages in (1, 2, 4)
    ),
    *(
        EnginePath(v2, asynchronous, drafts=3)
        for v2 in (False, True)
        for asynchronous in (False, True)
    ),
    *(
        EnginePath(v2, asynchronous, stages, states=states)
        for states in ("none", "align")
        for v2, asynchronous, stages in (
            (False, False, 1),
            (False, True, 1),
            (False, False, 2),
            (True, False, 1),
            (True, True, 1),
            (True, True, 4),
        )
    ),
]


def model_token(leader: str, index: int) -> int:
    """The token that the guided model samples as output `index` of this leader."""
    return 4 + zlib.crc32(f"{leader}:{index}".encode()) % 250


def make_config(
    folder: Path, kv_split: str = "elastic", drafts: int = 0, **engine_args: Any
) -> VllmConfig:
    """A VllmConfig of a model that is never loaded."""
    if not (folder / "config.json").exists():
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=64,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=2,
            architectures=["LlamaForCausalLM"],
            max_position_embeddings=512,
            dtype="float32",
        ).save_pretrained(folder)
    if drafts:
        engine_args["speculative_config"] = {
            "method": "draft_model",
            "model": str(folder),
            "num_speculative_tokens": drafts,
        }
    defaults = {
        "max_model_len": 256,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 64,
        "block_size": 16,
    }
    return EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        enforce_eager=True,
        kv_cache_memory_bytes=1 << 26,
        **{**defaults, **engine_args, **guided_engine_args(kv_split)},
    ).create_engine_config()


@contextmanager
def runner_version(v2: bool) -> Iterator[None]:
    """While open, every new VllmConfig is made for this runner.

    A config that is made for the other runner is not possible on a CPU.
    """
    before = os.environ.get("VLLM_USE_V2_MODEL_RUNNER")
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(int(v2))
    try:
        yield
    finally:
        del os.environ["VLLM_USE_V2_MODEL_RUNNER"]
        if before is not None:
            os.environ["VLLM_USE_V2_MODEL_RUNNER"] = before


@dataclass
class Sequence:
    """A stream as a worker knows it.

    The worker knows what the scheduler sent, and what it sampled itself.
    """

    tokens: list[int]
    num_prompt: int
    computed: int
    blocks: list[int]
    prefixes: list[int] = field(default_factory=list)
    known: int = 0  # tokens that the scheduler has sent; V1 has later ones on the device only
    sampled_at: int = -1_000
    drafts: list[int] = field(default_factory=list)
    rejected: int = 0  # tokens rejected on the device; not yet known to the scheduler
    lives: int = 0  # how often it was preempted and resumed
    states: list[int] = field(default_factory=list)  # blocks of its recurrent state
    state_at: int | None = None  # the entry of `states` that has its current state
    in_vain: int = 0  # open probes since its last token

    def prefix(self, position: int) -> int:
        """A number that stands for all tokens up to `position`."""
        while len(self.prefixes) <= position:
            last = self.prefixes[-1] if self.prefixes else 0
            token = self.tokens[len(self.prefixes)]
            self.prefixes.append(zlib.crc32(token.to_bytes(4, "little"), last))
        return self.prefixes[position]


@dataclass(frozen=True)
class Rules:
    """What must hold for the tokens of one guided request, as the request said it.

    scales: (first token, scale) of a pair; empty with `weights`.
    weights: one for each follower.
    lengths: tokens of the followers' own prompts, with those that are scored.
    scored: tokens at the end of all prompts that are scored.
    opens: for each output token, whether markers allow to guide it; None without markers.
    since: for each output token, how many of those before it the followers do not have.
    suffix: the tokens behind which the leader is its own negative; it has no followers then.
    gates: for each output token, whether its gate is open; None without gates.
    """

    lengths: tuple[int, ...]
    weights: tuple[float, ...] = ()
    scales: tuple[tuple[int, float], ...] = ()
    start: int = 0
    end: int = 1_000_000
    scored: int = 0
    opens: tuple[bool, ...] | None = None
    since: tuple[int, ...] | None = None
    suffix: tuple[int, ...] = ()
    gates: tuple[bool, ...] | None = None

    def guides(self, token: int) -> bool:
        is_open = self.opens is None or self.opens[token]
        return is_open and self.start <= token < self.end

    def before_followers(self, token: int) -> int:
        return 0 if self.since is None else self.since[token]

    def weights_at(self, token: int) -> tuple[float, ...]:
        if self.weights:
            return (1.0 - sum(self.weights), *self.weights)
        scale = [scale for first, scale in self.scales if first <= token][-1]
        return (scale, 1 - scale)


def random_gates(leader: str, percent: int) -> tuple[bool, ...]:
    """Gates of which so many are open, mostly in runs."""
    runs = (zlib.crc32(f"{leader}|{index // 3}".encode()) for index in range(MOST_TOKENS))
    lone = (zlib.crc32(f"{leader}!{index}".encode()) for index in range(MOST_TOKENS))
    return tuple((a if b % 4 else b // 4) % 100 < percent for a, b in zip(runs, lone, strict=True))


def between_markers(
    leader: str, prompt: list[int], start: int, end: int, restart: bool
) -> tuple[tuple[bool, ...], tuple[int, ...]]:
    """`opens` and `since` of a text, from its definition: token by token over the whole text."""
    opens, since = [], []
    for index in range(MOST_TOKENS):
        text = [*prompt, *(model_token(leader, i) for i in range(index))]
        starts = [i for i, token in enumerate(text) if token == start]
        ends = [i for i, token in enumerate(text) if token == end]
        opens.append(bool(starts) and max(starts) > max(ends, default=-1))
        in_output = [i + 1 - len(prompt) for i in starts if i >= len(prompt)]
        since.append(max(in_output, default=0) if restart else 0)
    return tuple(opens), tuple(since)


Rejection = tuple[str, Sequence, int, int]
"""Stream, its sequence and lives at that time, and how many tokens were rejected."""


@dataclass
class FakeRunner:
    """Does what vLLM's workers do with a step, on V1 or V2.

    It keeps block tables, writes KV, samples, and blends (here: copies). As a worker, it sees only
    the SchedulerOutput. On V2, the first pipeline stages get a sample as many steps later as there
    are stages. Its stream must not be scheduled before.
    """

    block_size: int
    path: EnginePath
    rejections: list[Rejection] = field(default_factory=list)
    rules: dict[str, Rules] = field(default_factory=dict)
    kv: dict[int, list[int]] = field(default_factory=dict)
    states: dict[int, int] = field(default_factory=dict)
    """The prefix that the state in each block stands for. Nothing can undo a state."""
    sequences: dict[str, Sequence] = field(default_factory=dict)
    suffixes: dict[str, list[int]] = field(default_factory=dict)
    """The suffix, or the beginning of it, that each leader computes in the step."""
    hidden: dict[str, list[int]] = field(default_factory=dict)
    """Hidden states of the step, for each stream: the prefixes that they stand for."""
    scorer: Scorer = field(default_factory=Scorer)
    step: int = 0
    saved: int = 0
    """Tokens of suffixes that were not computed for a token."""
    probes: gates.ProbesV1 = field(default_factory=gates.ProbesV1)
    blind: set[str] = field(default_factory=set)
    """On V1, the leaders that probe behind an open probe. They have no token to begin with."""

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        self.step += 1
        self.scorer.forget(output.finished_req_ids)
        self.probes.forget(output.finished_req_ids)
        for stream in output.finished_req_ids:
            self.sequences.pop(stream, None)
        for new in output.scheduled_new_reqs:
            self._add(new)
        self._update(output.scheduled_cached_reqs)
        guidance = StepGuidance.of(output) or StepGuidance((), ())
        self._take_drafts(output)
        self.suffixes = {leader: list(tokens) for leader, tokens in guidance.suffixes}
        self.hidden, batch = {}, list(output.num_scheduled_tokens)
        self.blind = {batch[place] for place in self.probes.blind_places(guidance, batch)}
        ends = {s: self._compute(s, n) for s, n in output.num_scheduled_tokens.items()}
        scores = self._score(guidance)
        self.rejections = []
        strengths = self._strengths(guidance, batch)
        sampled = self._sample(guidance, ends, self._dropped(guidance, batch, strengths))
        self._propose(guidance, ends)
        made = ModelRunnerOutput(
            req_ids=list(ends),
            req_id_to_index={r: i for i, r in enumerate(ends)},
            sampled_token_ids=sampled,
            prompt_logprobs_dict=scores,
        )
        gated = [r.streams[0] for r in guidance.joint if r.group.strength is not None]
        places = {leader: batch.index(leader) for leader in gated}
        rows = {leader: slice(place, place + 1) for leader, place in places.items()}
        attach_strengths(made, Strengths(strengths.numpy(), rows))
        return made

    def _strengths(self, guidance: StepGuidance, batch: list[str]) -> torch.Tensor:
        """[2, batch]: 0 for leaders whose gate is closed, and for the rows of blind probes."""
        strengths = torch.ones(2, len(batch))
        for leader in (row.streams[0] for row in guidance.joint):
            rules = self.rules[leader]
            is_closed = rules.gates is not None and not rules.gates[self._num_outputs(leader)]
            if is_closed or leader in self.blind:
                strengths[:, batch.index(leader)] = 0
        return strengths

    def _dropped(
        self, guidance: StepGuidance, batch: list[str], strengths: torch.Tensor
    ) -> set[str]:
        """The leaders whose probes the workers' own code drops."""
        if not self.path.v2:
            return {batch[place] for place in self.probes.dropped(guidance, batch, strengths)}
        sampled = torch.ones(len(batch), dtype=torch.int32)
        gates.drop_open(guidance, batch, strengths, sampled, torch.zeros_like(sampled))
        return {name for name, count in zip(batch, sampled.tolist(), strict=True) if not count}

    def _score(self, guidance: StepGuidance) -> dict[str, LogprobsTensors | None]:
        """Let the worker's own code collect hidden states, which must be those of each stream."""
        rows = [prefix for prefixes in self.hidden.values() for prefix in prefixes]
        lengths = [len(prefixes) for prefixes in self.hidden.values()]
        starts = dict(zip(self.hidden, itertools.accumulate(lengths, initial=0), strict=False))
        hidden_states = torch.tensor(rows, dtype=torch.int64).view(-1, 1)
        found: dict[str, LogprobsTensors | None] = {}
        for wanted in self.scorer.take(guidance, hidden_states, starts.__getitem__):
            count, leader = len(wanted.scoring.tokens), wanted.row.streams[0]
            for stream, states in zip(wanted.row.streams, wanted.states, strict=True):
                sequence = self.sequences[stream]
                first = sequence.num_prompt - 1 - count
                assert states.flatten().tolist() == [
                    sequence.prefix(first + i) for i in range(count)
                ], f"{stream}: hidden states of other tokens are scored"
                scored = tuple(sequence.tokens[first + 1 : sequence.num_prompt])
                assert scored == wanted.scoring.tokens, f"{stream} scores other tokens"
            assert count == self.rules[leader].scored, f"{leader}: {count} tokens are scored"
            found[leader] = LogprobsTensors.empty_cpu(count, 1 + wanted.scoring.top)
        return found

    def _add(self, new: NewRequestData) -> None:
        tokens = list(new.prefill_token_ids or new.prompt_token_ids)
        blocks, *states = new.block_ids
        self.sequences[new.req_id] = Sequence(
            tokens,
            len(new.prompt_token_ids),
            new.num_computed_tokens,
            list(blocks),
            known=len(tokens),
            states=[block for group in states for block in group],
        )

    def _update(self, cached: CachedRequestData) -> None:
        for stream, blocks, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            sequence = self.sequences[stream]
            resumed = stream in cached.resumed_req_ids
            if resumed:
                sequence.blocks, sequence.computed, sequence.rejected = [], computed, 0
                sequence.lives, sequence.drafts = sequence.lives + 1, []
                sequence.states, sequence.state_at = [], None
            sequence.blocks += blocks[0] if blocks else []
            sequence.states += blocks[1] if blocks and self.path.states else []
            if stream in cached.all_token_ids:
                tokens = cached.all_token_ids[stream]
                assert tokens[: len(sequence.tokens)] == sequence.tokens[: len(tokens)]
                sequence.tokens, sequence.known = list(tokens), len(tokens)
                del sequence.prefixes[len(tokens) :]
            assert sequence.computed + sequence.rejected == computed, (
                f"{stream}: {sequence}, but the scheduler sent {computed} computed tokens"
            )

    def _take_drafts(self, output: SchedulerOutput) -> None:
        """Take the drafts that this step verifies.

        They are the worker's own. With sync scheduling, the scheduler sends them back.
        """
        for stream in output.num_scheduled_tokens:
            drafts = output.scheduled_spec_decode_tokens.get(stream, [])
            sequence = self.sequences[stream]
            own = (sequence.drafts + [GARBAGE] * len(drafts))[: len(drafts)]
            assert all(sent in (-1, mine) for sent, mine in zip(drafts, own, strict=True)), (
                f"{stream}: the scheduler sent other drafts than the worker made"
            )
            sequence.drafts = own

    def _compute(self, stream: str, num_tokens: int) -> int:
        """Compute tokens of a stream, and behind them its drafts, or its suffix.

        Returns how many tokens and drafts are computed then. The suffix is forgotten at once.
        """
        sequence, suffix = self.sequences[stream], self.suffixes.get(stream, [])
        if stream in self.blind:
            return self._compute_blind(stream, sequence)
        assert self.path.v2 or self.path.drafts or not sequence.rejected, (
            f"{stream}: V1 would compute a token behind one that it does not have"
        )
        start, end = sequence.computed, sequence.computed + num_tokens - len(suffix)
        drafts = len(sequence.drafts)
        assert not suffix or end == len(sequence.tokens), (
            f"{stream}: a suffix that does not follow its last token"
        )
        assert end - drafts <= len(sequence.tokens), (
            f"{stream} computes a token that is not sampled yet"
        )
        assert not drafts or end - drafts == len(sequence.tokens), (
            f"{stream}: drafts that do not follow its last token"
        )
        if self.path.v2:
            assert self.step >= sequence.sampled_at + self.path.stages, (
                f"{stream} is still in the pipeline"
            )
        elif self.path.asynchronous and end - drafts > sequence.known:
            assert sequence.sampled_at == self.step - 1, f"{stream}: V1 has no input token"
        sequence.tokens += [*sequence.drafts, *suffix]
        self.hidden[stream] = [sequence.prefix(p) for p in range(start, end + len(suffix))]
        for position in range(start, end + len(suffix)):
            block = self.kv.setdefault(
                sequence.blocks[position // self.block_size], [0] * self.block_size
            )
            block[position % self.block_size] = sequence.prefix(position)
        if self.path.states:
            self._advance_state(stream, sequence, start, end)
        del sequence.tokens[len(sequence.tokens) - drafts - len(suffix) :]
        del sequence.prefixes[len(sequence.tokens) :]
        sequence.computed = end
        return end

    def _compute_blind(self, stream: str, sequence: Sequence) -> int:
        """V1 computes the position that the host says, behind the text."""
        assert sequence.rejected, f"{stream} has all tokens that the scheduler counts"
        self.hidden[stream] = [0]
        position = sequence.computed + sequence.rejected
        block = sequence.blocks[position // self.block_size]
        self.kv.setdefault(block, [0] * self.block_size)[position % self.block_size] = -1
        sequence.computed += 1
        return len(sequence.tokens)

    def _advance_state(self, stream: str, sequence: Sequence, start: int, end: int) -> None:
        """Add tokens to the state, as the kernels do and vLLM's `preprocess_mamba` prepares.

        With "align", each block of tokens has an entry, and the state moves on to the last one.
        """
        now = (end - 1) // self.block_size if self.path.states == "align" else 0
        last = sequence.state_at
        if last is None:
            last = (start - 1) // self.block_size if self.path.states == "align" else 0
        block = sequence.states[now]
        assert block != 0, f"{stream}: its state is in the null block"
        if start and last != now:
            self.states[block] = self.states.get(sequence.states[last], 0)
        assert not start or self.states.get(block) == sequence.prefix(start - 1), (
            f"{stream}: its state is not that of its {start} tokens"
        )
        self.states[block], sequence.state_at = sequence.prefix(end - 1), now

    def _sample(
        self, guidance: StepGuidance, ends: dict[str, int], opened: Collection[str]
    ) -> list[list[int]]:
        joint = {s: row for row in guidance.joint for s in row.streams}
        tokens: dict[str, list[int]] = {}
        for stream, end in ends.items():
            sequence = self.sequences[stream]
            if end < len(sequence.tokens):
                assert stream not in joint, f"{stream} is not at its end"
                continue
            sequence.sampled_at = self.step
            if stream in guidance.solo:
                assert stream not in joint
                sequence.computed -= 1 + len(sequence.drafts)
                sequence.sampled_at -= 0 if self.path.v2 else 1_000
                continue
            if stream in opened:
                sequence.in_vain += 1
                assert sequence.in_vain <= 1 + self.path.asynchronous, f"{stream} probes again"
                self._keep(stream, [])
                sequence.sampled_at -= 0 if self.path.v2 else 1_000
                continue
            self._check_kv(stream, end - len(sequence.drafts))
            self._check_suffix(stream)
            tokens[stream] = self._verified(stream, joint.get(stream))
        for stream, new in tokens.items():
            self._keep(stream, new)
        return [tokens.get(s, []) for s in ends]

    def _keep(self, stream: str, new: list[int]) -> None:
        sequence = self.sequences[stream]
        sequence.tokens += new
        sequence.in_vain = 0 if new else sequence.in_vain
        rejected = len(sequence.drafts) + 1 - len(new)
        sequence.computed -= rejected
        sequence.rejected += rejected
        self.rejections.append((stream, sequence, sequence.lives, rejected))
        if not self.path.asynchronous:
            sequence.known += len(new)

    def hear_of(self, rejections: list[Rejection]) -> None:
        """Note that the scheduler now knows what was rejected in a step.

        It need not know it for streams that were preempted since.
        """
        for stream, sequence, lives, rejected in rejections:
            if self.sequences.get(stream) is sequence and sequence.lives == lives:
                sequence.rejected -= rejected

    def _verified(self, stream: str, row: JointRow | None) -> list[int]:
        """The tokens kept: the drafts that equal the model's tokens, and one more token."""
        drafts = self.sequences[stream].drafts
        kept: list[int] = []
        if row is not None:
            assert all(self.sequences[s].drafts == drafts for s in row.streams), (
                f"{row.streams} verify drafts that differ"
            )
        while True:
            kept.append(self._token(stream, row, ahead=len(kept)))
            if len(kept) > len(drafts) or drafts[len(kept) - 1] != kept[-1]:
                return kept

    def _propose(self, guidance: StepGuidance, batch: Iterable[str]) -> None:
        """Make drafts whose first tokens are right.

        Followers get their leader's drafts, as in GuidedSampling.
        """
        leader_of = {s: row.streams[0] for row in guidance.joint for s in row.streams}
        for stream in batch:
            sequence = self.sequences[stream]
            leader, count = leader_of.get(stream, stream), self._num_outputs(stream)
            right = zlib.crc32(f"{leader}/{count}".encode()) % (self.path.drafts + 1)
            sequence.drafts = [
                model_token(leader, count + i) if i < right else GARBAGE
                for i in range(self.path.drafts)
            ]

    def _token(self, stream: str, row: JointRow | None, ahead: int) -> int:
        if row is None:
            assert FOLLOWER_SUFFIX not in stream, f"{stream} samples outside a joint step"
            count = self._num_outputs(stream) + ahead
            assert stream not in self.rules or not self.rules[stream].guides(count), (
                f"{stream} samples token {count} outside a joint step"
            )
            assert stream not in self.suffixes, f"{stream} computes a suffix, and is not guided"
            return model_token(stream, count)
        leader, rules = row.streams[0], self.rules[row.streams[0]]
        if row.probe:
            return self._probed(leader, row)
        names = tuple(f"{leader}{FOLLOWER_SUFFIX}{i}" for i in range(len(rules.lengths)))
        assert row.streams == (leader, *names), row
        assert tuple(self.suffixes.get(leader, ())) == rules.suffix, f"{leader}: another suffix"
        self._check_restart(row)
        counts = {self._num_outputs(s) for s in row.streams}
        assert len(counts) == 1, f"{row.streams} blend logits of different positions: {counts}"
        count = counts.pop() + ahead
        assert rules.guides(count), f"token {count} of {leader} must not be guided: {rules}"
        assert row.weights == rules.weights_at(count), (row, count)
        return model_token(leader, count)

    def _probed(self, leader: str, row: JointRow) -> int:
        """The token of a leader that runs without its suffix."""
        rules, count = self.rules[leader], self._num_outputs(leader)
        assert row.weights == PROBE_WEIGHTS, row
        assert leader not in self.suffixes, f"{leader} computes a suffix in a probe"
        assert rules.guides(count), f"token {count} of {leader} must not be guided: {rules}"
        assert rules.gates is not None, f"{leader} has no gate"
        assert not rules.gates[count], f"token {count} of {leader} was sampled alone"
        self.saved += len(rules.suffix)
        return model_token(leader, count)

    def _num_outputs(self, stream: str) -> int:
        """Output tokens of a stream. Those before its window are a part of a follower's prompt."""
        sequence = self.sequences[stream]
        leader, is_follower, index = stream.partition(FOLLOWER_SUFFIX)
        if is_follower:
            rules = self.rules[leader]
            before = rules.before_followers(self._num_outputs(leader))
            return before + len(sequence.tokens) - rules.lengths[int(index)]
        return len(sequence.tokens) - sequence.num_prompt

    def _check_restart(self, row: JointRow) -> None:
        """Behind their own prompts, followers have the output since they last began anew."""
        leader, rules = self.sequences[row.streams[0]], self.rules[row.streams[0]]
        output = leader.tokens[leader.num_prompt :]
        for stream, length in zip(row.streams[1:], rules.lengths, strict=True):
            own = self.sequences[stream].tokens[length:]
            assert own == output[rules.before_followers(len(output)) :], f"{stream} has {own}"

    def _check_suffix(self, stream: str) -> None:
        """The suffix stands behind the stream's tokens, in blocks that no other stream has."""
        sequence, suffix = self.sequences[stream], self.suffixes.get(stream, [])
        length = len(sequence.tokens)
        sequence.tokens += suffix
        self._check_kv(stream, length + len(suffix))
        del sequence.tokens[length:], sequence.prefixes[length:]
        if suffix:
            own = set(sequence.blocks[length // self.block_size :])
            for name in self.hidden.keys() - {stream}:
                assert own.isdisjoint(self.sequences[name].blocks), (
                    f"{stream} writes its suffix into a block of {name}"
                )

    def _check_kv(self, stream: str, end: int) -> None:
        sequence = self.sequences[stream]
        for first in range(0, end, self.block_size):
            length = min(self.block_size, end - first)
            block = sequence.blocks[first // self.block_size]
            sequence.prefix(first + length - 1)
            assert self.kv[block][:length] == sequence.prefixes[first : first + length], (
                f"{stream}: wrong KV"
            )


class FakeGrammar:
    """A compiled grammar that must be shown each token of its request once, in order."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        self.tokens += tokens
        return True

    def accept_output(self, request: Request, tokens: list[int]) -> bool:
        """Called when these tokens have become the end of the request's output."""
        self.accept_tokens(request.request_id, tokens)
        assert self.tokens == list(request.output_token_ids), f"{request.request_id}: its grammar"
        return True


def admitted(fields: dict[str, Any] | None) -> dict[str, Any] | None:
    """The extra arguments of a request as admission leaves them; all prompts must be token ids."""
    params = GuidanceParams.from_fields(fields)
    if params is None or not params.enabled:
        return None
    if params.negative_suffix_token_ids is not None:
        suffix = TokenIds.of(params.negative_suffix_token_ids)
        return ResolvedGuidance.of(params, (), suffix=suffix).to_extra_args()
    prompts = [params.negative_prompt_token_ids]
    if params.streams is not None:
        prompts = [stream.token_ids for stream in params.streams]
    followers = tuple(ResolvedFollower(token_ids=TokenIds.of(ids or ())) for ids in prompts)
    return ResolvedGuidance.of(params, followers).to_extra_args()


def begun_with(tokens: list[int], extra: dict[str, Any] | None) -> dict[str, Any] | None:
    """The extra arguments of a request that has output already, as admission leaves them."""
    return {**(extra or {}), BEGUN: [tokens]} if tokens else extra


class Simulation:
    """An engine core in miniature: `add`, `abort`, `step`, `run`, with every invariant checked on
    each step.

    token_cost: what gates take for the cost of one more token, in steps. By default, probes pay
        where a gate is not nearly always open.
    """

    def __init__(
        self,
        config: VllmConfig,
        num_blocks: int,
        path: EnginePath = V1,
        token_cost: float = 1.0,
    ) -> None:
        self.config = config
        # vLLM's CPU platform turns it off.
        config.scheduler_config.async_scheduling = path.asynchronous
        config.parallel_config.pipeline_parallel_size = path.stages
        self.block_size = config.cache_config.block_size
        config.cache_config.num_gpu_blocks = num_blocks
        spec = FullAttentionSpec(
            block_size=self.block_size, num_kv_heads=1, head_size=1, dtype=torch.float32
        )
        groups = [KVCacheGroupSpec(["layer"], spec)]
        if path.states:
            aligned = path.states == "align"
            config.cache_config.mamba_cache_mode = path.states
            config.cache_config.enable_prefix_caching = aligned
            state = MambaSpec(
                block_size=self.block_size if aligned else config.model_config.max_model_len,
                shapes=((2 * self.block_size,),),
                dtypes=(torch.float32,),
                mamba_cache_mode=path.states,
            )
            groups.append(KVCacheGroupSpec(["recurrent layer"], state))
        kv = KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups)
        block_size, hash_block_size = resolve_kv_cache_block_sizes(kv, config)
        with runner_version(path.v2):
            self.depth = config.max_concurrent_batches
            self.scheduler = config.scheduler_config.get_scheduler_cls()(
                vllm_config=config,
                kv_cache_config=kv,
                structured_output_manager=StructuredOutputManager(config),
                block_size=block_size,
                hash_block_size=hash_block_size,
                log_stats=False,
            )
        self.scheduler._probes.cost = FixedCost(token_cost)
        assert self.scheduler.use_v2_model_runner == path.v2
        self.runner = FakeRunner(self.block_size, path)
        self.in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput, list[Rejection]]] = deque()
        self.grammars: list[Request] = []
        manager = self.scheduler.structured_output_manager
        manager.accept_tokens = lambda request, tokens: (
            not request.use_structured_output
            or request.structured_output_request.grammar.accept_output(request, tokens)
        )
        manager.validate_tokens = lambda request, tokens: (
            tokens[:1] if request.use_structured_output else tokens
        )
        hash_fn = get_hash_fn_by_name("sha256")
        init_none_hash(hash_fn)
        caching = config.cache_config.enable_prefix_caching
        self.hasher = get_request_block_hasher(self.block_size, hash_fn) if caching else None
        self.outputs: dict[str, list[int]] = {}
        self.finished: dict[str, str] = {}
        self.guided: dict[str, int] = {}
        self.scores: dict[str, list[int]] = {}
        self.stops: dict[str, set[int]] = {}
        self.begun: dict[str, int] = {}
        self.steps = self.idle = 0

    def add(
        self,
        rid: str,
        prompt: list[int],
        max_tokens: int,
        scale: float | None = None,
        negative: list[int] | None = None,
        priority: int = 0,
        stop: Collection[int] = (),
        grammar: bool = False,
        streams: Iterable[tuple[float, list[int]]] = (),
        schedule: Iterable[tuple[int, float]] = (),
        window: tuple[int, int | None] = (0, None),
        score: int = 0,
        between: tuple[int, int, bool] | None = None,
        begun: int = 0,
        suffix: Iterable[int] = (),
        gate: int | None = None,
    ) -> None:
        """Add a request.

        streams: weight and prompt of each follower, instead of scale and negative.
        schedule: (first token, scale), instead of the scale.
        window: the first guided token, and the first behind it.
        score: tokens at the end of `prompt` that are scored. The followers' prompts have them, too.
        between: a start token, an end token, and whether the negative begins anew.
        begun: how many of its tokens it has already.
        suffix: instead of a negative.
        gate: how many percent of the tokens have an open gate; None without gates.
        """
        suffix = list(suffix)
        scored = prompt[len(prompt) - score :]
        streams = [(weight, [*ids, *scored]) for weight, ids in streams]
        negative = [*(negative or prompt[: len(prompt) - score][-1:]), *scored]
        extra: dict[str, Any] | None = None
        if streams:
            extra = {"guidance_streams": [{"weight": w, "token_ids": ids} for w, ids in streams]}
        elif scale is not None:
            extra = {"negative_prompt_token_ids": negative}
            if suffix:
                extra = {"negative_suffix_token_ids": suffix}
            if gate is not None:
                extra["guidance_min_entropy"] = 1.0
            if schedule:
                extra["guidance_schedule"] = list(schedule)
            else:
                extra["guidance_scale"] = scale
        if extra is not None and window != (0, None):
            extra |= {"guidance_start": window[0], "guidance_end": window[1]}
        if extra is not None and between is not None:
            names = ("start_token_id", "end_token_id", "restart_negative")
            extra["guidance_between"] = dict(zip(names, between, strict=True))
        if extra is not None and score:
            extra["guidance_score_tokens"] = score
        params = SamplingParams(
            max_tokens=max_tokens,
            ignore_eos=True,
            extra_args=begun_with([model_token(rid, i) for i in range(begun)], admitted(extra)),
            stop_token_ids=list(stop),
            prompt_logprobs=0 if score else None,
        )
        request = Request(
            request_id=rid,
            prompt_token_ids=prompt,
            sampling_params=params,
            pooling_params=None,
            arrival_time=float(len(self.outputs)),
            priority=priority,
            block_hasher=self.hasher,
        )
        if grammar:
            request.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
            request.structured_output_request = SimpleNamespace(
                grammar=None, _grammar=None, reasoning_ended=None
            )
            self.grammars.append(request)
        self.outputs[rid] = []
        self.begun[rid] = begun
        self.stops[rid] = set(stop)
        if streams or (scale is not None and scale != 1):
            prompts = [ids for _, ids in streams] or [negative] * (not suffix)
            marked = (None, None) if between is None else between_markers(rid, prompt, *between)
            self.runner.rules[rid] = Rules(
                tuple(map(len, prompts)),
                tuple(weight for weight, _ in streams),
                tuple(schedule) or ((0, scale or 0.0),),
                window[0],
                1_000_000 if window[1] is None else window[1],
                score,
                opens=marked[0],
                since=marked[1],
                suffix=tuple(suffix),
                gates=None if gate is None else random_gates(rid, gate),
            )
        self.scheduler.add_request(request)

    @property
    def busy(self) -> bool:
        return self.scheduler.has_requests() or bool(self.in_flight)

    def compile_grammars(self) -> None:
        """Do what a thread of vLLM does some time after the request arrived."""
        manager = self.scheduler.structured_output_manager
        while self.grammars:
            request, grammar = self.grammars.pop(), FakeGrammar()
            assert grammar_manager.catch_up(manager, request, grammar)
            request.structured_output_request.grammar = grammar

    def abort(self, rid: str) -> None:
        for request in self.scheduler.finish_requests(rid, RequestStatus.FINISHED_ABORTED):
            self.finished[request.request_id] = "abort"

    def step(self) -> None:
        """Do a step as `EngineCore.step` and `step_with_batch_queue` do.

        They fill the queue of steps in flight, and then process one.
        """
        if self.scheduler.has_requests():
            step = self.scheduler.schedule()
            self.check_roles()
            self.check_windows()
            output = self.runner.execute(step)
            self.check_computed()
            executed = step.total_num_scheduled_tokens > 0
            self.idle = (
                0 if executed or self.grammars or not self.scheduler.requests else self.idle + 1
            )
            assert self.idle <= self.depth + 2, f"stalled: {self.scheduler.guidance_stats()}"
            output = output if executed else EMPTY_MODEL_RUNNER_OUTPUT
            self.in_flight.append((step, output, self.runner.rejections))
            self.steps += 1
            if len(self.in_flight) < self.depth and (executed or self.scheduler.has_requests()):
                return
        if self.in_flight:
            self._take(*self.in_flight.popleft())

    def _take(
        self, step: SchedulerOutput, output: ModelRunnerOutput, rejections: list[Rejection]
    ) -> None:
        self.runner.hear_of(rejections)
        for per_client in self.scheduler.update_from_output(step, output).values():
            for one in per_client.outputs:
                assert one.request_id in self.outputs, (
                    f"a client would get the output of {one.request_id}"
                )
                if one.new_prompt_logprobs_tensors is not None:
                    assert not self.outputs[one.request_id], "scores must come first"
                    rows = len(one.new_prompt_logprobs_tensors.logprobs)
                    self.scores.setdefault(one.request_id, []).append(rows)
                self.outputs[one.request_id] += one.new_token_ids
                self.guided[one.request_id] = self.guided.get(one.request_id, 0) + guided_tokens(
                    one
                )
                self._check_gates(one.request_id, token_strengths(one)[0])
                if one.finish_reason is not None:
                    self.finished[one.request_id] = str(one.finish_reason)
        if self.runner.path.drafts and not self.runner.path.asynchronous and output.req_ids:
            drafts = [
                self.runner.sequences[r].drafts
                for r in output.req_ids
                if r in self.runner.sequences
            ]
            ids = [r for r in output.req_ids if r in self.runner.sequences]
            self.scheduler.update_draft_token_ids(DraftTokenIds(ids, [list(d) for d in drafts]))
        self.scheduler.check_integrity()

    def _check_gates(self, rid: str, strengths: list[float]) -> None:
        """The last tokens of an output were guided where their gates were open."""
        rules, end = self.runner.rules.get(rid), len(self.outputs[rid])
        if rules is not None and rules.gates is not None:
            wanted = list(map(float, rules.gates[end - len(strengths) : end]))
            assert strengths == wanted, f"{rid}: {strengths} is the strength of other tokens"

    def check_computed(self) -> None:
        """Scheduler and worker agree on how far each running stream has been computed."""
        for request in self.scheduler.running:
            sequence = self.runner.sequences[request.request_id]
            computed = sequence.computed + sequence.rejected
            assert request.num_computed_tokens == computed, (
                f"{request.request_id}: the worker has computed {computed} tokens"
            )
            stale = request.num_stale_output_tokens and self.scheduler._groups.of(
                request.request_id
            )
            assert not stale, (
                f"{request.request_id} runs while output from before its preemption is in flight"
            )

    def check_roles(self) -> None:
        """Under the even split, no role holds more than its half."""
        pool = self.scheduler._split.pool
        if pool.kv_split == EVEN:
            entries = self.scheduler._roles.entries(self.scheduler._groups.is_follower)
            assert max(entries) <= pool.limit, (entries, pool)

    def check_windows(self) -> None:
        """Outside of its window, a request has no follower, and so no block for one."""
        for rid, rules in self.runner.rules.items():
            leader = self.scheduler.requests.get(rid)
            if leader is not None and not rules.guides(leader.num_output_tokens):
                followers = [f"{rid}{FOLLOWER_SUFFIX}{i}" for i in range(len(rules.lengths))]
                held = self.scheduler._roles.held(followers)
                assert not held, f"{rid} holds blocks for followers outside of its window"
                assert self.scheduler.requests.keys().isdisjoint(followers), rid

    def run(self, max_steps: int = 20_000) -> None:
        self.compile_grammars()
        while self.busy:
            self.step()
            assert self.steps < max_steps, f"no progress: {self.scheduler.guidance_stats()}"

    def check_drained(self) -> None:
        """A finished or aborted group leaves no block, no slot and no id behind."""
        stats = self.scheduler.guidance_stats()
        assert stats["running"] == stats["waiting"] == stats["groups"] == 0, stats
        assert stats["free_blocks"] == stats["total_blocks"], stats
        assert not self.scheduler.requests
        assert stats["gate_saved_tokens"] <= self.runner.saved, "suffixes were not saved"
        for rid, tokens in self.outputs.items():
            rules = self.runner.rules.get(rid)
            new = range(self.begun[rid], len(tokens))
            guided = sum(map(rules.guides, new)) if rules is not None else 0
            assert self.guided.get(rid, 0) == guided, f"{rid}: wrong count of guided tokens"
            scored = [rules.scored] if rules is not None and rules.scored and tokens else []
            assert self.scores.get(rid, []) == scored, f"{rid}: wrong scores"
            assert rid in self.finished, rid
            assert tokens == [model_token(rid, i) for i in range(len(tokens))], rid
            assert not tokens or len(tokens) > self.begun[rid], rid
            assert self.stops[rid].isdisjoint(tokens[:-1]), f"{rid} continued after its stop token"
        assert not self.in_flight


def simulate(folder: Path, path: EnginePath, seed: int, num_requests: int = 30) -> Simulation:
    """Run one random load on one random engine until everything has finished.

    Raises AssertionError if a check fails.
    """
    rng = random.Random(seed)
    setup = random_setup(rng)
    num_blocks = setup.pop("num_blocks")
    if path.states:
        num_blocks += num_blocks // 2  # a stream has states beside its KV blocks
    sim = Simulation(make_config(folder, drafts=path.drafts, **setup), num_blocks, path)
    random_load(sim, rng, num_requests)
    sim.check_drained()
    errors = [r for r, reason in sim.finished.items() if "error" in reason.lower()]
    assert not errors, errors
    return sim


def random_setup(rng: random.Random) -> dict[str, Any]:
    """Engine arguments that make conflicts frequent: tiny pools, tiny budgets, few slots."""
    kv_split = rng.choice(("elastic", "elastic", "even"))
    return {
        "kv_split": kv_split,
        "num_blocks": (
            rng.choice((17, 20, 30, 60)) if kv_split == "elastic" else rng.choice((36, 60))
        ),
        "max_num_seqs": rng.choice((2, 3, 5, 16)),
        "max_num_batched_tokens": rng.choice((20, 33, 64, 256)),
        "scheduling_policy": rng.choice(("fcfs", "priority")),
        "enable_prefix_caching": rng.random() < 0.7,
        "long_prefill_token_threshold": rng.choice((0, 0, 20)),
        "scheduler_reserve_full_isl": rng.random() < 0.6,
        "watermark": rng.choice((0.0, 0.0, 0.05)),
    }


def random_load(
    sim: Simulation,
    rng: random.Random,
    num_requests: int,
    abort_share: float = 0.02,
    reset_share: float = 0.002,
) -> None:
    """Run a random load until all requests have finished.

    Random are arrivals, lengths, scales, priorities, stops, grammars, aborts and resets.
    """
    shared = [rng.randrange(4, VOCAB) for _ in range(64)]
    added = 0
    while added < num_requests or sim.busy:
        for _ in range(rng.choice((0, 0, 1, 1, 2, 5)) if added < num_requests else 0):
            _add_random(sim, rng, f"r{added}", shared)
            added += 1
        live = [r for r in sim.outputs if r not in sim.finished]
        if live and rng.random() < abort_share:
            sim.abort(rng.choice(live))
        if rng.random() < 0.3:
            sim.compile_grammars()
        if rng.random() < reset_share:
            sim.scheduler.reset_prefix_cache(reset_running_requests=True)
        sim.step()
        assert sim.steps < 50_000, f"no progress: {sim.scheduler.guidance_stats()}"


def _add_random(sim: Simulation, rng: random.Random, rid: str, shared: list[int]) -> None:
    def prompt(longest: int) -> list[int]:
        head = shared[: rng.choice((0, 0, 16, 33, 64))]
        return (head + [rng.randrange(4, VOCAB) for _ in range(rng.randint(1, longest))])[-longest:]

    stats, budget = sim.scheduler.guidance_stats(), config.step_budget(sim.scheduler)
    pool = (stats["total_blocks"] - 2) * sim.block_size
    most = min(6, stats["max_num_seqs"], budget // config.rows_per_stream(sim.scheduler))
    size = rng.randint(2, most) if rng.random() < 0.4 else 2
    drafts = sim.runner.path.drafts
    room = (40 if size == 2 else 52) + drafts  # for output, drafts, and the rest of a block
    room += sim.block_size * {"": 0, "none": 1, "align": 3}[sim.runner.path.states]
    if sim.scheduler._split.pool.kv_split == EVEN:
        longest = min(100, pool // 2 // (size - 1) - room)
    else:
        longest = min(100, pool // size - room)
    size, longest = (size, longest) if longest > 0 else (2, max(1, min(100, pool // 2 - room)))
    guided, streams, schedule = rng.random() < 0.7, [], []
    window: tuple[int, int | None] = (0, None)
    if guided and (size > 2 or rng.random() < 0.2):
        weights = (-1.0, -0.5, 0.0, 0.25, 1.0, 2.0)
        streams = [(rng.choice(weights), prompt(longest)) for _ in range(size - 1)]
    elif guided and rng.random() < 0.2:
        firsts = sorted(rng.sample(range(1, 25), rng.randint(1, 4)))
        schedule = [(first, rng.choice((0.0, 1.0, 1.5))) for first in firsts]
        schedule = [(0, 3.0), *schedule]
    if guided and rng.random() < 0.3:
        start = rng.choice((0, 0, 1, 2, 7, 15))
        window = (start, rng.choice((None, start + rng.randint(1, 12))))
    own = prompt(longest)
    score, between = 0, None
    dice = random.Random(str(own))  # of its own, so that the other choices of a seed stay
    if guided and dice.random() < 0.4:
        between = random_markers(dice, rid, own)
    elif guided and not schedule and window == (0, None):
        score = dice.randint(0, min(len(own) - 1, longest // 2)) if dice.random() < 0.4 else 0
    suffix = []
    if guided and not streams and not score and not (between and between[2]):
        suffix = random_suffix(dice, sim)
        own = own[-1:] if suffix and dice.random() < 0.2 else own
    gate = random_gate(random.Random(f"gate {own}")) if suffix else None
    room_for = max(1, longest - score)
    max_tokens = rng.randint(1, 30)
    sim.add(
        rid,
        own,
        max_tokens=max_tokens,
        scale=rng.choice((-1.0, 0.0, 1.5, 3.0)) if guided else None,
        negative=prompt(longest)[:room_for] if guided and rng.random() < 0.8 else None,
        priority=rng.randint(0, 2),
        stop=(stop := rng.sample(range(4, VOCAB), 8) if rng.random() < 0.4 else ()),
        grammar=rng.random() < 0.1,
        streams=[(weight, ids[:room_for]) for weight, ids in streams],
        schedule=schedule,
        window=window,
        score=score,
        between=between,
        begun=0 if score else random_begun(dice, rid, max_tokens, stop),
        suffix=suffix,
        gate=gate,
    )


def random_begun(rng: random.Random, rid: str, max_tokens: int, stop: Collection[int]) -> int:
    """How many tokens a request has already: often none, and never so many that it is complete."""
    ends = (i for i in range(max_tokens) if model_token(rid, i) in stop)
    most = min(max_tokens - 1, next(ends, max_tokens))
    return rng.randint(0, most) if rng.random() < 0.5 else 0


def random_suffix(rng: random.Random, sim: Simulation) -> list[int]:
    """Up to 40 tokens that a step can have; mostly none. Admission refuses the other paths."""
    scheduler = sim.scheduler.scheduler_config
    threshold = scheduler.long_prefill_token_threshold or 1_000
    most = min(40, config.step_budget(sim.scheduler) - 1, threshold - 1)
    if rng.random() < 0.6 or sim.runner.path.drafts or sim.runner.path.states:
        return []
    return [rng.randrange(4, VOCAB) for _ in range(rng.randint(1, most))]


def random_gate(rng: random.Random) -> int | None:
    """How many percent of a text's gates are open; None for none."""
    return rng.choice((None, 0, 5, 20, 50, 90, 100))


def random_markers(rng: random.Random, rid: str, prompt: list[int]) -> tuple[int, int, bool]:
    """Markers that mostly come in the text: some early, some next to each other."""
    text = [*prompt[-3:], *(model_token(rid, i) for i in range(20)), 2]
    start, end = rng.sample(sorted(set(text)), 2)
    return start, end, rng.random() < 0.6
