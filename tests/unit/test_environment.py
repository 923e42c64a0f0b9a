"""Variables that a replica sets for its engine, where its environment has none."""

from __future__ import annotations

from deployments.generator.environment import set_defaults

NGRAM = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}


def test_defaults() -> None:
    found: dict[str, str] = {}
    set_defaults(found, {})
    assert found == {"VLLM_MAX_STOP_STRINGS": "64"}
    set_defaults(found, {"speculative_config": {"method": "draft_model"}})
    assert found == {"VLLM_MAX_STOP_STRINGS": "64"}


def test_one_thread_of_numba_drafts_n_grams() -> None:
    found: dict[str, str] = {}
    set_defaults(found, NGRAM)
    assert found["NUMBA_NUM_THREADS"] == "1"


def test_vllm_takes_the_method_from_the_name_of_the_model() -> None:
    found: dict[str, str] = {}
    set_defaults(found, {"speculative_config": {"model": "ngram"}})
    assert found["NUMBA_NUM_THREADS"] == "1"


def test_a_value_that_vllm_refuses_is_left_to_it() -> None:
    found: dict[str, str] = {}
    set_defaults(found, {"speculative_config": "ngram"})
    assert "NUMBA_NUM_THREADS" not in found


def test_what_the_environment_says_stays() -> None:
    given = {"VLLM_MAX_STOP_STRINGS": "4", "NUMBA_NUM_THREADS": "8"}
    found = dict(given)
    set_defaults(found, NGRAM)
    assert found == given
