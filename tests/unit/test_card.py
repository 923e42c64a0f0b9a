"""benchmarks/card.py: what a benchmark says of the machine and the versions that it ran with."""

from card import card, oracle_version


def test_every_field_is_known():
    assert all(card().values())
    assert {"machine", "torch", "transformers", "commit", "date"} <= card().keys()


def test_packages_that_benchmarks_only_compare_with_have_a_version():
    assert int(oracle_version("sentence-transformers").split(".")[0]) >= 6
