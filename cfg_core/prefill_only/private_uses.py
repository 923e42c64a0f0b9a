"""What the prefill-only engine changes in transformers' models: one loaded model, never a class."""

from __future__ import annotations

from cfg_core.patching import NO_WAY, PrivateUse

USES = (
    PrivateUse(
        target="transformers:PreTrainedModel.base_model",
        by="cfg_core.prefill_only.stages.heads:HeadOnRows",
        process="encoder replica, or the program of `Engine`",
        reason="The model's own forward runs the classification head on hidden states that are "
        "already computed: its backbone is replaced with one that returns them.",
        upstream="transformers 5.19 has no way to run a head alone",
        test="tests/encoders/test_families.py",
        needed_while=NO_WAY,
    ),
    PrivateUse(
        target="transformers.models.mpnet.modeling_mpnet:MPNetEncoder.compute_position_bias",
        by="cfg_core.prefill_only.models.backbones:PackedMPNet",
        process="encoder replica, or the program of `Engine`",
        reason="MPNet's layers are called one by one, with its relative position bias inside our "
        "attention over packed sequences.",
        upstream="MPNet of transformers 5.19 takes no attention function",
        test="tests/encoders/test_families.py",
        needed_while=NO_WAY,
    ),
    PrivateUse(
        target="torch.nn:Linear.forward",
        by="cfg_core.prefill_only.models.cpu_linear:pack_linears",
        process="encoder replica, or the program of `Engine`, on a CPU",
        reason="Weights are packed once for oneDNN where that is faster, as torch.compile does.",
        upstream="torch 2.13 packs them again in each call",
        test="tests/encoders/test_minilm.py",
        needed_while=NO_WAY,
    ),
    PrivateUse(
        target="torch.nn:Linear.forward",
        by="cfg_core.prefill_only.models.int8_linear:quantize_linears",
        process="encoder replica, or the program of `Engine`, with `quantization: int8`",
        reason="Layers are computed in 8 bits by oneDNN, as torch.compile does for quantised "
        "models, with a scale for each token.",
        upstream="torch 2.13's own dynamic quantisation has one scale for a batch",
        test="tests/encoders/test_int8.py",
        needed_while=NO_WAY,
    ),
)
