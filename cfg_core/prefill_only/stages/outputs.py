"""Turns pooled values into outputs: dimensions, normalisation and activation.

A result that is not finite becomes an error of its own sequence only.
"""

from __future__ import annotations

import numpy as np

from cfg_core.errors import EngineError
from cfg_core.prefill_only.batch import Finished
from cfg_core.prefill_only.models.checkpoint import Checkpoint
from cfg_core.prefill_only.types import (
    FloatArray,
    Output,
    RequestOptions,
    SequenceState,
    SparseVector,
    Task,
)


def outputs_of(finished: Finished, checkpoint: Checkpoint) -> list[Output | EngineError]:
    """An output or an error for each sequence of a batch, in order.

    If the batch failed, each sequence has an error of its own.
    """
    return [
        _output(sequence, finished, place, checkpoint)
        for place, sequence in enumerate(finished.sequences)
    ]


def _output(
    sequence: SequenceState, finished: Finished, place: int, checkpoint: Checkpoint
) -> Output | EngineError:
    if finished.error is not None:
        failure = EngineError(f"the batch of input {sequence.index} failed: {finished.error}")
        failure.__cause__ = finished.error
        return failure
    values: dict[Task, FloatArray | SparseVector] = {}
    for task in sequence.options.tasks:
        value = _value(task, finished.values[task][place], sequence.options, checkpoint)
        if not np.isfinite(value.weights if isinstance(value, SparseVector) else value).all():
            return EngineError(
                f"the model computed NaN or infinity for input {sequence.index}: leave that input"
                " out, or serve the model with dtype float32."
            )
        values[task] = value
    return Output(values, len(sequence))


def _value(
    task: Task,
    value: FloatArray | SparseVector | None,
    options: RequestOptions,
    checkpoint: Checkpoint,
) -> FloatArray | SparseVector:
    assert value is not None, "the runner computes every task that a sequence asks for"
    if isinstance(value, SparseVector):
        return value
    if task == "classify":
        return value if options.raw_scores else activated(value, checkpoint.activation)
    if task == "token_embed":
        as_saved = checkpoint.late is None or checkpoint.normalize
        wanted = as_saved if options.normalize is None else options.normalize
        return normalized(value) if wanted else value
    if options.dimensions is not None:
        value = value[: options.dimensions]
    wanted = checkpoint.normalize if options.normalize is None else options.normalize
    return normalized(value) if wanted else value


def normalized(vectors: FloatArray) -> FloatArray:
    """Each row divided by its L2 norm. A row of zeros stays zero."""
    lengths = np.sqrt(np.square(vectors).sum(-1, keepdims=True))
    result: FloatArray = vectors / np.maximum(lengths, 1e-12)
    return result


def activated(logits: FloatArray, activation: str) -> FloatArray:
    """Scores [L] of the logits [L] of one sequence."""
    if activation == "identity":
        return logits
    with np.errstate(over="ignore"):
        if activation == "sigmoid":
            result: FloatArray = (1 / (1 + np.exp(-logits))).astype(np.float32)
            return result
    weights = np.exp(logits - logits.max())
    scores: FloatArray = (weights / weights.sum()).astype(np.float32)
    return scores
