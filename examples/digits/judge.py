"""Measure pictures: does a judge see the digit that was asked for, and how varied are they?

The judge is scikit-learn's support vector classifier, trained on pictures that the generator did
not learn from. The generator saw pictures shifted to the left and right, and makes such ones, so
the judge learns from shifted ones, too, and the held-out pictures are shifted at random.

- accuracy: the share of pictures in which the judge sees the digit asked for, with Wilson's
  interval at 95%.
- distance: the mean distance between two pictures of one class (Euclidean; shades are 0 to 4).
- kinds: the Vendi score (Friedman and Dieng, arXiv 2210.02410) of the pictures of one class, which
  is the number of different pictures that they are worth. It is 1 if all are equal, and BLOCK if
  none is like another. `WIDTH` says how near two pictures are alike.
- copies: the share of pictures that are nearer to a picture that the generator learned from than
  all but 1 in 100 of the held-out pictures are.

Distance and kinds are means over blocks of BLOCK pictures of each class, with a standard error over
the blocks.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from benchmarks.oracle import oracle_packages
from examples.digits.images import CLASSES, Array, Split, splits
from examples.digits.train import shift

BLOCK = 30
"""Pictures of a class that are compared with each other: as many as the held-out ones have."""
WIDTH = 4.0
"""Pictures at this distance are alike by exp(-1/2)."""
COPY_QUANTILE = 0.01
SHIFT_SEED = 0
GAMMA = 0.016
"""Of the classifier's kernel: scikit-learn's example takes 0.001 for pixels from 0 to 16."""


def all_shifts(images: Array) -> Array:
    """The pictures [n, 64] to the left, as they are, and to the right: [3 n, 64]."""
    return np.concatenate([shift(images, np.full(len(images), by)) for by in (-1, 0, 1)])


class Judge:
    """Trained on the split "judge"."""

    def __init__(self) -> None:
        with oracle_packages():
            from scipy.spatial.distance import cdist
            from scipy.stats import binomtest
            from sklearn.svm import SVC

        self._cdist, self._binomtest = cdist, binomtest
        parts = splits()
        own, held_out = parts["judge"], parts["held out"]
        columns = np.random.default_rng(SHIFT_SEED).integers(-1, 2, size=len(held_out))
        self._held_out = Split(shift(held_out.images, columns), held_out.labels)
        labels = np.tile(own.labels, 3)
        self._classifier = SVC(gamma=GAMMA).fit(all_shifts(own.images), labels)
        self._learned = all_shifts(parts["generator"].images)
        near = self._to_learned(self._held_out.images)
        self._copy_distance = float(np.quantile(near, COPY_QUANTILE))

    def real(self) -> dict[str, Any]:
        """What is measured of the held-out pictures: the best that a generator can do."""
        return self.measure(self._held_out)

    def measure(self, found: Split) -> dict[str, Any]:
        right = self._classifier.predict(found.images) == found.labels
        low, high = self.interval(int(right.sum()), len(right))
        by_class = [found.images[found.labels == label] for label in range(CLASSES)]
        blocks = min(map(len, by_class)) // BLOCK
        parts = [
            [images[BLOCK * i : BLOCK * (i + 1)] for images in by_class] for i in range(blocks)
        ]
        distances = [np.mean([self._distance(images) for images in part]) for part in parts]
        kinds = [np.mean([self._kinds(images) for images in part]) for part in parts]
        near = self._to_learned(found.images)
        return {
            "images": len(found),
            "accuracy": float(right.mean()),
            "accuracy_interval": [low, high],
            "accuracy_by_class": [
                float(right[found.labels == label].mean()) for label in range(CLASSES)
            ],
            "distance": float(np.mean(distances)),
            "distance_error": _standard_error(distances),
            "kinds": float(np.mean(kinds)),
            "kinds_error": _standard_error(kinds),
            "copies": float((near < self._copy_distance).mean()),
            "equal_to_learned": float((near == 0).mean()),
            "distinct": len(np.unique(found.images, axis=0)) / len(found),
        }

    def interval(self, right: int, of: int) -> tuple[float, float]:
        """Wilson's interval of a share, at 95%."""
        low, high = self._binomtest(right, of).proportion_ci(method="wilson")
        return float(low), float(high)

    def _to_learned(self, images: Array) -> Array:
        """Distance of each picture to the nearest that the generator learned from, if shifted."""
        nearest: Array = self._cdist(images, self._learned).min(axis=1)
        return nearest

    def _distance(self, images: Array) -> float:
        count = len(images)
        return float(self._cdist(images, images).sum() / (count * (count - 1)))

    def _kinds(self, images: Array) -> float:
        """exp of the entropy of the eigenvalues of the likenesses, divided by their number."""
        likeness = np.exp(-(self._cdist(images, images) ** 2) / (2 * WIDTH**2))
        values = np.linalg.eigvalsh(likeness / len(images))
        values = values[values > 0]
        return float(np.exp(-(values * np.log(values)).sum()))


def _standard_error(values: list[Any]) -> float | None:
    """Of the mean, or None for one value."""
    return float(np.std(values, ddof=1) / math.sqrt(len(values))) if len(values) > 1 else None
