"""The pictures, their splits, and pictures as tokens and as text.

`digits.npz` holds 1797 pictures of 8 x 8 pixels with values from 0 to 16: the test part of
"Optical Recognition of Handwritten Digits" by E. Alpaydin and C. Kaynak (UCI Machine Learning
Repository, 1998, doi 10.24432/C50P49, license CC BY 4.0), as scikit-learn's `load_digits` has it.

    .venv/bin/python -m examples.digits.images     # write the file again, from scikit-learn

Pixels are rounded to LEVELS shades. A pixel is one token and one character, in raster order, so
that a text of 64 characters in lines of 8 is a picture already. A prompt is one token: `<0>` to
`<9>`, or `<null>` for no class.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.oracle import oracle_packages

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

FOLDER: Final = Path(__file__).resolve().parent
DATA: Final = FOLDER / "digits.npz"
MODEL: Final = FOLDER / "model"

SIDE: Final = 8
PIXELS: Final = SIDE * SIDE
CLASSES: Final = 10
RAMP: Final = ".-+x#"
"""The characters of the shades, from light to dark."""
LEVELS: Final = len(RAMP)
DARKEST: Final = 16
"""In `digits.npz`."""
NULL: Final = "<null>"
VOCABULARY: Final = (*RAMP, *(f"<{label}>" for label in range(CLASSES)), NULL, "<unk>")
"""Token id -> text. The pixels come first, so a pixel's token id is its shade."""
PIXEL_IDS: Final = list(range(LEVELS))
NULL_ID: Final = VOCABULARY.index(NULL)

SPLIT_SEED: Final = 8
NUM_GENERATOR: Final = 1000
NUM_JUDGE: Final = 400

Array = NDArray[Any]


class Split:
    """Pictures [n, 64] uint8 of shades from 0, and their classes [n] uint8."""

    def __init__(self, images: Array, labels: Array) -> None:
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.labels)


def splits() -> dict[str, Split]:
    """Which pictures the generator learns from, which the judge does, and which neither sees."""
    with np.load(DATA) as data:
        images, labels = data["images"] / DARKEST, data["labels"]
    images = np.rint(images * (LEVELS - 1)).astype(np.uint8)
    order = np.random.default_rng(SPLIT_SEED).permutation(len(labels))
    ends = (NUM_GENERATOR, NUM_GENERATOR + NUM_JUDGE)
    parts = zip(("generator", "judge", "held out"), np.split(order, ends), strict=True)
    return {name: Split(images[part], labels[part]) for name, part in parts}


def class_id(label: int) -> int:
    """The token that asks for this class."""
    return VOCABULARY.index(f"<{label}>")


def to_text(image: Array) -> str:
    return "".join(RAMP[value] for value in image)


def from_text(text: str) -> Array:
    """The picture [64] uint8 that `to_text` wrote. Raises ValueError for another character."""
    return np.array([RAMP.index(character) for character in text], np.uint8)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character, but for the prompts."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {text: number for number, text in enumerate(VOCABULARY)}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    core.decoder = decoders.Fuse()
    core.add_special_tokens(list(VOCABULARY[LEVELS:]))
    return PreTrainedTokenizerFast(
        tokenizer_object=core, unk_token="<unk>", clean_up_tokenization_spaces=False
    )


def main() -> None:
    with oracle_packages():
        from sklearn.datasets import load_digits

        images, labels = load_digits(return_X_y=True)
    np.savez_compressed(DATA, images=images.astype(np.uint8), labels=labels.astype(np.uint8))


if __name__ == "__main__":
    main()
