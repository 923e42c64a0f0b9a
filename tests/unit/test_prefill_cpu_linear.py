"""Layers and rows of encoders on a CPU (cfg_core/prefill_only/models/cpu_linear.py)."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from torch import nn
from transformers.activations import GELUActivation

from cfg_core.prefill_only.models import cpu_linear
from cfg_core.prefill_only.models.cpu_linear import PackedLinear, pack_linears, rows_of


class Intermediate(nn.Module):
    """The wide layer of a BERT-like model."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(128, 256)
        self.intermediate_act_fn = GELUActivation()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.intermediate_act_fn(self.dense(rows))
        return result


@pytest.mark.parametrize("gains", [True, False], ids=["oneDNN is faster", "MKL is faster"])
@torch.inference_mode()
def test_layers_are_packed_where_that_is_faster(
    gains: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no oneDNN")
    monkeypatch.setattr(cpu_linear, "_float32_gains", lambda: gains)
    torch.manual_seed(0)
    model = nn.Sequential(
        OrderedDict(wide=Intermediate(), narrow=nn.Linear(256, 128), small=nn.Linear(128, 2))
    )
    rows = torch.randn(12, 128)
    want = model(rows)
    assert pack_linears(model) == (2 if gains else 0)
    found = [type(layer) for layer in (model.wide.dense, model.narrow, model.small)]
    assert found == [PackedLinear, PackedLinear, nn.Linear] if gains else [nn.Linear] * 3
    torch.testing.assert_close(model(rows), want)


def test_a_text_that_comes_alone_has_few_rows_too_many() -> None:
    for tokens in range(1, 5000):
        assert tokens <= rows_of(tokens) < tokens + max(4, tokens / 8)


def test_kernels_are_few() -> None:
    """oneDNN keeps one for each number of rows and shape of a layer, 1,024 in all."""
    assert len({rows_of(tokens) for tokens in range(1, 513)}) <= 40
