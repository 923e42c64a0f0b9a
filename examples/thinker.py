"""Make a model that thinks from one that does not, to try `guidance_in` and reasoning parsers.

    python examples/thinker.py models/SmolLM2-135M-Instruct models/thinker

Two special tokens that the model never uses are renamed to `<think>` and `</think>`, and its chat
template opens the reasoning. The weights are the same, so the model was not trained to close it:
`thinking_token_budget` does.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

RENAMED = {"<repo_name>": "<think>", "<reponame>": "</think>"}
ANSWER = "<|im_start|>assistant\n"
"""How the template begins an answer."""
OPENED = ANSWER + "<think>\n"


def make(source: Path, folder: Path) -> None:
    """Copy the model `source` into `folder`, which is made, with a link to its weights.

    Raises ValueError if `source` is not a SmolLM2-Instruct.
    """
    template = (source / "chat_template.jinja").read_text()
    if template.count(ANSWER) != 1:
        raise ValueError(f"{source}: its template does not have {ANSWER!r} once. Use SmolLM2.")
    folder.mkdir(parents=True)
    for file in source.iterdir():
        if file.suffix == ".safetensors":
            (folder / file.name).symlink_to(file.resolve())
        else:
            shutil.copy(file, folder)
    (folder / "chat_template.jinja").write_text(template.replace(ANSWER, OPENED))
    _rename_tokens(folder / "tokenizer.json")


def _rename_tokens(file: Path) -> None:
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    for token in content["added_tokens"]:
        if token["content"] in RENAMED:
            vocabulary[RENAMED[token["content"]]] = vocabulary.pop(token["content"])
            token.update(content=RENAMED[token["content"]], special=False)
    file.write_text(json.dumps(content))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path, help="the folder of SmolLM2-135M-Instruct")
    parser.add_argument("folder", type=Path, help="the folder that is made")
    args = parser.parse_args()
    make(args.source, args.folder)
