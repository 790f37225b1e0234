"""Runs the tests that need a GPU."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from gpu_parts.part import Report, Setup, at_most

if TYPE_CHECKING:
    import pytest

ROOT = Path(__file__).resolve().parents[2]


class Outcomes:
    """A plugin of pytest that counts tests by their outcome, and files that cannot be collected."""

    def __init__(self) -> None:
        self.count: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.count[report.outcome] += 1

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self.count["failed"] += report.failed


def measure(setup: Setup, report: Report) -> None:
    """Runs tests/gpu; raises RuntimeError if pytest cannot. A small run only collects them."""
    import pytest

    outcomes = Outcomes()
    options = ["-q", "-n", "0", "-p", "no:cacheprovider", "--basetemp", str(setup.folder / "tests")]
    options += ["--collect-only"] if setup.small else []
    code = pytest.main([str(ROOT / "tests" / "gpu"), "--rootdir", str(ROOT), *options], plugins=[outcomes])
    report("passed", outcomes.count["passed"], "tests")
    report("skipped", outcomes.count["skipped"], "tests")
    report("failed", outcomes.count["failed"], "tests", at_most(0))
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise RuntimeError(f"pytest ended with {code!r}")
