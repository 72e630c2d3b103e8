"""Structured output over gRPC, with a tiny random model at temperature 1."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import pytest

from client import Chairlift, InvalidRequest
from tests.support.processes import Server

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 10},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
        "size": {"type": "integer", "minimum": 1, "maximum": 99},
    },
    "required": ["name", "tags", "size"],
    "additionalProperties": False,
}
OPTIONS: dict[str, Any] = {"temperature": 1, "max_tokens": 300, "seed": 3}


@pytest.fixture
def chairlift(tiny_server: Server) -> Iterator[Chairlift]:
    with Chairlift(tiny_server.address) as connected:
        yield connected


@pytest.mark.parametrize(
    ("constraint", "pattern"),
    [
        ({"regex": "[a-f]{3}-[0-9]{3}"}, "[a-f]{3}-[0-9]{3}"),
        ({"grammar": 'start: "(" start ")" | "x"'}, r"\(*x\)*"),
        ({"choice": ["yes", "no", "perhaps"]}, "yes|no|perhaps"),
    ],
    ids=["regex", "grammar", "choice"],
)
def test_texts_match(chairlift: Chairlift, constraint: dict[str, Any], pattern: str) -> None:
    """A field that is accepted and not obeyed, or an answer that does not end."""
    answer = chairlift.complete("Answer:", **OPTIONS, **constraint)
    assert re.fullmatch(pattern, answer.text), answer.text
    assert answer.finish_reason == "stop"


def test_json_validates_alone_and_in_company(chairlift: Chairlift, tiny_server: Server) -> None:
    """Rows of one step get each other's masks; or others' answers change beside them."""
    free = {**OPTIONS, "max_tokens": 40, "ignore_eos": True}
    undisturbed = chairlift.complete([5, 6, 7], **free)

    def ask(seed: int) -> None:
        options = {**OPTIONS, "seed": seed, "json_schema": json.dumps(SCHEMA)}
        answer = chairlift.complete("Answer:", **options)
        assert answer.finish_reason == "stop"
        jsonschema.validate(json.loads(answer.text), SCHEMA)

    with ThreadPoolExecutor(8) as threads:
        asked = [threads.submit(ask, seed) for seed in range(8)]
        beside = [threads.submit(chairlift.complete, [5, 6, 7], **free) for _ in range(4)]
        for question in asked:
            question.result()
        assert {answer.result().token_ids for answer in beside} == {undisturbed.token_ids}


def test_any_json_object(chairlift: Chairlift) -> None:
    """json_object gives something else than an object."""
    options = {**OPTIONS, "max_tokens": 60}
    texts = [
        chairlift.complete("Answer:", **{**options, "seed": seed}, json_object=True).text
        for seed in range(4)
    ]
    assert all(text.startswith("{") for text in texts), texts


@pytest.mark.slow
def test_a_worker_killed_mid_answer_changes_no_token(
    chairlift: Chairlift, tiny_server: Server
) -> None:
    """The next worker waits for a mask that was sent to the one before, or gets another one."""
    options = {**OPTIONS, "regex": "([a-z]{1,9} ){60}"}
    undisturbed = chairlift.complete("Answer:", **options)
    stream = chairlift.generate("Answer:", **options)
    tokens = list(next(stream).token_ids)
    tiny_server.kill_worker()
    for delta in stream:
        tokens += delta.token_ids
    assert tokens == list(undisturbed.token_ids)


def test_a_hostile_grammar_is_refused_and_others_are_served(chairlift: Chairlift) -> None:
    """One request ends the scheduler, and with it everybody's."""
    chain = "\n".join(f"r{i}: r{i + 1}" for i in range(8000))  # overflows the stack
    with pytest.raises(InvalidRequest, match=r"sampling.grammar.*processor time"):
        chairlift.complete("Answer:", **OPTIONS, grammar=f'start: r0\n{chain}\nr8000: "z"')
    assert chairlift.complete("Answer:", **OPTIONS, choice=["still there"]).text == "still there"
