"""A fake model runner: block tables, KV, states and samples, as vLLM's workers keep them."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from vllm.v1.outputs import LogprobsTensors, ModelRunnerOutput

from cfg_core.policy.groups import FOLLOWER_SUFFIX
from cfg_core.vllm_plugin.core.gates import PROBE_WEIGHTS
from cfg_core.vllm_plugin.wire import JointRow, StepGuidance, Strengths, attach_strengths
from cfg_core.vllm_plugin.worker import gates
from cfg_core.vllm_plugin.worker.scoring import Scorer
from cfg_core.vllm_plugin.worker.staging import first_rows
from tests.simulation.paths import EnginePath
from tests.simulation.texts import GARBAGE, Rules, model_token

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput


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
    accepted: int = 1  # of the last step: with drafts, the state after that many of its tokens
    in_vain: int = 0  # open probes since its last token

    def prefix(self, position: int) -> int:
        """A number that stands for all tokens up to `position`."""
        while len(self.prefixes) <= position:
            last = self.prefixes[-1] if self.prefixes else 0
            token = self.tokens[len(self.prefixes)]
            self.prefixes.append(zlib.crc32(token.to_bytes(4, "little"), last))
        return self.prefixes[position]


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
    blind: set[str] = field(default_factory=set)
    """On V1, the leaders that probe behind an open probe. They have no token to begin with."""

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        self.step += 1
        self.scorer.forget(output.finished_req_ids)
        for stream in output.finished_req_ids:
            self.sequences.pop(stream, None)
        for new in output.scheduled_new_reqs:
            self._add(new)
        self._update(output.scheduled_cached_reqs)
        guidance = StepGuidance.of(output) or StepGuidance((), ())
        self._take_drafts(output)
        self.suffixes = {leader: list(tokens) for leader, tokens in guidance.suffixes}
        self.hidden, batch = {}, list(output.num_scheduled_tokens)
        self.blind = self._blind(guidance, batch)
        ends = {s: self._compute(s, n) for s, n in output.num_scheduled_tokens.items()}
        scores = self._score(guidance)
        self.rejections = []
        first_row = first_rows(batch, {s: self.sequences[s].drafts for s in batch})
        strengths = self._strengths(guidance, batch, first_row)
        sampled = self._sample(guidance, ends, first_row, strengths)
        self._propose(guidance, ends)
        made = ModelRunnerOutput(
            req_ids=list(ends),
            req_id_to_index={r: i for i, r in enumerate(ends)},
            sampled_token_ids=sampled,
            prompt_logprobs_dict=scores,
        )
        gated = [r.streams[0] for r in guidance.joint if r.group.strength is not None]
        places = {leader: batch.index(leader) for leader in gated}
        rows = {leader: slice(*first_row[place : place + 2]) for leader, place in places.items()}
        attach_strengths(made, Strengths(strengths.numpy(), rows))
        return made

    def _blind(self, guidance: StepGuidance, batch: list[str]) -> set[str]:
        """Streams that the workers' own code takes for blind. V2's host does not count tokens."""
        if self.path.v2:
            return set()
        own = [self.sequences[stream] for stream in batch]
        computed = np.array([one.computed + one.rejected for one in own])
        known = np.array([len(one.tokens) for one in own])
        return {batch[place] for place in gates.blind_places(guidance, batch, computed, known)}

    def _strengths(
        self, guidance: StepGuidance, batch: list[str], first_row: np.ndarray
    ) -> torch.Tensor:
        """[2, rows]: 0 where the gate of a leader is closed, and for the rows of blind probes."""
        strengths = torch.ones(2, int(first_row[-1]))
        for leader in (row.streams[0] for row in guidance.joint):
            rules, place = self.rules[leader], batch.index(leader)
            for ahead, row in enumerate(range(first_row[place], first_row[place + 1])):
                count = self._num_outputs(leader) + ahead
                if leader in self.blind or (rules.gates is not None and not rules.gates[count]):
                    strengths[:, row] = 0
        return strengths

    def _kept(
        self,
        guidance: StepGuidance,
        verified: dict[str, list[int]],
        first_row: np.ndarray,
        strengths: torch.Tensor,
    ) -> dict[str, list[int]]:
        """What the workers' own code keeps of these tokens.

        verified: of each stream of the batch; those of probes may come from open gates.
        """
        batch, most = list(verified), int(np.diff(first_row).max())
        tokens = torch.tensor([new + [-1] * (most - len(new)) for new in verified.values()])
        sampled = (tokens >= 0).sum(1)
        if self.path.v2:
            gates.drop_open(
                guidance, batch, first_row, strengths, sampled, torch.zeros_like(sampled)
            )
        else:
            blind = [batch.index(stream) for stream in self.blind]
            kept = gates.kept_by_v1(guidance, batch, first_row, strengths, blind)
            kept.cut(tokens, strengths)
            sampled = (tokens >= 0).sum(1)
            sampled[kept.none] = 0
        counts = dict(zip(batch, sampled.tolist(), strict=True))
        return {stream: verified[stream][:count] for stream, count in counts.items()}

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
                sequence.states, sequence.state_at, sequence.accepted = [], None, 1
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
            self._advance_states(stream, sequence, start, end)
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

    def _advance_states(self, stream: str, sequence: Sequence, start: int, end: int) -> None:
        """Add tokens to the state, as the kernels do and vLLM's `preprocess_mamba` prepares.

        With drafts, each token of a decode leaves a state of its own. vLLM begins with that of the
        last token that was accepted in the step before. With "align", each block of tokens has an
        entry, and the entries of a step begin at the block of its last token.
        """
        now = 0
        if self.path.states == "align":
            now = (end - 1) // self.block_size
            last = sequence.state_at
            if last is None:
                last = (start - 1) // self.block_size
            if start and last != now:
                moved = sequence.states[last + sequence.accepted - 1]
                self.states[sequence.states[now]] = self.states.get(moved, 0)
                sequence.accepted = 1
        begun = self.states.get(sequence.states[now + sequence.accepted - 1])
        assert not start or begun == sequence.prefix(start - 1), (
            f"{stream}: its state is not that of its {start} tokens"
        )
        decodes = start >= sequence.num_prompt and end - start == 1 + len(sequence.drafts)
        for slot, place in enumerate(range(start if decodes else end - 1, end), now):
            assert sequence.states[slot] != 0, f"{stream}: its state is in the null block"
            self.states[sequence.states[slot]] = sequence.prefix(place)
        sequence.state_at, sequence.accepted = now, 1

    def _keep_aligned(self, sequence: Sequence, computed: int) -> None:
        """Put the state of the last whole block into that block, where others find it.

        Without drafts it is there already.

        computed: the tokens that are computed and accepted. This is vLLM's
        `postprocess_mamba_fused_kernel`.
        """
        running = computed - sequence.accepted + 1  # the tokens in the first entry of the step
        aligned = computed // self.block_size * self.block_size
        if aligned < running:
            return
        assert sequence.state_at is not None
        source = sequence.states[sequence.state_at + aligned - running]
        kept = aligned // self.block_size - 1
        self.states[sequence.states[kept]] = self.states[source]
        if kept == sequence.state_at:
            sequence.accepted = 1

    def _sample(
        self,
        guidance: StepGuidance,
        ends: dict[str, int],
        first_row: np.ndarray,
        strengths: torch.Tensor,
    ) -> list[list[int]]:
        joint = {s: row for row in guidance.joint for s in row.streams}
        verified: dict[str, list[int]] = {stream: [] for stream in ends}
        samples = []
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
            if stream not in self.blind:
                self._check_kv(stream, end - len(sequence.drafts))
                self._check_suffix(stream)
            verified[stream] = self._verified(stream, joint.get(stream))
            samples.append(stream)
        kept = self._kept(guidance, verified, first_row, strengths) if verified else {}
        for stream in samples:
            if stream in joint and joint[stream].probe:
                self._check_probe(stream, kept[stream], verified[stream])
            self._keep(stream, kept[stream])
        return list(kept.values())

    def _check_probe(self, leader: str, kept: list[int], verified: list[int]) -> None:
        """A probe's tokens are those in front of its first open gate; a blind one has none."""
        sequence, rules, count = (
            self.sequences[leader],
            self.rules[leader],
            self._num_outputs(leader),
        )
        assert rules.gates is not None, f"{leader} has no gate"
        behind = rules.gates[count : count + len(verified)]
        closed = 0 if leader in self.blind else (*behind, True).index(True)
        assert len(kept) == closed, f"{leader}: {len(kept)} tokens are kept, {closed} gates closed"
        self.saved += len(rules.suffix) * len(kept)
        if not kept:
            sequence.in_vain += 1
            assert sequence.in_vain <= 1 + self.path.asynchronous, f"{leader} probes again"
            sequence.sampled_at -= 0 if self.path.v2 else 1_000

    def _keep(self, stream: str, new: list[int]) -> None:
        sequence = self.sequences[stream]
        sequence.tokens += new
        sequence.in_vain = 0 if new else sequence.in_vain
        sequence.accepted = max(1, len(new))
        rejected = len(sequence.drafts) + 1 - len(new)
        sequence.computed -= rejected
        sequence.rejected += rejected
        if self.path.states == "align" and sequence.drafts and new:
            self._keep_aligned(sequence, sequence.computed)
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
            return self._probed(leader, row, ahead)
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

    def _probed(self, leader: str, row: JointRow, ahead: int) -> int:
        """A token of a leader that runs without its suffix. It counts if its gate is closed."""
        rules, count = self.rules[leader], self._num_outputs(leader) + ahead
        assert row.weights == PROBE_WEIGHTS, row
        assert leader not in self.suffixes, f"{leader} computes a suffix in a probe"
        assert rules.guides(count), f"token {count} of {leader} must not be guided: {rules}"
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
