"""Tiny checkpoints with a head for multi-token prediction (MTP), and what such a head drafts.

The target is a model of transformers, drawn as in tools/architectures. Its last layer becomes the
block of the head. transformers does not run such heads, so `Mtp.drafts` is their specification:
plain torch, without a cache, one stream after the other.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel

from tests.engine.tiny_models import HIDDEN, LAYERS
from tools.architectures.draw import draw
from tools.architectures.reference_model import make_model, save
from tools.architectures.sizes import config_class
from tools.architectures.table import ROWS


@dataclass(frozen=True)
class Family:
    """A kind of MTP head.

    drafter: the architecture by which vLLM runs the head.
    row: the row of tools/architectures whose model of transformers the target is.
    names: what the checkpoint calls the parameters of `MtpHead`.
    prefix: what it puts before them, and before the block's.
    served: the architecture and the type that vLLM is told, if they are not the row's.
    hidden_first: the head reads the hidden state before the embedding.
    final_norm: the hidden states that it reads are after the target's last norm.
    feeds_norm: what the next draft reads of the head is after the head's norm.
    latent: attention is latent. vLLM's CPU build has blocks of 16 tokens for it, and no chunks.
    seed: of weights with which rounding decides no token.
    """

    drafter: str
    row: str
    names: Mapping[str, str] = field(hash=False)
    prefix: str = f"model.layers.{LAYERS}."
    served: tuple[str, str] | None = None
    hidden_first: bool = False
    final_norm: bool = True
    feeds_norm: bool = True
    latent: bool = False
    seed: int = 0


DEEPSEEK = {
    "embed_norm": "enorm",
    "hidden_norm": "hnorm",
    "proj": "eh_proj",
    "norm": "shared_head.norm",
}
MIMO = {
    "embed_norm": "token_layernorm",
    "hidden_norm": "hidden_layernorm",
    "proj": "input_proj",
    "norm": "final_layernorm",
}
FAMILIES = {
    "mimo": Family(
        "MiMoMTPModel",
        "Qwen2ForCausalLM",
        MIMO,
        "model.mtp_layers.0.",
        ("MiMoForCausalLM", "mimo"),
        hidden_first=True,
        final_norm=False,
    ),
    "deepseek_v3": Family(
        "DeepSeekMTPModel", "DeepseekV3ForCausalLM", DEEPSEEK, latent=True, seed=1
    ),
    "glm4_moe": Family("Glm4MoeMTPModel", "Glm4MoeForCausalLM", DEEPSEEK, feeds_norm=False),
}

SIZES = {"num_hidden_layers": LAYERS + 1, "first_k_dense_replace": 0}
"""Of the model whose last layer becomes the head's block. All its layers are alike."""

ATTENTION, SECOND, HIDDEN_PART = 0.7, 0.3, 0.2
"""Factors of what `make_alike` makes weak: attention, the second layer, the head's hidden part."""


class MtpHead(nn.Module):
    """The head. At a place it reads the target's hidden state there, and the next place's token."""

    def __init__(self, whole: PreTrainedModel, family: Family) -> None:
        super().__init__()
        self.family = family
        eps = whole.config.rms_norm_eps
        self.embed_norm = nn.RMSNorm(HIDDEN, eps=eps)
        self.hidden_norm = nn.RMSNorm(HIDDEN, eps=eps)
        self.norm = nn.RMSNorm(HIDDEN, eps=eps)
        self.proj = nn.Linear(2 * HIDDEN, HIDDEN, bias=False)
        self._parts = (whole.model.layers[LAYERS], whole.model.rotary_emb)  # not ours to name

    def forward(self, embeds: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Both are [places, hidden size], from the first place on. Returns the same shape."""
        block, rotary = self._parts
        embeds = torch.cat([torch.zeros_like(embeds[:1]), embeds[1:]])
        parts = [self.embed_norm(embeds), self.hidden_norm(hidden)]
        states = self.proj(torch.cat(parts[::-1] if self.family.hidden_first else parts, -1))
        states, number = states.unsqueeze(0), len(states)
        places = torch.arange(number).unsqueeze(0)
        out = block(
            states,
            attention_mask=torch.full((number, number), -math.inf).triu(1)[None, None],
            position_ids=places,
            position_embeddings=rotary(states, places),
        )
        result: torch.Tensor = out[0]
        return result


@dataclass(frozen=True)
class Mtp:
    """A target and its head, as modules of transformers."""

    target: PreTrainedModel
    head: MtpHead

    @torch.inference_mode()
    def drafts(
        self, streams: Sequence[Sequence[int]], weights: Sequence[float], number: int
    ) -> tuple[list[int], float]:
        """The next drafts of a group, greedy, and the least gap between their two best scores.

        streams: the tokens of each stream so far.
        weights: of each stream.
        """
        embed, head = self.target.model.embed_tokens, self.head
        inputs = [(embed(torch.tensor(s[1:])), self._hidden(s[:-1])) for s in streams]
        found: list[int] = []
        gap = math.inf
        for _ in range(number):
            outs = [head(*one) for one in inputs]
            normed = [head.norm(out) for out in outs]
            rows = [torch.log_softmax(self.target.lm_head(out[-1]), -1) for out in normed]
            scores = torch.stack([w * row for w, row in zip(weights, rows, strict=True)]).sum(0)
            best = scores.topk(2)
            gap = min(gap, float(best.values[0] - best.values[1]))
            found.append(int(best.indices[0]))
            token = embed(torch.tensor(found[-1:]))
            fed = normed if head.family.feeds_norm else outs
            inputs = [
                (torch.cat([embeds, token]), torch.cat([hidden, out[-1:]]))
                for (embeds, hidden), out in zip(inputs, fed, strict=True)
            ]
        return found, gap

    def _hidden(self, tokens: Sequence[int]) -> torch.Tensor:
        """[tokens, hidden size]: the target's states, as the head reads them."""
        model = self.target.model
        norm, read = model.norm, []
        hook = norm.register_forward_hook(
            lambda _module, args, out: read.append(out if self.head.family.final_norm else args[0])
        )
        try:
            model(torch.tensor([list(tokens)]), use_cache=False)
        finally:
            hook.remove()
        states: torch.Tensor = read[0][0]
        return states


def build(name: str, folder: Path) -> Mtp:
    """Write the checkpoint of a family to `folder`, float32, and return its modules."""
    family = FAMILIES[name]
    row = next(row for row in ROWS if row.label == family.row)
    whole = make_model(replace(row, sizes={**row.sizes, **SIZES}), family.seed)
    head = MtpHead(whole, family)
    draw(head.named_parameters(), family.seed, tied=False, gains={})
    make_alike(whole, head)
    save(whole, row, folder)
    add_head(folder, whole, head)
    whole.config.num_hidden_layers = LAYERS
    whole.model.layers = whole.model.layers[:LAYERS]
    return Mtp(whole, head)


@torch.no_grad()
def make_alike(whole: PreTrainedModel, head: MtpHead) -> None:
    """Let the head say, often, what the target says.

    Its block is the target's first layer, and it reads little but the embedding. What it does not
    have is weak in the target: attention to its first tokens, and the second layer.
    """
    first, second, block = whole.model.layers
    for layer in (first, second):
        layer.self_attn.o_proj.weight.mul_(ATTENTION)
    for name, weight in second.named_parameters():
        if "down_proj" in name:
            weight.mul_(SECOND)
    block.load_state_dict(first.state_dict())
    halves = head.proj.weight.split(HIDDEN, 1)
    hidden, embed = halves if head.family.hidden_first else halves[::-1]
    hidden.mul_(HIDDEN_PART)
    embed.copy_(torch.eye(HIDDEN))
    head.norm.weight.copy_(whole.model.norm.weight)


def add_head(folder: Path, whole: PreTrainedModel, head: MtpHead) -> None:
    """Turn the checkpoint of `whole` into that of a target with a head."""
    family, path = head.family, folder / "model.safetensors"
    last = f"model.layers.{LAYERS}."
    weights = {
        name.replace(last, family.prefix): weight for name, weight in load_file(path).items()
    }
    for ours, weight in head.named_parameters():
        part, _, kind = ours.rpartition(".")
        weights[f"{family.prefix}{family.names[part]}.{kind}"] = weight.detach().clone()
    if family.names is DEEPSEEK:
        weights[f"{family.prefix}embed_tokens.weight"] = weights[
            "model.embed_tokens.weight"
        ].clone()
        weights[f"{family.prefix}shared_head.head.weight"] = weights["lm_head.weight"].clone()
    save_file(weights, path, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config |= {"num_hidden_layers": LAYERS, "num_nextn_predict_layers": 1}
    if config.get("layer_types"):
        config["layer_types"] = config["layer_types"][:LAYERS]
    if family.served:
        architecture, config["model_type"] = family.served
        config_class(config["model_type"])
        config["architectures"] = [architecture]
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
