"""Which tests may be left out, and why: a skip that is not listed here fails the suite, so that none goes unnoticed.

`[dev]` installs every library that a test needs. What is listed depends on the machine.
"""

from __future__ import annotations

import re

import pytest

LISTED = {
    r"needs Chromium: apt-get install chromium": "a browser is no Python package",
    r"generated code needs a C\+\+ compiler, g\+\+": "nor is a compiler",
    r"without flock two first calls are not kept apart": "nor is flock",
    r"could not import 'cvxpy'.*": "366 MB, for methods of TorchJD that the package does without",
    r"\w+ needs cvxpy, a general solver .*": "the same",
    r"FORKMERGE_DATA names no folder": "real data is nobody's to give away",
    r"\S+ is not in FORKMERGE_DATA": "the same",
    r"float16 training as it is meant needs a GPU": "few machines have one",
    r"there is a GPU": "and few tests want none",
    r"only a newer processor can do as an older one does": "an older one cannot do as a newer one does",
    r"recorded with .*, and bits depend on it: this is .*": "bits are promised for one torch on one processor",
    r"root may write anywhere": "containers run as root",
    r"only Linux says and does all this": "other systems",
    r"counts open files in /proc": "other systems",
    r"(/dev/full is )?a device of Linux": "other systems",
    r"could not import 'pty'.*": "other systems",
}

_unlisted: list[str] = []


def is_listed(reason: str) -> bool:
    """Say whether a test may be skipped for this reason."""
    return any(re.fullmatch(pattern, reason) for pattern in LISTED)


def _note(report: pytest.TestReport | pytest.CollectReport) -> None:
    if report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2].removeprefix("Skipped: ") if isinstance(report.longrepr, tuple) else "no reason"
        if not is_listed(reason):
            _unlisted.append(f"{report.nodeid}: {reason}")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note a test that was skipped."""
    _note(report)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Note a file that was skipped."""
    _note(report)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail."""
    if _unlisted and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say why."""
    if _unlisted:
        terminalreporter.section("skips that tests/skips.py does not list", red=True)
        for line in dict.fromkeys(_unlisted):
            terminalreporter.line(line)
