"""A head for multi-token prediction (MTP) for the embedded story model, trained for a minute or so.

The checkpoint is MiMo's: Qwen2's layers, which are Llama's with biases of zero here, and one head,
which reads the hidden state of a place and the next token, and predicts the token after that. Only
the head is trained, on the distributions of the target, so the target stays what it is.
"""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from models.training.corpus import LESSONS
from models.training.train import SEED, batches

from ..llm import STORIES

RATE = 2e-3
AHEAD = 2
"""Drafts that the head is trained to make in a row."""


class Head(nn.Module):
    """The names of its parameters are those of MiMo's checkpoints."""

    def __init__(self, target: Any) -> None:
        super().__init__()
        size, eps = target.config.hidden_size, target.config.rms_norm_eps
        self.token_layernorm = nn.RMSNorm(size, eps=eps)
        self.hidden_layernorm = nn.RMSNorm(size, eps=eps)
        self.input_proj = nn.Linear(2 * size, size, bias=False)
        self.block = LlamaDecoderLayer(target.config, layer_idx=0)
        self.block.load_state_dict(target.model.layers[-1].state_dict())
        self.final_layernorm = nn.RMSNorm(size, eps=eps)
        self._rotary = (target.model.rotary_emb,)

    def forward(self, embeds: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Both [texts, places, hidden size]: of the next places' tokens, and of these places."""
        first = torch.zeros_like(embeds[:, :1])  # vLLM reads no token at the first place
        embeds = torch.cat([first, embeds[:, 1:]], 1)
        parts = [self.hidden_layernorm(hidden), self.token_layernorm(embeds)]
        states, places = self.input_proj(torch.cat(parts, -1)), torch.arange(embeds.shape[1])
        mask = torch.full((len(places), len(places)), float("-inf")).triu(1)[None, None]
        out = self.block(
            states,
            attention_mask=mask,
            position_ids=places[None],
            position_embeddings=self._rotary[0](states, places[None]),
        )
        made: torch.Tensor = self.final_layernorm(out[0] if isinstance(out, tuple) else out)
        return made


def trained(seconds: float) -> tuple[Any, Head, float]:
    """The target, its head, and the last loss: nats of the head's distribution from the target's.

    seconds: how long to train.
    """
    torch.manual_seed(SEED)
    target = AutoModelForCausalLM.from_pretrained(STORIES, dtype=torch.float32)
    head = Head(target.requires_grad_(False))
    optimizer = torch.optim.AdamW(head.parameters(), lr=RATE)
    tokenizer = Tokenizer.from_file(str(STORIES / "tokenizer.json"))
    start, loss = time.monotonic(), torch.tensor(0.0)
    for ids, _ in batches(tokenizer, SEED + 77, LESSONS[-1]):
        left = 1 - (time.monotonic() - start) / seconds
        if left <= 0:
            break
        optimizer.param_groups[0]["lr"] = RATE * max(left, 0.05)
        loss = _loss(target, head, ids)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
    return target, head, float(loss.detach())


def _loss(target: Any, head: Head, ids: torch.Tensor) -> torch.Tensor:
    """Of AHEAD drafts in a row, each made of the states of the one before."""
    hidden, logits = _states(target, ids)
    embeds = target.model.embed_tokens(ids)
    states, total = hidden[:, :-1], torch.tensor(0.0)
    for draft in range(1, AHEAD + 1):
        states = head(embeds[:, draft:], states[:, : ids.shape[1] - draft])
        wanted = logits[:, draft:].softmax(-1)
        made = target.lm_head(states).log_softmax(-1)
        total = total + nn.functional.kl_div(made, wanted, reduction="sum") / ids.numel()
        states = states[:, :-1]
    return total / AHEAD


@torch.no_grad()
def _states(target: Any, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What the head reads, the hidden states in front of the last norm; and the logits."""
    read: list[torch.Tensor] = []
    hook = target.model.norm.register_forward_hook(lambda _module, args, _out: read.append(args[0]))
    try:
        logits = target(ids, use_cache=False).logits
    finally:
        hook.remove()
    return read[0], logits


def save(target: Any, head: Head, folder: Path) -> None:
    """Write the checkpoint of both to `folder`, float32."""
    weights = {name: weight.clone() for name, weight in target.state_dict().items()}
    for name, weight in head.state_dict().items():
        weights[f"model.mtp_layers.0.{name.removeprefix('block.')}"] = weight.clone()
    for name in [name for name in weights if name.endswith("_proj.weight")]:
        if name.rsplit(".", 2)[1] in ("q_proj", "k_proj", "v_proj"):
            weights[name.removesuffix("weight") + "bias"] = torch.zeros(len(weights[name]))
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((STORIES / "config.json").read_text())
    config |= {
        "architectures": ["MiMoForCausalLM"],
        "model_type": "mimo",
        "attention_bias": True,
        "num_nextn_predict_layers": 1,
        "dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(STORIES / name, folder / name)
