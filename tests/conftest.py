"""Setup before any test is imported.

Triton decides at its first import whether kernels are compiled for a GPU or interpreted on the CPU. Without
a GPU they are interpreted, unless TRITON_INTERPRET says otherwise.

Hypothesis fails an example that takes longer than 200 ms, which can happen to any on a busy machine, so that
limit is off. Its examples are the same in every default run, so that a failure comes from the change and not
from new examples; `make test-all` draws new ones.

A shell makes background processes ignore Ctrl-C, and their children would ignore it, too. Tests interrupt
children, so SIGINT gets Python's default handler again.

Objects of imports and of the collection of tests are frozen (`gc.freeze`), because each garbage collection
would take a second to visit them.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from hypothesis import settings

from tests.support.summary import Summary, processor_s
from tests.support.thorough import DEFAULT, THOROUGH

if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # read by torch: other tests run beside each test

_STARTED = pytest.StashKey[float]()

settings.register_profile("fovea", deadline=None, max_examples=DEFAULT, derandomize=True)
settings.register_profile("thorough", deadline=None, max_examples=THOROUGH)
settings.load_profile("fovea")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[object]:
    gc.disable()
    try:
        return (yield)  # type: ignore[misc]
    finally:
        gc.enable()
        gc.freeze()


SUMMARY = Summary()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--folders", action="store_true", help="print the processor time of each folder")
    parser.addoption("--shuffle", type=int, metavar="SEED", help="run the tests in another order")


@pytest.hookimpl(tryfirst=True)  # pytest then puts tests together that share a fixture with parameters
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if (seed := config.getoption("shuffle")) is not None:
        random = Random(seed)
        places = {file: random.random() for file in sorted({item.path for item in items})}
        items.sort(key=lambda item: (places[item.path], random.random()))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[object]:
    report: pytest.TestReport = yield  # type: ignore[misc,assignment]
    now = processor_s()
    report.user_properties.append(("processor_s", now - item.stash.get(_STARTED, now)))
    item.stash[_STARTED] = now
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    item.stash[_STARTED] = processor_s()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    SUMMARY.add(report)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for line in SUMMARY.lines(folders=config.getoption("folders")):
        terminalreporter.write_line(line)


def pytest_unconfigure() -> None:
    forks = sys.modules.get("tests.support.forks")
    if forks is not None:
        forks.stop()
