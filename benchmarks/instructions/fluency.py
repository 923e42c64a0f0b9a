"""What guidance may cost: how odd a text is to the model without guidance, and how repetitive.

The perplexity of an answer is that of the unguided model after the *conditional* prompt. An obeyed
odd instruction, such as capitals only, is odd after any neutral prompt, and must not count as bad
fluency. It follows that unguided answers are the natural ones here. The token that ends an answer
does not count, because an answer that is short as told may end where the unguided model would go
on.
"""

from __future__ import annotations

from collections.abc import Sequence

BATCH = 16
"""Answers that one forward pass scores."""


def repetition(tokens: Sequence[int], n: int = 4) -> float | None:
    """The share of n-grams of tokens that occurred before: 1 - distinct / all.

    None if there is no n-gram.
    """
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else None


class Scorer:
    """The model in transformers, to score texts by teacher forcing."""

    def __init__(self, folder: str, dtype: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
        self._model = model.to(self._device).eval()

    def losses(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[float | None]:
        """For each (prompt, answer) the mean of -log p over the answer's tokens, in nats.

        None for an empty answer.
        """
        order = sorted(
            (i for i, (_, answer) in enumerate(pairs) if answer),
            key=lambda i: sum(map(len, pairs[i])),
        )
        losses: list[float | None] = [None] * len(pairs)
        for first in range(0, len(order), BATCH):
            batch = order[first : first + BATCH]
            for i, loss in zip(batch, self._batch([pairs[i] for i in batch]), strict=True):
                losses[i] = loss
        return losses

    def _batch(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[float]:
        """Padded on the right, which causal attention does not see."""
        import torch

        texts = [torch.tensor(prompt + answer) for prompt, answer in pairs]
        padded = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True).to(self._device)
        with torch.inference_mode():
            hidden = self._model.model(padded, use_cache=False).last_hidden_state
            losses = []
            for row, (prompt, answer) in zip(hidden, pairs, strict=True):
                first = len(prompt) - 1  # the state that predicts the answer's first token
                logits = self._model.lm_head(row[first : first + len(answer)]).float()
                targets = torch.tensor(answer, device=self._device)
                losses.append(float(torch.nn.functional.cross_entropy(logits, targets)))
        return losses
