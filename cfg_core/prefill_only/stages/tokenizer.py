"""Tokenizes with the checkpoint's own fast tokenizer. Never truncates and never pads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cfg_core.errors import ConfigError
from cfg_core.prefill_only.models.checkpoint import Checkpoint

_SHORT_TEXT = 2000
"""Characters. A single text with more of them is encoded as a batch of one.

The tokenizers library holds the GIL while it encodes a single text, but not for a batch.
"""
_CHARS_PER_TOKEN = 12
"""Assumed characters per token, for the first part of a long text that is tried.

English has about 4. A text with long words or with much white space has more.
"""
_SLACK_TOKENS = 64
"""Tokens that a part must have beyond those that are needed, as those near its cut may differ."""
_SEARCH = 2000  # characters next to the cut in which a space is searched for
_GROWTH = 4  # factor by which a part grows that has too few tokens
_ENDLESS = 10**9  # the model_max_length of a tokenizer that knows no limit is 1e30


class Tokenizer:
    """Encodes and decodes texts.

    It is thread-safe, because the tokenizers library is and nothing changes after the start.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        from transformers import AutoTokenizer

        self._lower_case = checkpoint.lower_case
        tokenizer: Any = AutoTokenizer.from_pretrained(checkpoint.path, trust_remote_code=False)
        if not tokenizer.is_fast:
            raise ConfigError(
                f"{checkpoint.path} has no fast tokenizer (tokenizer.json): convert it with"
                " transformers."
            )
        tokenizer.backend_tokenizer.no_truncation()
        tokenizer.backend_tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        self.limit = _limit(tokenizer)
        self.special_ids = frozenset(tokenizer.all_special_ids)
        self.vocab_size = len(tokenizer)
        self._splits_words = _splits_words(self._backend)
        self.gives_token_types = "token_type_ids" in tokenizer.model_input_names

    def encode(
        self, texts: Sequence[str | tuple[str, str]], *, special_tokens: bool = True
    ) -> list[Any]:
        """An encoding of each text or pair, special tokens included.

        An encoding has `ids`, `type_ids`, `offsets` and `special_tokens_mask`.

        special_tokens: whether the tokenizer adds those that the model expects.
        """
        if self._lower_case:
            texts = [
                text.lower() if isinstance(text, str) else (text[0].lower(), text[1].lower())
                for text in texts
            ]
        if len(texts) == 1 and isinstance(texts[0], str) and len(texts[0]) <= _SHORT_TEXT:
            return [self._backend.encode(texts[0], add_special_tokens=special_tokens)]
        encodings: list[Any] = self._backend.encode_batch(
            list(texts), add_special_tokens=special_tokens
        )
        return encodings

    def excerpt(self, text: str, num_tokens: int, side: str) -> str | None:
        """A part of a long `text` with more than `num_tokens` tokens, or None.

        side: the side from which tokens will be cut. The part is the beginning of the text for
        `right`, and its end for `left`. It is cut off at white space, so its tokens are those of
        the whole text.

        None: no such part is much shorter than the text, or tokens may span spaces.
        """
        length = _first_length(num_tokens)
        while self._splits_words and 2 * length < len(text):
            part = _beginning(text, length) if side == "right" else _end(text, length)
            if part is not None and len(self.encode([part])[0].ids) >= num_tokens + _SLACK_TOKENS:
                return part
            length *= _GROWTH
        return None

    def token_ids(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = self._backend.encode_batch([text], add_special_tokens=add_special_tokens)[
            0
        ].ids
        return ids

    @property
    def unknown_id(self) -> int | None:
        token_id: int | None = self._tokenizer.unk_token_id
        return token_id

    @property
    def filler_id(self) -> int | None:
        """The mask token, or else the end of text: what late interaction fills queries up with."""
        mask, end = self._tokenizer.mask_token_id, self._tokenizer.eos_token_id
        token_id: int | None = end if mask is None else mask
        return token_id

    def keep_whole(self, mark: str) -> None:
        """Make `mark`, or its first word, one token, if the vocabulary has it as one.

        Checkpoints were trained with its id, and the tokenizer may split its text. Call this at
        load only.
        """
        from tokenizers import AddedToken

        for text in (mark, mark.split()[0] if mark.split() else mark):
            if self._backend.token_to_id(text) is None:
                continue
            if self._backend.encode(text, add_special_tokens=False).tokens != [text]:
                self._backend.add_special_tokens([AddedToken(text, normalized=False)])
            return

    def id_of(self, token: str) -> int | None:
        """The id of a token as the vocabulary writes it; None if there is no such token."""
        token_id: int | None = self._backend.token_to_id(token)
        return token_id

    def chat_prompt(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The prompt that the tokenizer's chat template makes. Raises if it has none."""
        prompt: str = self._tokenizer.apply_chat_template(list(messages), tokenize=False)
        return prompt

    def text_of(self, token_ids: Sequence[int]) -> str:
        (text,) = self._backend.decode_batch([list(token_ids)], skip_special_tokens=False)
        if (
            self._tokenizer.clean_up_tokenization_spaces
            and type(self._backend.model).__name__ != "BPE"
        ):
            text = self._tokenizer.clean_up_tokenization(text)
        decoded: str = text
        return decoded

    def tokens_of(self, token_ids: Sequence[int]) -> list[str]:
        tokens: list[str] = self._tokenizer.convert_ids_to_tokens(list(token_ids))
        return tokens


def _first_length(num_tokens: int) -> int:
    """Characters of the first part that `excerpt` tries."""
    return _CHARS_PER_TOKEN * (num_tokens + _SLACK_TOKENS)


def _beginning(text: str, length: int) -> str | None:
    place = text.rfind(" ", max(0, length - _SEARCH), length)
    return text[:place] if place > 0 else None


def _end(text: str, length: int) -> str | None:
    start = len(text) - length
    place = text.find(" ", start, start + _SEARCH)
    return text[place:] if place >= 0 else None


def _splits_words(backend: Any) -> bool:
    """Whether no token spans white space."""
    text = "one two three"
    if backend.normalizer is not None:
        text = backend.normalizer.normalize_str(text)
    return (
        backend.pre_tokenizer is not None and len(backend.pre_tokenizer.pre_tokenize_str(text)) >= 3
    )


def _limit(tokenizer: Any) -> int | None:
    """Tokens of the longest input by the tokenizer's own configuration; None if it does not say."""
    limit = tokenizer.model_max_length
    return int(limit) if limit and limit < _ENDLESS else None
