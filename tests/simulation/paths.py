"""The paths through vLLM that are simulated, and configurations for them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from transformers import LlamaConfig
from vllm.engine.arg_utils import EngineArgs

from cfg_core.vllm_plugin import guided_engine_args
from tests.simulation.texts import VOCAB

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class EnginePath(NamedTuple):
    """A path through vLLM: which runner's protocol, async scheduling, pipeline stages."""

    v2: bool = False
    asynchronous: bool = False
    stages: int = 1
    drafts: int = 0
    states: str = ""
    """Recurrent states beside attention: vLLM's `mamba_cache_mode`; empty for none."""

    @property
    def name(self) -> str:
        words = [
            "v2" if self.v2 else "v1",
            *["async"] * self.asynchronous,
            *[f"pp{self.stages}"] * (self.stages > 1),
            *[f"drafts{self.drafts}"] * (self.drafts > 0),
            *[f"states-{self.states}"] * bool(self.states),
        ]
        return "-".join(words)


V1 = EnginePath()
PATHS = [
    V1,
    EnginePath(asynchronous=True),
    EnginePath(stages=2),  # vLLM has no async scheduling on V1 with a pipeline
    *(
        EnginePath(True, asynchronous, stages)
        for asynchronous in (False, True)
        for stages in (1, 2, 4)
    ),
    *(
        EnginePath(v2, asynchronous, drafts=3)
        for v2 in (False, True)
        for asynchronous in (False, True)
    ),
    *(
        EnginePath(v2, asynchronous, drafts=3, states=states)
        for states in ("none", "align")
        for v2 in (False, True)
        for asynchronous in (False, True)
    ),
    *(
        EnginePath(v2, asynchronous, stages, states=states)
        for states in ("none", "align")
        for v2, asynchronous, stages in (
            (False, False, 1),
            (False, True, 1),
            (False, False, 2),
            (True, False, 1),
            (True, True, 1),
            (True, True, 4),
        )
    ),
]


def make_config(
    folder: Path, kv_split: str = "elastic", drafts: int = 0, **engine_args: Any
) -> VllmConfig:
    """A VllmConfig of a model that is never loaded."""
    if not (folder / "config.json").exists():
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=64,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=2,
            architectures=["LlamaForCausalLM"],
            max_position_embeddings=512,
            dtype="float32",
        ).save_pretrained(folder)
    if drafts:
        engine_args["speculative_config"] = {
            "method": "draft_model",
            "model": str(folder),
            "num_speculative_tokens": drafts,
        }
    defaults = {
        "max_model_len": 256,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 64,
        "block_size": 16,
    }
    return EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        enforce_eager=True,
        kv_cache_memory_bytes=1 << 26,
        **{**defaults, **engine_args, **guided_engine_args(kv_split)},
    ).create_engine_config()


@contextmanager
def runner_version(v2: bool) -> Iterator[None]:
    """While open, every new VllmConfig is made for this runner.

    A config that is made for the other runner is not possible on a CPU.
    """
    before = os.environ.get("VLLM_USE_V2_MODEL_RUNNER")
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(int(v2))
    try:
        yield
    finally:
        del os.environ["VLLM_USE_V2_MODEL_RUNNER"]
        if before is not None:
            os.environ["VLLM_USE_V2_MODEL_RUNNER"] = before
