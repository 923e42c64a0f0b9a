"""Text to token ids, with the checkpoint's own fast tokenizer. Never truncates and never pads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cfg_core.errors import ConfigError
from cfg_core.prefill_only.models.checkpoint import Checkpoint

_SHORT_TEXT = 2000
"""Characters. The tokenizers library holds Python's lock while it encodes a single text, and not
for a batch."""
_ENDLESS = 10**9  # tokenizers write 1e30 as model_max_length if they do not know it


class Tokenizer:
    """Thread-safe: the tokenizers library is, and nothing is changed after the start."""

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
        self.splits_words = _splits_words(self._backend)
        """Whether no token reaches over white space: a part of a text then has the tokens of that
        part."""
        self.gives_token_types = "token_type_ids" in tokenizer.model_input_names

    def encode(self, texts: Sequence[str | tuple[str, str]]) -> list[Any]:
        """An encoding (`ids`, `type_ids`, `special_tokens_mask`) of each text or pair, special
        tokens included."""
        if self._lower_case:
            texts = [
                text.lower() if isinstance(text, str) else (text[0].lower(), text[1].lower())
                for text in texts
            ]
        if len(texts) == 1 and isinstance(texts[0], str) and len(texts[0]) <= _SHORT_TEXT:
            return [self._backend.encode(texts[0])]
        encodings: list[Any] = self._backend.encode_batch(list(texts))
        return encodings

    def token_ids(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = self._backend.encode_batch([text], add_special_tokens=add_special_tokens)[
            0
        ].ids
        return ids

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


def _splits_words(backend: Any) -> bool:
    text = "one two three"
    if backend.normalizer is not None:
        text = backend.normalizer.normalize_str(text)
    return (
        backend.pre_tokenizer is not None and len(backend.pre_tokenizer.pre_tokenize_str(text)) >= 3
    )


def _limit(tokenizer: Any) -> int | None:
    """The longest input that the tokenizer's own configuration admits; None if it does not say."""
    limit = tokenizer.model_max_length
    return int(limit) if limit and limit < _ENDLESS else None
