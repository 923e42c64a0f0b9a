"""Guided log-probabilities at a vocabulary of 262,144."""

from __future__ import annotations

from pathlib import Path

from tests.real_size.at_real_size import Reference, assert_logprobs_are_right, ids, started


def test_log_probabilities_of_all_streams_are_those_of_the_reference(
    largest_model_path: Path,
) -> None:
    with started(largest_model_path) as engine:
        prompt, negative = [262_143, *ids("p", 30)], ids("n", 20)
        assert_logprobs_are_right(engine, Reference(largest_model_path), prompt, negative)
