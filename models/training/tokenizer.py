"""The byte-level BPE tokenizer shared by both models, with the chat template.

Any Unicode text can be encoded (256 byte tokens, no unknown). The begin-of-text token is added
once: by the post-processor in completions, by the template in chats (which are encoded without
special tokens). `Once` after the prompt's newline is a token of its own, so prompt and story may be
encoded apart or together.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from .corpus import BOS, EOS
from .topics import TOPICS

PAD = "<pad>"
SPECIAL = (BOS, EOS, PAD, "<|system|>", "<|user|>", "<|assistant|>")
VOCAB_SIZE = 2048
WORD_REPEATS = 50
MAX_TOKENS = 512

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>\n' + message['content'] | trim }}"
    "{{ (eos_token if message['role'] == 'assistant' else '') + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Merges learned from the texts; topic words count extra, so that nearly each of them becomes
    one token."""
    topic_words = [" " + word for words in TOPICS.values() for word in sorted(words)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL),
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator([*texts, *topic_words * WORD_REPEATS], trainer)
    bos = (BOS, tokenizer.token_to_id(BOS))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[bos]
    )
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """`tokenizer.json` and a `tokenizer_config.json` that holds the chat template."""
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "model_max_length": MAX_TOKENS,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
