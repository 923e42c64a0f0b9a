"""What a row of the table is: one architecture name, and how its tiny model is made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

OracleName = Literal["hf", "stock"]

HF: OracleName = "hf"
"""The reference loop of cfg_core/reference.py on the model of transformers, float32."""
STOCK: OracleName = "stock"
"""vLLM without the plugin: its log-probabilities of both streams at each token of the text."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One architecture.

    name: its name in vLLM's registry.
    kinds: what is special in it: `dense`, `moe`, `mla`, `sliding`, `sinks`, `recurrent`, `hybrid`
        (attention beside recurrent layers), `vision-language`...
    model_type: of its config. One that transformers and vLLM do not know gets a stand-in: a config
        class without code, whose fields are `sizes` alone.
    sizes: fields of the config beside the generic ones of sizes.py. The value DROP takes a generic
        one away.
    hf_class: name of the model's class in transformers, if it is not `name`. With the oracle STOCK:
        the class that makes the weights, if vLLM does not draw them.
    hf_sizes: fields of the config that the model of transformers needs to be what vLLM's is.
    oracle: HF or STOCK.
    note: why the oracle is STOCK, or what else a reader should know.
    gains: pattern of parameter names -> factor, beside the rules of draw.py.
    options: engine options.
    special_tokens: what the tokenizer must have, too.
    title: what the row is called, if it is not `name`.
    missing: why it cannot run on a CPU. Its result has the error.
    """

    name: str
    kinds: tuple[str, ...]
    model_type: str
    sizes: Mapping[str, Any] = field(default_factory=dict, hash=False)
    hf_class: str | None = None
    hf_sizes: Mapping[str, Any] = field(default_factory=dict, hash=False)
    oracle: OracleName = HF
    note: str = ""
    dtype: str = "float32"
    gains: Mapping[str, float] = field(default_factory=dict, hash=False)
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)

    special_tokens: tuple[str, ...] = ()
    title: str = ""
    missing: str = ""

    @property
    def label(self) -> str:
        """What the row is called in results and on the page."""
        return self.title or self.name


DROP = object()
"""As the value of a size: leave the class's own default."""

PLAIN_ROTARY = {"compilation_config": {"custom_ops": ["-rotary_embedding"]}}
"""Rotary positions in PyTorch.

vLLM's kernel for CPUs takes the second last stride of the queries for that of a token, which is
wrong if they have three dimensions: tokens then overwrite each other.
"""
ROTARY_NOTE = "rotary positions in PyTorch: vLLM's kernel for CPUs is wrong for this model"
