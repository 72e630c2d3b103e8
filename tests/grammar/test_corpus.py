"""Constrained answers of a random model at temperature 1, through the engine and a real runner.

Each answer that ends by itself parses and validates; one that ends by length is the beginning of
such an answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from protos import inference_pb2 as pb
from scheduler_svc.core.request import FinishReason
from scheduler_svc.engine.events import Delta, Submission
from scheduler_svc.front.served_model import Model
from scheduler_svc.front.validation import validate
from scheduler_svc.text.tokenizer import Tokenizer
from tests.support.engine_on_runner import Answer, EngineOnRunner, asked, serving, tiny_llama
from tests.support.fake_engine import FACTS
from tests.support.loading import load
from tests.support.small_tokenizers import chat
from worker.model.load import LoadedModel

SCHEMAS: list[dict[str, Any]] = json.loads(Path(__file__).with_name("schemas.json").read_text())
FORMATS = jsonschema.FormatChecker(formats=["date", "email", "ipv4", "uuid"])
TIME = r"\d\d:\d\d:\d\d(\.\d+)?([zZ]|[+-]\d\d:\d\d)"
FORMATS.checks("time")(lambda text: re.fullmatch(TIME, str(text)) is not None)
FORMATS.checks("date-time")(
    lambda text: re.fullmatch(rf"\d{{4}}-\d\d-\d\d[tT]{TIME}", str(text)) is not None
)

TOKENIZER = Tokenizer(chat())
VOCAB_SIZE = 272  # more columns than the tokenizer has tokens


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tmp_path_factory.mktemp("tiny-llama")
    tiny_llama(VOCAB_SIZE).save_pretrained(folder)
    return load(folder)


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    facts = {name: getattr(FACTS, name) for name in FACTS.__slots__}
    facts |= {"vocab_size": VOCAB_SIZE, "max_model_len": 512, "pool_tokens": 1 << 20}
    model = Model.of("tiny", type(FACTS)(**facts), TOKENIZER)
    yield model
    model.grammars.close()


def submissions(model: Model, requests: Sequence[pb.GenerateRequest]) -> list[Submission]:
    return [validate(request, f"r{i}", i, model, 8) for i, request in enumerate(requests)]


def of_corpus(model: Model, every: int = 1, **sampling: Any) -> list[Submission]:
    """Request i for schema i, of every so many ones."""
    schemas = [json.dumps(entry["schema"]) for entry in SCHEMAS]
    return [
        validate(asked(json_schema=schemas[i], **sampling), f"r{i}", i, model, 8)
        for i in range(0, len(SCHEMAS), every)
    ]


def check_corpus(model: Model, answers: dict[tuple[str, int], Answer]) -> int:
    """Returns how many ended by themselves."""
    num_whole = 0
    for (request_id, _), answer in answers.items():
        entry = SCHEMAS[int(request_id[1:])]
        assert answer.error is None, (entry["name"], answer.error)
        assert answer.end is not None
        if answer.end.reason is FinishReason.STOP:
            num_whole += 1
            validator = jsonschema.Draft202012Validator(entry["schema"], format_checker=FORMATS)
            validator.validate(json.loads(answer.text))
        else:
            assert_beginning(model, answer, json_schema=json.dumps(entry["schema"]))
    return num_whole


def assert_beginning(model: Model, answer: Answer, **sampling: Any) -> None:
    assert answer.end is not None
    assert answer.end.reason is FinishReason.LENGTH
    (submission,) = submissions(model, [asked(**sampling)])
    assert submission.matcher is not None
    assert submission.matcher.grammar.allows(answer.tokens)


def assert_nothing_is_held(bench: EngineOnRunner) -> None:
    """A matcher that outlives its request is never freed."""
    masks = bench.engine._masks
    assert len(masks) == 0 or bench.engine.ask(lambda state: len(masks)).result(10) == 0


def test_the_corpus_is_large_and_valid() -> None:
    """The checks below compare with what jsonschema does not check, or with next to nothing."""
    assert len(SCHEMAS) >= 50
    assert len({entry["name"] for entry in SCHEMAS}) == len(SCHEMAS)
    for entry in SCHEMAS:
        jsonschema.Draft202012Validator.check_schema(entry["schema"])


def test_every_answer_validates(loaded: LoadedModel, model: Model) -> None:
    """An answer breaks its schema: with run-ahead, its mask may be one token late."""
    with serving(loaded) as bench:
        answers = bench.serve(of_corpus(model))
        assert check_corpus(model, answers) >= len(SCHEMAS) - 5
        assert_nothing_is_held(bench)


def test_run_ahead_changes_no_token(loaded: LoadedModel, model: Model) -> None:
    """A mask depends on when it is computed."""
    tokens = []
    for depth in (1, 2):
        with serving(loaded, depth=depth) as bench:
            answers = bench.serve(of_corpus(model, every=4))
            tokens.append({who: answer.tokens for who, answer in answers.items()})
    assert tokens[0] == tokens[1]


def test_drafts_change_no_token(loaded: LoadedModel, model: Model) -> None:
    """A draft is checked against the mask of another position, or accepted against the grammar."""
    regex = "((north|south) wind, ){12}the end"
    answers = []
    with serving(loaded) as bench:
        for speculate in (0, 5):
            requests = [asked(regex=regex, speculate=speculate) for _ in range(4)]
            answers.append(bench.serve(submissions(model, requests)))
        assert_nothing_is_held(bench)
    plain, drafted = answers
    for who, answer in drafted.items():
        assert re.fullmatch(regex, answer.text)
        assert answer.tokens == plain[who].tokens
        assert answer.end is not None
        assert 0 < answer.end.accepted_tokens < answer.end.drafted_tokens


@pytest.mark.parametrize("swap_chunks", [0, 60])
def test_answers_validate_in_a_tiny_pool(
    loaded: LoadedModel, model: Model, swap_chunks: int
) -> None:
    """A preempted answer goes on from another place of its grammar."""
    with serving(loaded, chunks=36, swap_chunks=swap_chunks) as bench:
        submitted = of_corpus(model, every=2, max_tokens=120)
        answers = bench.serve(submitted)
        assert check_corpus(model, answers) >= len(submitted) - 5
        counters = bench.engine.ask(lambda state: state.counters).result(10)
        assert (counters.offloads if swap_chunks else counters.soft_resets) > 0
        assert_nothing_is_held(bench)


def test_answers_validate_on_a_new_worker(loaded: LoadedModel, model: Model) -> None:
    """With a worker's death an answer loses its place in the grammar, or the next worker waits for
    a mask that went to the one before."""
    with serving(loaded) as bench:
        num_deltas = 0

        def kill_sometimes(delta: Delta) -> None:
            nonlocal num_deltas
            num_deltas += 1
            if num_deltas in (40, 200):
                bench.link.kill_worker()

        submitted = of_corpus(model, every=2)
        answers = bench.serve(submitted, kill_sometimes)
        assert bench.link.worker is not None
        assert bench.link.worker.boot_id == 3
        assert check_corpus(model, answers) >= len(submitted) - 5
        assert_nothing_is_held(bench)


def test_siblings_follow_the_grammar_each_for_itself(loaded: LoadedModel, model: Model) -> None:
    """The second sibling is held to what the first one has said."""
    with serving(loaded) as bench:
        submitted = of_corpus(model, every=3, n=2)
        answers = bench.serve(submitted)
        assert len(answers) == 2 * len(submitted)
        assert check_corpus(model, answers) >= len(answers) - 5
        assert any(
            answers[who, 0].text != answers[who, 1].text for who, index in answers if not index
        )
        assert_nothing_is_held(bench)


OTHERS: list[tuple[str, dict[str, Any], str]] = [
    ("regex", {"regex": "[a-c]{2,5}(-[0-9]{2})?"}, "[a-c]{2,5}(-[0-9]{2})?"),
    ("anchored regex", {"regex": "^(yes|no)$"}, "yes|no"),
    ("slashes and lines", {"regex": "a/b\\\\\\n[/\\]]{2}"}, "a/b\\\\\\n[/\\]]{2}"),
    ("unicode regex", {"regex": "[äöü日本]{1,3}"}, "[äöü日本]{1,3}"),
    ("empty regex", {"regex": ""}, ""),
    ("lark", {"grammar": 'start: "<" NAME ("," NAME)~0..2 ">"\nNAME: /[a-z]{1,3}/'},
     "<[a-z]{1,3}(,[a-z]{1,3}){0,2}>"),
    ("lark rules", {"grammar": 'start: "(" start ")" | "x"'}, r"\(*x\)*"),
    ("choice", {"choice": pb.Choice(options=["red", "green", "reddish"])}, "red|green|reddish"),
    ("odd choices", {"choice": pb.Choice(options=['"\\\n', "😀", "/x/", " "])},
     '"\\\\\n|😀|/x/| '),
    ("one choice", {"choice": pb.Choice(options=["only"])}, "only"),
]  # fmt: skip


def test_other_constraints(loaded: LoadedModel, model: Model) -> None:
    """A regex that only has to be found, or an option that is quoted."""
    requests = [asked(**sampling) for _, sampling, _ in OTHERS for _ in range(3)]
    requests += [asked(json_object=True, max_tokens=100) for _ in range(8)]
    with serving(loaded) as bench:
        answers = bench.serve(submissions(model, requests))
    for place, (name, _, pattern) in enumerate(OTHERS):
        for answer in (answers[f"r{3 * place + i}", 0] for i in range(3)):
            assert answer.end is not None, (name, answer.error)
            assert answer.end.reason is FinishReason.STOP, name
            assert re.fullmatch(pattern, answer.text), (name, answer.text)
    for answer in (answers[f"r{3 * len(OTHERS) + i}", 0] for i in range(8)):
        assert answer.end is not None
        if answer.end.reason is FinishReason.STOP:
            assert isinstance(json.loads(answer.text), dict)
        else:
            assert_beginning(model, answer, json_object=True)


def test_a_stop_string_or_the_length_leaves_a_beginning(loaded: LoadedModel, model: Model) -> None:
    """An answer that is cut off is not what its schema begins with."""
    schema = json.dumps({"type": "array", "items": {"type": "boolean"}, "minItems": 30})
    with serving(loaded) as bench:
        cut, stopped = bench.serve(
            submissions(
                model,
                [asked(json_schema=schema, max_tokens=20),
                 asked(json_schema=schema, stop=[","])],
            )
        ).values()  # fmt: skip
    assert len(cut.tokens) == 20
    assert_beginning(model, cut, json_schema=schema, max_tokens=20)
    assert stopped.end is not None
    assert stopped.end.stop_string == ","
    assert re.fullmatch(r"\[\s*(true|false)\s*", stopped.text)


def test_ignore_eos_goes_on_where_the_grammar_lets_it(loaded: LoadedModel, model: Model) -> None:
    """It ends an answer early, or asks for more than the grammar has and never ends."""
    with serving(loaded) as bench:
        (answer,) = bench.serve(
            submissions(model, [asked(regex="(ab?){1,9}", ignore_eos=True)])
        ).values()
    assert answer.end is not None
    assert answer.end.reason is FinishReason.STOP
    assert re.fullmatch("(ab?){9}", answer.text)
