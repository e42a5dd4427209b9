"""pytest's side of the kit, loaded with `-p refit_sdk.testing.plugin`: options, what is printed at the end, the page.

A run in which a pair of transport and fabric moved no case has failed, whatever its tests say.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from refit_sdk.testing.support import KEY, Row, counted, page

_ROWS = pytest.StashKey[list[Row]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options of the kit."""
    group = parser.getgroup("refit", "the conformance kit of refit_sdk")
    group.addoption("--refit-transport", dest="refit_transports", action="append", metavar="NAME",
                    help="a transport to try (reshard); may be given several times")  # fmt: skip
    group.addoption("--refit-fabric", dest="refit_fabrics", action="append", metavar="NAME",
                    help="a fabric to try (inproc); may be given several times")  # fmt: skip
    group.addoption("--refit-tier", dest="refit_tier", choices=("quick", "full"),
                    help="quick: small sizes; full: the published sizes")  # fmt: skip
    group.addoption("--refit-device", dest="refit_device", metavar="DEVICE",
                    help="where tensors are: cpu, or cuda for fabrics that carry device memory alone")  # fmt: skip
    group.addoption("--refit-processes", dest="refit_processes", type=int, metavar="N",
                    help="the most processes that the fabric can join here; larger cases are not run")  # fmt: skip
    group.addoption("--refit-support", dest="refit_support", type=Path, metavar="PATH",
                    help="write the table of what moved, was refused or was not run to this page")  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    """Begin with no rows."""
    config.stash[_ROWS] = []


class _Reports:
    """Takes the rows out of reports, those of other processes too."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A row for each case."""
        if report.when == "call":
            found = [Row(*value) for key, value in report.user_properties if key == KEY]  # type: ignore[misc]
            self.config.stash[_ROWS] += found


def pytest_sessionstart(session: pytest.Session) -> None:
    """Listen."""
    session.config.pluginmanager.register(_Reports(session.config), "refit kit reports")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail where a pair moved nothing; write the page."""
    rows, path = session.config.stash[_ROWS], session.config.getoption("refit_support")
    if any(not ends["moved"] for ends in counted(rows).values()) and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    if path is not None and rows:
        path.write_text(page(rows))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say what became of the cases: of each one that wasn't moved, and, with `-v`, of each."""
    rows = config.stash[_ROWS]
    if not rows:
        return
    terminalreporter.section("conformance")
    for row in rows:
        if row.state != "moved" or config.getoption("verbose") > 0:
            reason = f": {row.reason}" if row.reason else ""
            terminalreporter.write_line(f"{row.pair}: {row.state}: {row.case}{reason}")
    for pair, ends in counted(rows).items():
        said = ", ".join(f"{ends[state]} {state}" for state in ("moved", "refused", "not run here"))
        terminalreporter.write_line(f"{pair}: {said}", red=not ends["moved"])
        if not ends["moved"]:
            terminalreporter.write_line(f"{pair}: nothing moved, so this run has failed", red=True)
