"""upstream_tests.py: how two runs of vLLM's tests are compared, and what is unpacked."""

import io
import tarfile

import upstream_report
import upstream_tests
from upstream_plugin import Result, Results
from upstream_report import Comparison

PASSED, FAILED = Result(), Result("failed", "AssertionError")
KNOWN = f"a.py::{next(iter(upstream_report.KNOWN))}[True]"


def compare(**tests):
    """A comparison of tests, each given as (with vLLM's scheduler, with ours)."""
    stock = Results("1", {name: pair[0] for name, pair in tests.items() if pair[0]})
    ours = Results("1", {name: pair[1] for name, pair in tests.items() if pair[1]})
    return Comparison(stock, ours)


def test_each_test_is_counted_once():
    compared = compare(
        same=(PASSED, PASSED),
        hub=(FAILED, FAILED),
        wrong=(PASSED, FAILED),
    )
    assert list(compared.both("passed")) == ["same"]
    assert list(compared.both("failed")) == ["hub"]
    assert compared.different() == {"wrong": "passed  -> failed AssertionError"}


def test_a_test_that_ran_only_once_is_different():
    assert set(compare(a=(PASSED, None), b=(None, PASSED)).different()) == {"a", "b"}


def test_a_test_that_passes_only_with_ours_is_different():
    assert list(compare(t=(FAILED, PASSED)).different()) == ["t"]


def test_a_known_difference_is_one_that_fails_with_ours():
    assert list(compare(**{KNOWN: (PASSED, FAILED)}).known()) == [KNOWN]
    assert list(compare(**{KNOWN: (FAILED, PASSED)}).different()) == [KNOWN]


def test_the_second_run_of_a_test_counts():
    compared = compare(a=(PASSED, FAILED), b=(PASSED, PASSED))
    compared.replace(Results("1", {"a": PASSED}), Results("1", {"a": PASSED}))
    assert list(compared.both("passed")) == ["a", "b"]


def test_results_survive_their_file(tmp_path):
    results = Results("1", {"t": FAILED}, {"a.py": "ImportError"})
    results.write(tmp_path / "results.json")
    assert Results.read(tmp_path / "results.json") == results


def test_only_the_tests_and_their_settings_are_unpacked(tmp_path):
    with tarfile.open(tmp_path / "vllm-1.tar.gz", "w:gz") as archive:
        for name in ("tests/v1/a.py", "pyproject.toml", "setup.py", "vllm/tests/b.py"):
            archive.addfile(tarfile.TarInfo(f"vllm-1/{name}"), io.BytesIO())
    upstream_tests.unpack(tmp_path / "vllm-1.tar.gz", tmp_path / "out")
    found = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*.*")}
    assert found == {"tests/v1/a.py", "pyproject.toml"}
