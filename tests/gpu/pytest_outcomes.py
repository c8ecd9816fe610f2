"""Runs tests of another project with pytest, and prints the outcome of each test by its name.

A copy or link of this file in a folder of `./run external` makes the folder a suite (README.md):

    pytest_outcomes.py FOLDER EVERY [ARGUMENT OF pytest]...

runs pytest in FOLDER for one in EVERY tests, chosen by a checksum of their names. Arguments are
files, or options such as `-n 8` of pytest-xdist and `--timeout 60` of pytest-timeout. Why a test
failed goes to standard error.
"""

import os
import sys
import zlib

import pytest

EVERY = "GPUSESSION_OUTCOMES_EVERY"


def pytest_collection_modifyitems(items):
    """Keeps one in EVERY tests; each process of pytest-xdist does so."""
    every = int(os.environ[EVERY])
    items[:] = [item for item in items if zlib.crc32(item.nodeid.encode()) % every == 0]


class Outcomes:
    """Collects the outcomes, in the process that the others report to."""

    def __init__(self):
        self.outcomes, self.reasons = {}, []

    def pytest_runtest_logreport(self, report):
        """Notes the outcome of a test, or of its preparation if that fails."""
        if report.when == "call" or report.outcome != "passed":
            self.outcomes[report.nodeid] = "xfailed" if report.skipped and hasattr(report, "wasxfail") else report.outcome
            if report.failed:
                self.reasons.append(f"{report.nodeid}\n{report.longreprtext}\n")

    def pytest_collectreport(self, report):
        """Notes a file whose tests cannot be found."""
        if report.failed:
            self.outcomes[report.nodeid] = "not collected"
            self.reasons.append(f"{report.nodeid}\n{report.longreprtext}\n")


def main():
    """Runs pytest without its own output, whose order and times vary."""
    if len(sys.argv) < 3 or not sys.argv[2].isdecimal() or int(sys.argv[2]) == 0:
        print(__doc__, file=sys.stderr)
        return 2
    folder, os.environ[EVERY] = sys.argv[1:3]
    # Processes of pytest-xdist load this file as a plugin, too.
    here = os.path.dirname(os.path.realpath(__file__))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
    sys.path.insert(0, here)
    os.chdir(folder)
    shown, null = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    outcomes = Outcomes()
    status = pytest.main(["-q", "-p", "no:cacheprovider", "-p", "pytest_outcomes", *sys.argv[3:]], plugins=[outcomes])
    sys.stdout.flush()
    os.dup2(shown, 1)
    for name, outcome in sorted(outcomes.outcomes.items()):
        print(outcome, name)
    sys.stderr.writelines(outcomes.reasons)
    # Tests that fail natively, too, are no difference.
    return 0 if status in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) and outcomes.outcomes else int(status) or 1


if __name__ == "__main__":
    sys.exit(main())
