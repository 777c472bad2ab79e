"""Answers of the bundled model by hundreds of schemas are valid by another library, at any temperature."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import jsonschema
import pytest

from fovea import AnswerFormat, Engine
from fovea.core.types import Completion
from tests.support.engines import assert_idle
from tests.support.schemas import Schema, schemas

ALL = schemas(220)
QUESTION = "List the objects."


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.from_pretrained("fovea-tiny", device="cpu", threads=1, max_queue=0) as machine:
        yield machine


def ask(engine: Engine, schema: Schema, temperature: float, seed: int) -> Completion:
    form = AnswerFormat.json_schema(schema)
    return engine.generate(QUESTION, format=form, temperature=temperature, seed=seed, max_tokens=700)


def check(schema: Schema, answer: Completion) -> None:
    validator = jsonschema.Draft202012Validator(
        schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
    )
    errors = [error.message for error in validator.iter_errors(json.loads(answer.text))]
    assert not errors, (schema, answer.text, errors)


def run(engine: Engine, schemas: list[Schema]) -> None:
    jobs = [(schema, 1.5 * (number % 7) / 6, number) for number, schema in enumerate(schemas)]
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda job: ask(engine, *job), jobs))
    complete = 0
    for (schema, _, _), answer in zip(jobs, answers, strict=True):
        if answer.finish_reasons == ("stop",):
            complete += 1
            check(schema, answer)
    assert complete > 0.9 * len(jobs), "the digits of a number may fill an answer, and nothing else may"
    assert_idle(engine)


def test_every_answer_is_valid(engine: Engine) -> None:
    """Every sixth schema."""
    run(engine, ALL[::6])


@pytest.mark.slow
def test_a_thousand_answers_are_valid(engine: Engine) -> None:
    run(engine, ALL * 5)
