"""Every check, with values: it passes without a fault, and it names the fault that a test makes."""

from __future__ import annotations

import pytest

from fovea.doctor.check import (
    GROUPS,
    Need,
    Result,
    Status,
    Verdict,
    examine,
    exit_status,
    not_applicable,
    passed,
    select,
    warned,
)
from fovea.doctor.checks import CHECKS
from fovea.doctor.subject import Subject
from tests.doctor import fault_cases, machine_cases, server_cases
from tests.doctor.case import Case
from tests.doctor.fakes import FakeWeb, assert_verdict, named, raising, subject

CASES = [*machine_cases.CASES, *server_cases.CASES, *fault_cases.CASES]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.path}-{case.status}")
def test_verdicts(case: Case) -> None:
    assert_verdict(case.path, case.make(), case.status, case.words)


def test_every_check_passes_in_one_case_and_finds_a_fault_in_another() -> None:
    seen = {(case.path, case.status in (Status.WARN, Status.FAIL)) for case in CASES}
    seen_pass = {case.path for case in CASES if case.status is Status.PASS}
    assert {check.path for check in CHECKS} == seen_pass
    assert {check.path for check in CHECKS} == {path for path, fault in seen if fault}


def test_a_server_without_a_fault_has_no_failure() -> None:
    results = examine([check for check in CHECKS if check.group != "faults"], subject())
    assert {result.verdict.status for result in results} <= {Status.PASS, Status.NOT_APPLICABLE, Status.WARN}
    assert [result.check.path for result in results if result.verdict.status is Status.WARN] == [
        "engine/built-engines"
    ]


def test_checks_have_groups_and_names_of_their_own() -> None:
    assert len({check.path for check in CHECKS}) == len(CHECKS)
    order = [GROUPS.index(check.group) for check in CHECKS]
    assert order == sorted(order)
    assert all(check.run.__doc__ and check.run.__doc__.splitlines()[0].endswith("?") for check in CHECKS)


def test_every_need_is_one_that_a_check_has() -> None:
    assert {need for check in CHECKS for need in check.needs} == set(Need)


def test_a_server_that_is_gone_fails_every_check_that_asks_it_and_no_other() -> None:
    web = FakeWeb(routes={path: raising("connection refused") for path in server_cases.ALL_PATHS})
    results = examine(select(CHECKS, ["machine", "answers", "monitoring/metrics"], quick=True), subject(web))
    by_group = {result.check.group: result.verdict for result in results if result.check.group != "machine"}
    assert all(verdict.figure == "no answer" for verdict in by_group.values())
    assert not any(r.verdict.status is Status.FAIL for r in results if r.check.group == "machine")


def test_a_check_that_breaks_is_a_failure() -> None:
    def broken() -> Verdict:
        raise ZeroDivisionError("a foreign answer")

    found = subject(kernels=broken)
    assert_verdict("machine/gpus", found, Status.FAIL, "ZeroDivisionError: a foreign answer")


def test_the_exit_status_is_for_ci() -> None:
    check = named("machine/memory")

    def results(*verdicts: Verdict) -> list[Result]:
        return [Result(check, verdict, 0.0) for verdict in verdicts]

    good = results(passed("1"), not_applicable("none"))
    doubtful = [*good, *results(warned("1", "slow", "fix"))]
    failing = [*doubtful, *examine([named("limits/queue")], _bad())]
    assert [exit_status(each, strict=False) for each in (good, doubtful, failing)] == [0, 0, 1]
    assert [exit_status(each, strict=True) for each in (good, doubtful, failing)] == [0, 1, 1]


def _bad() -> Subject:
    return server_cases.setting(max_queue=0)()
