"""What cannot or must not be compiled is INVALID_ARGUMENT, whatever it does to who compiles it."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from google.protobuf import json_format

from protos import inference_pb2 as pb
from scheduler_svc.errors import RequestRejected
from scheduler_svc.front.served_model import Model
from scheduler_svc.front.validation import validate
from scheduler_svc.grammar.constraint import read_constraint
from scheduler_svc.grammar.matcher import GrammarFailed, Matcher, short_reason
from scheduler_svc.text.tokenizer import Tokenizer
from tests.grammar.hostile import HARMLESS, HOSTILE, WRONG
from tests.support.fake_engine import FACTS
from tests.support.small_tokenizers import byte_level, chat, metaspace


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    model = Model.of("tiny", FACTS, Tokenizer(chat()))
    yield model
    model.grammars.close()


def request(**sampling: Any) -> pb.GenerateRequest:
    fields = {"text": "hello", "sampling": {"max_tokens": 8, **sampling}}
    return json_format.ParseDict(fields, pb.GenerateRequest())


def trials(model: Model) -> int:
    """The process id of the process for trials."""
    process = model.grammars._trials
    assert process is not None
    assert process._process is not None
    return process._process.pid


@pytest.mark.parametrize("name", WRONG | HOSTILE)
def test_it_is_refused_by_field_and_reason(model: Model, name: str) -> None:
    """It runs, and somebody waits for its masks, or it takes the scheduler with it."""
    sampling, reason = (WRONG | HOSTILE)[name]
    with pytest.raises(RequestRejected) as refusal:
        validate(request(**sampling), "r", 0, model, 8)
    message = str(refusal.value)
    assert message.startswith(f"sampling.{next(iter(sampling))}")
    assert reason in message.partition("allowed: ")[2]
    assert len(message) < 1500


@pytest.mark.parametrize("name", HARMLESS)
def test_what_only_looks_bad_can_be_followed(model: Model, name: str) -> None:
    """A limit so strict that ordinary grammars meet it."""
    submission = validate(request(**HARMLESS[name]), "r", 0, model, 8)
    assert submission.new.is_constrained
    assert submission.matcher is not None
    output: list[int] = []
    for _ in range(40):
        (mask,) = submission.matcher.masks(output)
        words = int.from_bytes(mask, "little")
        token_id = words.bit_length() - 1
        if token_id in model.tokenizer.eos_token_ids:
            return
        output.append(token_id)


def test_a_neighbour_compiles_while_a_hostile_one_is_tried(model: Model) -> None:
    """One request keeps all others waiting."""
    hostile, _ = HOSTILE["a bomb of terminals"]
    began, done = threading.Event(), threading.Event()

    def refuse_again_and_again() -> None:
        for i in range(2):
            grammar = f"// {i}\n{hostile['grammar']}"
            began.set()
            with pytest.raises(RequestRejected):
                validate(request(grammar=grammar), "bad", 0, model, 8)
        done.set()

    thread = threading.Thread(target=refuse_again_and_again)
    thread.start()
    began.wait()
    num_served = 0
    while not done.is_set():
        validate(request(regex=f"neighbour{num_served}"), "good", 0, model, 8)
        num_served += 1
    thread.join()
    assert num_served > 2


def test_each_trial_ends_alone(model: Model) -> None:
    """A grammar that overflows the stack ends the process that all trials come from."""
    validate(request(regex="first"), "r", 0, model, 8)
    before = trials(model)
    for name in ("a chain of rules", "a chain of definitions", "a bomb of terminals"):
        model.grammars._kept.clear()  # else the refusal is known
        with pytest.raises(RequestRejected):
            validate(request(**HOSTILE[name][0]), "r", 0, model, 8)
    assert trials(model) == before


def test_the_process_for_trials_is_replaced(model: Model) -> None:
    """Somebody killed it, and no constrained request is accepted any more."""
    validate(request(regex="before"), "r", 0, model, 8)
    before = trials(model)
    os.kill(before, signal.SIGKILL)
    validate(request(regex="after"), "r", 0, model, 8)
    assert trials(model) != before


def test_a_refusal_is_remembered(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that tries again and again keeps a core busy."""
    sampling = request(**HOSTILE["a bomb of terminals"][0])
    with pytest.raises(RequestRejected) as first:
        validate(sampling, "r", 0, model, 8)
    monkeypatch.setattr(model.grammars, "_trials", None)
    with pytest.raises(RequestRejected) as second:
        validate(sampling, "r", 0, model, 8)
    assert str(first.value) == str(second.value)


def test_without_eos_only_constrained_requests_are_refused() -> None:
    """The whole model is refused, or an answer that can go no further never ends."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=byte_level()))
    model = Model.of("tiny", FACTS, tokenizer)
    with pytest.raises(RequestRejected, match=r"sampling.regex is 'a'.*no EOS token"):
        validate(request(regex="a"), "r", 0, model, 8)
    assert validate(request(), "r", 0, model, 8).matcher is None


def test_a_tokenizer_that_cannot_be_read_refuses_only_constrained_requests() -> None:
    """As above; llguidance does not know every kind of tokenizer."""
    tokenizer = Tokenizer(chat())
    model = Model.of("tiny", FACTS, tokenizer)
    model.grammars._tokenizer_json = lambda: '{"model": {"type": "Unheard"}}'
    with pytest.raises(RequestRejected, match=r"sampling.regex.*cannot be read by llguidance"):
        validate(request(regex="a"), "r", 0, model, 8)
    assert validate(request(), "r", 0, model, 8).matcher is None


def test_sentencepiece_tokens_follow_a_grammar() -> None:
    """The masks are those of byte-level tokens, and the answer has other characters."""
    from transformers import PreTrainedTokenizerFast

    wrapped = PreTrainedTokenizerFast(tokenizer_object=metaspace(), eos_token="</s>")
    tokenizer = Tokenizer(wrapped)
    model = Model.of("tiny", FACTS, tokenizer)
    try:
        submission = validate(request(regex="a the END"), "r", 0, model, 8)
        assert submission.matcher is not None
        output: list[int] = []
        while True:
            words = int.from_bytes(submission.matcher.masks(output)[0], "little")
            token_id = words.bit_length() - 1
            if token_id in tokenizer.eos_token_ids or len(output) > 20:
                break
            output.append(token_id)
        pieces = [tokenizer.token(token_id) or "" for token_id in output]
        assert "".join(pieces).replace("▁", " ").strip() == "a the END"
    finally:
        model.grammars.close()


def test_a_constraint_that_is_off_constrains_nothing(model: Model) -> None:
    """json_object: false asks for no object."""
    assert read_constraint(pb.SamplingParams(json_object=False)) is None
    assert not validate(request(json_object=False), "r", 0, model, 8).new.is_constrained


def test_equal_constraints_share_a_grammar(model: Model) -> None:
    """Every request of a popular schema compiles it again."""
    first, second = (validate(request(regex="same"), "r", 0, model, 8).matcher for _ in "12")
    assert first is not None
    assert second is not None
    assert first.grammar is second.grammar
    assert first is not second


def test_a_matcher_is_tried_again_with_a_lexer_of_its_own(model: Model) -> None:
    """What one answer used up of a shared lexer is another one's error."""
    matcher = validate(request(regex="[ab]{3}"), "r", 0, model, 8).matcher
    assert matcher is not None
    output = [model.tokenizer.encode("a")[0]]
    (expected,) = matcher.masks(output)
    broken = matcher.copy()
    assert not broken._matcher.consume_token(model.tokenizer.encode("z")[0])  # now in error
    assert broken.masks(output) == [expected]
    with pytest.raises(GrammarFailed, match="token"):
        broken.masks([model.tokenizer.encode("z")[0]])


def test_ambiguity_ends_its_own_answer(model: Model) -> None:
    """Each token of an ambiguous grammar takes longer than the one before, and all wait for it."""
    grammar = 'start: e\ne: e e | e e e | "a" |'
    matcher = validate(request(grammar=grammar), "r", 0, model, 8).matcher
    assert matcher is not None
    output = model.tokenizer.encode("a") * 400
    assert len(matcher.masks(output[:50])) == 1
    with pytest.raises(GrammarFailed, match="items"):
        matcher.masks(output)


def test_a_reason_is_short() -> None:
    """A client reads a page about the parser's state."""
    assert short_reason("at 1(2): bad\n   1 | start: x\n       ^\n<non-verbose/>") == "at 1(2): bad"
    assert len(short_reason("x" * 5000)) < 400


def test_matchers_continue_a_resumed_answer(model: Model) -> None:
    """A resumed answer begins its grammar anew, or goes on with what it never allowed."""
    tokens = model.tokenizer.encode("ab")
    resumed = request(regex="abc", seed=1)
    resumed.resume.output_token_ids.extend(tokens)
    resumed.resume.text_length = 2
    submission = validate(resumed, "r", 0, model, 8)
    assert submission.matcher is not None
    (mask,) = submission.matcher.masks(tokens)
    allowed = int.from_bytes(mask, "little")
    assert allowed == 1 << model.tokenizer.encode("c")[0]
    resumed.sampling.regex = "xyz"
    with pytest.raises(RequestRejected, match=r"resume.output_token_ids.*sampling.regex"):
        validate(resumed, "r", 0, model, 8)


def test_matchers_follow_drafts(model: Model) -> None:
    """A draft is verified against the mask of another position."""
    matcher = validate(request(regex="abc?d"), "r", 0, model, 8).matcher
    assert isinstance(matcher, Matcher)
    a, b, c, d = model.tokenizer.encode("abcd")
    masks = [int.from_bytes(mask, "little") for mask in matcher.masks([a], [b, c, a, b])]
    assert masks == [1 << b, 1 << c | 1 << d, 1 << d]  # none behind the draft that is impossible
    assert matcher.masks([a, b]) == matcher.copy().masks([a, b])
    assert matcher.masks([a]) == matcher.copy().masks([a])  # a beam that went another way
