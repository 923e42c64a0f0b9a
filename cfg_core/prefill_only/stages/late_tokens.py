"""What late interaction needs of the tokenizer: ids of tokens, and marks that are not split."""

from __future__ import annotations

from dataclasses import replace

from cfg_core.errors import ConfigError
from cfg_core.prefill_only.models.checkpoint import Checkpoint
from cfg_core.prefill_only.models.late_interaction import LateInteraction
from cfg_core.prefill_only.stages.tokenizer import Tokenizer


def with_late_tokens(checkpoint: Checkpoint, tokenizer: Tokenizer) -> Checkpoint:
    """The checkpoint with the ids of its expansion token and of the tokens that it skips.

    Registers the marks of queries and documents with the tokenizer. Raises ConfigError if there is
    no token to expand queries with.
    """
    late = checkpoint.late
    if late is None:
        return checkpoint
    for mark in late.marks:
        tokenizer.keep_whole(mark)
    found = (tokenizer.id_of(word) for word in late.skipped_words)
    skipped = frozenset(token for token in found if token not in (None, tokenizer.unknown_id))
    completed = replace(
        late,
        expansion_id=_expansion_id(late, tokenizer),
        skipped_ids=frozenset(token for token in skipped if token is not None),
    )
    return replace(checkpoint, late=completed)


def _expansion_id(late: LateInteraction, tokenizer: Tokenizer) -> int:
    if not late.expanded_length:
        return 0
    token = late.expansion_token
    token_id = tokenizer.filler_id if token is None else tokenizer.id_of(token)
    if token_id is None:
        raise ConfigError(
            f"queries are expanded with {token or 'a mask token'}, which this tokenizer lacks."
        )
    return token_id
