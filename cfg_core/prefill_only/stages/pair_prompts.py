"""Prompts of rerankers with a template: completed at load, and tokenized pair by pair."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from cfg_core.errors import ConfigError, RequestError
from cfg_core.prefill_only.models.checkpoint import Checkpoint
from cfg_core.prefill_only.models.pair_template import PairTemplate, from_chat_template
from cfg_core.prefill_only.options import EngineOptions
from cfg_core.prefill_only.stages.tokenizer import Tokenizer


def completed(checkpoint: Checkpoint, options: EngineOptions, tokenizer: Tokenizer) -> Checkpoint:
    """The checkpoint with what only its tokenizer knows: ids of tokens, and its chat template.

    Raises ConfigError if a token is none, or if nothing says how to ask a language model.
    """
    if checkpoint.head != "logit_score":
        return checkpoint
    template = checkpoint.template or from_chat_template(tokenizer.chat_prompt)
    if template is None:
        raise ConfigError(
            f"{checkpoint.path} is a language model that scores pairs, and it has no chat template"
            " with the roles query and document: set `score_template` in the engine's options."
        )
    if options.instruction and not template.takes_instruction:
        raise ConfigError("the prompt of this reranker has no instruction: leave it out.")
    if options.instruction and template.plain is not None:
        template = PairTemplate(text=template.text, instruction=options.instruction)
    ids = tuple(_token_id(token, tokenizer) for token in checkpoint.score_tokens)
    names = tokenizer.tokens_of([int(ids[-1])])
    return replace(checkpoint, template=template, score_tokens=ids, labels=tuple(names))


def _token_id(token: str | int, tokenizer: Tokenizer) -> int:
    token_id = token if isinstance(token, int) else tokenizer.id_of(token)
    if token_id is None or not 0 <= token_id < tokenizer.vocab_size:
        raise ConfigError(
            f"classifier_from_token holds {token!r}, which is no token of this model: write it as"
            " the vocabulary has it."
        )
    return token_id


@dataclass(frozen=True, slots=True)
class EncodedPair:
    """The tokens of a prompt, in the form of the tokenizers library."""

    ids: list[int]
    special_tokens_mask: list[int]
    """0 for the tokens of the document, which truncation may cut; 1 for all others."""
    type_ids: None = None


def encode_pairs(
    tokenizer: Tokenizer,
    template: PairTemplate,
    pairs: Sequence[tuple[str, str]],
    instruction: str,
) -> list[EncodedPair]:
    """The prompt of each pair, as tokens. No special tokens are added: the template has them."""
    prompts = []
    for query, document in pairs:
        if template.is_in(query):
            raise RequestError(
                "the query already holds the prompt of this model, which the server adds: send the"
                " plain query and documents.",
                "query",
            )
        prompts.append(template.render(query, document, instruction))
    encodings = tokenizer.encode([prompt.text for prompt in prompts], special_tokens=False)
    return [
        EncodedPair(
            encoding.ids,
            [
                int(not (prompt.start <= first and end <= prompt.end and first < end))
                for first, end in encoding.offsets
            ],
        )
        for prompt, encoding in zip(prompts, encodings, strict=True)
    ]
