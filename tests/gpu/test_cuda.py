"""The plugin on an NVIDIA GPU.

CUDA graphs are on and off, scheduling is sync and async, and two GPUs are used if there are two.

    pytest tests/gpu

The model of Hugging Face transformers on the same GPU reads the engine's tokens, with both streams
at once. At every position, the guided score of the token that the engine chose must be within
rounding of the best score. In bfloat16, two correct programs may choose differently if two scores
are nearly equal. Along the engine's own text, they may not differ by more than rounding.
"""

from __future__ import annotations

import gc
import itertools
import random

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

NEW_TOKENS = 32
SCALES = (-1.0, 0.0, 0.5, 1.5, 3.0, 7.5)
ROUNDING = {"bfloat16": 0.15, "float32": 0.02}
"""The largest allowed error of a log-probability.

bfloat16: at logits of about 20. float32: with products in TensorFloat-32.
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Llama with random weights, wide enough for the kernels that real models use."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    model.lm_head.weight.data.normal_(std=5 / 512**0.5)
    where = tmp_path_factory.mktemp("llama")
    model.save_pretrained(where)
    return where


@pytest.fixture(scope="module")
def pairs():
    rng = random.Random(3)
    lengths = [(1, 40), (40, 1), (33, 33), (100, 17), (17, 100), (150, 120), (16, 48), (300, 64)]
    return [tuple([rng.randrange(4, 4096) for _ in range(n)] for n in both) for both in lengths]


def generate(folder, pairs, dtype, **options):
    from vllm import LLM, SamplingParams

    from cfg_core.vllm_plugin import guided_engine_args

    llm = LLM(
        str(folder),
        skip_tokenizer_init=True,
        dtype=dtype,
        max_model_len=512,
        gpu_memory_utilization=0.3,
        max_num_batched_tokens=256,
        max_num_seqs=32,
        **options,
        **guided_engine_args(),
    )
    try:
        prompts, params = [], []
        for (prompt, negative), scale in itertools.product(pairs, SCALES):
            extra = {"guidance_scale": scale, "negative_prompt_token_ids": negative}
            prompts.append({"prompt_token_ids": prompt})
            params.append(
                SamplingParams(
                    temperature=0,
                    max_tokens=NEW_TOKENS,
                    ignore_eos=True,
                    extra_args=extra,
                    detokenize=False,
                )
            )
        return [
            list(out.outputs[0].token_ids) for out in llm.generate(prompts, params, use_tqdm=False)
        ]
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        torch.cuda.empty_cache()


@torch.inference_mode()
def regrets(folder, pairs, dtype, outputs):
    """For each request, how far its worst token is below the best score.

    The unit is the rounding error.
    """
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype), device_map="cuda"
    ).eval()
    out = []
    for ((prompt, negative), scale), tokens in zip(
        itertools.product(pairs, SCALES), outputs, strict=True
    ):
        rows = []
        for start in (prompt, negative):
            ids = torch.tensor([[*start, *tokens[:-1]]], device="cuda")
            rows.append(torch.log_softmax(model(ids).logits[0, len(start) - 1 :].float(), dim=-1))
        scores = rows[1] + scale * (rows[0] - rows[1])
        chosen = scores.gather(-1, torch.tensor(tokens, device="cuda")[:, None])[:, 0]
        bound = 2 * ROUNDING[dtype] * (abs(scale) + abs(1 - scale))
        out.append(float((scores.max(-1).values - chosen).max()) / bound)
    return out


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_tokens_are_those_of_the_reference(folder, pairs, dtype, eager, asynchronous):
    outputs = generate(folder, pairs, dtype, enforce_eager=eager, async_scheduling=asynchronous)
    assert max(regrets(folder, pairs, dtype, outputs)) <= 1


@pytest.mark.parametrize(
    "options", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=["tp2", "pp2"]
)
def test_two_gpus(folder, pairs, options):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two NVIDIA GPUs")
    outputs = generate(folder, pairs, "bfloat16", **options)
    assert max(regrets(folder, pairs, "bfloat16", outputs)) <= 1


def test_the_check_can_fail(folder, pairs):
    """The text of another scale is far from the best scores."""
    outputs = generate(folder, pairs[:1], "bfloat16", enforce_eager=True)
    assert max(regrets(folder, pairs[:1], "bfloat16", outputs[::-1])) > 1
