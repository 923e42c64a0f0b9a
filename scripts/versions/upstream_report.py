"""Compare two runs of vLLM's own tests, and print the comparison. For upstream_tests.py."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping

from upstream_plugin import Result, Results

KNOWN = {
    "test_grammar_compile_error_finishes_only_request": (
        "our GrammarManager compiles with the compiler of the request, and not with the one that"
        " the test puts into vLLM's manager; and stop_reason says why the request failed"
    ),
    "test_abort_request_when_structured_output_fsm_cannot_advance": (
        "it makes a scheduler without calling its constructor"
    ),
}
"""Functions of vLLM's tests that fail with our scheduler on purpose, and why."""
CHANCE = (" crashed while running ", "Timeout (>", "timed out after")


# ---- the comparison ------------------------------------------------------------------------------


class Comparison:
    """Two runs of the same tests: `stock` with vLLM's scheduler, `ours` with ours."""

    def __init__(self, stock: Results, ours: Results) -> None:
        self.stock, self.ours = stock, ours

    def __iter__(self) -> Iterator[tuple[str, Result, Result]]:
        missing = Result("missing", "it did not run")
        for test in sorted(self.stock.tests.keys() | self.ours.tests.keys()):
            yield (
                test,
                self.stock.tests.get(test, missing),
                self.ours.tests.get(test, missing),
            )

    def both(self, outcome: str) -> dict[str, Result]:
        """The tests with this outcome in both runs, as they ended with ours."""
        return {t: b for t, a, b in self if a.outcome == b.outcome == outcome}

    def known(self) -> dict[str, str]:
        """The tests that differ for a reason that is in KNOWN."""
        return {
            t: KNOWN[function_of(t)]
            for t, a, b in self
            if (a.outcome, b.outcome) == ("passed", "failed") and function_of(t) in KNOWN
        }

    def different(self) -> dict[str, str]:
        """The other tests, with both outcomes."""
        known = self.known()
        return {
            test: f"{a.outcome} {a.reason} -> {b.outcome} {b.reason}"
            for test, a, b in self
            if a.outcome != b.outcome and test not in known
        }

    def by_chance(self) -> dict[str, str]:
        """The tests that crashed or took too long in a run, with both reasons."""
        return {
            test: f"{a.reason} -> {b.reason}"
            for test, a, b in self
            if any(chance in result.reason for result in (a, b) for chance in CHANCE)
        }

    def replace(self, stock: Results, ours: Results) -> None:
        """Take the outcomes of a second run of some tests."""
        self.stock.tests |= stock.tests
        self.ours.tests |= ours.tests


def function_of(test: str) -> str:
    """The function of a test."""
    return test.partition("[")[0].rpartition("::")[2]


def with_our_scheduler(tests: Mapping[str, Result]) -> list[str]:
    return [t for t, r in tests.items() if any("Guided" in made for made in r.schedulers)]


def by(reason: Callable[[Result], str], tests: Mapping[str, Result]) -> dict[str, list[str]]:
    """The tests by reason, the most frequent first."""
    found = defaultdict(list)
    for test, result in tests.items():
        found[reason(result)].append(test)
    return dict(sorted(found.items(), key=lambda item: -len(item[1])))


# ---- the report ----------------------------------------------------------------------------------


def report(compared: Comparison, unsteady: Mapping[str, str]) -> str:
    """The comparison as Markdown."""
    passed = compared.both("passed")
    with_ours = len(with_our_scheduler(passed))
    uncollected = compared.stock.uncollected | compared.ours.uncollected
    known, different = compared.known(), compared.different()
    lines = [
        f"# vLLM {compared.ours.version}: its own tests, with our scheduler",
        f"- passed in both: {len(passed)}, of which {with_ours} make a scheduler of ours",
        f"- failed in both: {len(compared.both('failed'))}",
        f"- skipped in both: {len(compared.both('skipped'))}",
        f"- known to differ: {len(known)}",
        f"- DIFFERENT: {len(different)}",
        f"- differed or crashed once, but not when they ran again alone: {len(unsteady)}",
        f"- files that cannot be collected: {len(uncollected)}",
    ]
    lines += section("DIFFERENT", [f"{test}: {why}" for test, why in different.items()])
    lines += section("Known to differ", [f"{test}: {why}" for test, why in known.items()])
    lines += section(
        "Differed or crashed once", [f"{test}: {why}" for test, why in unsteady.items()]
    )
    lines += section("Not collected", [f"{file}: {why}" for file, why in uncollected.items()])
    for outcome in ("failed", "skipped"):
        with_stock = {test: compared.stock.tests[test] for test in compared.both(outcome)}
        found = by(lambda result: result.reason, with_stock)
        lines += grouped(f"{outcome.capitalize()} in both", found)
    return "\n".join(lines)


def report_more(title: str, results: Results) -> str:
    """A run of tests that all pass with vLLM's scheduler."""
    failed = {t: r for t, r in results.tests.items() if r.outcome != "passed"}
    lines = [f"{test}: {result.reason}" for test, result in failed.items()]
    passed = len(results.tests) - len(failed)
    return "\n".join(section(f"{title}: {passed} pass, and these do not", lines))


def section(title: str, lines: list[str]) -> list[str]:
    return [f"\n## {title} ({len(lines)})", *(f"- {line[:400]}" for line in lines)]


def grouped(title: str, found: Mapping[str, list[str]]) -> list[str]:
    lines = [f"{len(tests)}: {why[:200]} ({shown(tests)})" for why, tests in found.items()]
    return [f"\n## {title}", *(f"- {line}" for line in lines)]


def shown(tests: list[str]) -> str:
    """The functions of these tests, each once."""
    return ", ".join(sorted({function_of(test) for test in tests}))
