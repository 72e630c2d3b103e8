"""generation_config.json and config.json: each value is read as it is meant, or refused by name."""

from __future__ import annotations

import json
import logging
import math
from typing import Any

import pytest

from protos import inference_pb2 as pb
from scheduler_svc.text.model_defaults import ModelDefaults, eos_token_ids, model_defaults


@pytest.mark.parametrize(
    ("generation", "model", "want"),
    [
        ({}, {}, (257,)),
        ({"eos_token_id": 5}, {"eos_token_id": 7}, (5, 257)),
        ({"eos_token_id": [5, 257, 6]}, {}, (5, 6, 257)),
        ({"temperature": 0.5}, {"eos_token_id": [65, 66]}, (65, 66, 257)),
        ({}, {"text_config": {"eos_token_id": [1, 106]}}, (1, 106, 257)),
        ({}, {"eos_token_id": 2, "text_config": {"eos_token_id": 3}}, (2, 257)),
        ({"eos_token_id": None}, {"eos_token_id": 7}, (7, 257)),
        ({"eos_token_id": []}, {"eos_token_id": 7}, (7, 257)),
        ({"eos_token_id": -1}, {}, (257,)),
        ({"eos_token_id": 2.0}, {}, (2, 257)),
        ({"eos_token_id": [2.0, None]}, {}, (2, 257)),
        ({}, {"text_config": None}, (257,)),
    ],
)
def test_what_ends_an_answer(
    generation: dict[str, Any], model: dict[str, Any], want: tuple[int, ...]
) -> None:
    """A missed EOS lets answers run on into invented turns."""
    assert eos_token_ids(257, generation, model) == want


@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
@pytest.mark.parametrize(
    "value", ["</s>", "257", [[257], 65], True, [True], 2.5, -2, 1 << 31, {}, float("nan"), [""]]
)
def test_what_is_no_token_id_is_refused(file: str, value: Any) -> None:
    """Left out, answers would not end; let through, the API's own messages could not hold it."""
    configs = {"generation_config.json": {}, "config.json": {}, file: {"eos_token_id": value}}
    with pytest.raises(ValueError, match=f"^{file}: eos_token_id is .*; allowed: a token id from"):
        eos_token_ids(257, *configs.values())


def test_a_tokenizer_without_eos_is_none_too_many() -> None:
    """Base models have none; the other files may."""
    assert eos_token_ids(None, {}, {"eos_token_id": 3}) == (3,)
    assert eos_token_ids(None, {}, {}) == ()


@pytest.mark.parametrize(
    ("stated", "want"),
    [
        ("{}", {}),
        # transformers fills in top_k 50: that is not what the model's makers said
        ('{"max_length": 20, "temperature": 0.6}', {"temperature": 0.6}),
        ('{"top_k": 20.0}', {"top_k": 20}),
        ('{"top_k": -1}', {"top_k": 0}),
        ('{"top_k": 1e12}', {"top_k": 0}),
        ('{"top_k": 1099511627776}', {"top_k": 0}),
        ('{"top_k": 2147483647}', {"top_k": 2147483647}),
        ('{"temperature": 1e-7}', {"temperature": 0.0}),
        ('{"temperature": 1}', {"temperature": 1.0}),
        ('{"temperature": 0}', {"temperature": 0.0}),
        ('{"do_sample": false}', {"temperature": 0.0}),
        ('{"do_sample": false, "temperature": 0.7, "top_p": 0.9}',
         {"temperature": 0.0, "top_p": 0.9}),
        ('{"do_sample": true, "temperature": 0.7}', {"temperature": 0.7}),
        ('{"top_p": 0}', {"top_p": 1e-6}),
        ('{"repetition_penalty": 1.1}', {"repetition_penalty": 1.1}),
        ('{"min_new_tokens": 5}', {"min_tokens": 5}),
        ('{"length_penalty": -2, "num_beams": 1}', {"length_penalty": -2.0}),
        ('{"early_stopping": true}', {"early_stopping": True}),
        ('{"early_stopping": "never"}', {}),
        ('{"max_new_tokens": 20}', {}),
        ('{"top_p": 1e-300}', {"top_p": 1e-6}),
        ('{"temperature": null, "top_k": null, "top_p": null, "min_p": null, "do_sample": null}',
         {}),
    ],
)  # fmt: skip
def test_defaults_are_read(stated: str, want: dict[str, Any]) -> None:
    """Each of them is found in files of real models; the API's messages hold what is read."""
    read = model_defaults(json.loads(stated)).numbers
    assert read == want
    assert all(type(read[key]) is type(want[key]) for key in want)
    pb.SamplingParams(**read)


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("top_k", "true", "an integer of at least 0"),
        ("top_k", "50.5", "an integer of at least 0"),
        ("top_k", "-2", "an integer of at least 0"),
        ("top_k", '"50"', "an integer of at least 0"),
        ("top_k", "[50]", "an integer of at least 0"),
        ("top_k", "NaN", "an integer of at least 0"),
        ("top_k", "Infinity", "an integer of at least 0"),
        ("temperature", "-0.1", "a number from 0 to"),
        ("temperature", "1e39", "a number from 0 to"),
        ("temperature", "1" + "0" * 400, "a number from 0 to"),
        ("temperature", "NaN", "a number from 0 to"),
        ("temperature", "true", "a number from 0 to"),
        ("temperature", '"0.7"', "a number from 0 to"),
        ("temperature", "[0.7]", "a number from 0 to"),
        ("top_p", "1.5", "a number from 0 to 1"),
        ("top_p", "{}", "a number from 0 to 1"),
        ("min_p", "-1", "a number from 0 to 1"),
        ("min_p", '"0.1"', "a number from 0 to 1"),
        ("repetition_penalty", "0", "a number above 0 to"),
        ("length_penalty", "NaN", "a number from -3.4e"),
        ("min_new_tokens", "1.5", "an integer of at least 0"),
        ("min_length", '"3"', "an integer of at least 0"),
        ("early_stopping", "1", "true, false, "),
        ("bad_words_ids", "[5]", "a list of up to 4096 non-empty lists of token ids"),
        ("bad_words_ids", "[[]]", "a list of up to 4096 non-empty lists of token ids"),
        ("bad_words_ids", '[["a"]]', "a token id from 0"),
        ("bad_words_ids", "[[-1]]", "a list of up to 4096 non-empty lists of token ids"),
        ("suppress_tokens", '"5"', "a token id from 0"),
        ("sequence_bias", "[[[5]]]", "a list of up to 4096 pairs"),
        ("sequence_bias", '[[[5], "1"]]', "a list of up to 4096 pairs"),
        ("sequence_bias", "[[[5], NaN]]", "a list of up to 4096 pairs"),
        ("do_sample", "0", "true, false or null"),
        ("do_sample", '"false"', "true, false or null"),
        ("do_sample", "[]", "true, false or null"),
    ],
)
def test_what_cannot_be_read_is_refused(key: str, value: str, allowed: str) -> None:
    """Ignored, the model would answer otherwise than its makers state, and nobody would know;
    let through, it would come back as an internal error of a request, or of GetModelInfo."""
    with pytest.raises(ValueError, match=f"^generation_config.json: {key} is .*allowed: {allowed}"):
        model_defaults(json.loads(f'{{"{key}": {value}}}'))


def test_tokens_that_a_model_bans_or_biases() -> None:
    """As transformers' logits processors read them."""
    stated = {
        "eos_token_id": [2, 3],
        "bad_words_ids": [[5, 6], [2], [7]],
        "suppress_tokens": [7, 8],
        "sequence_bias": [[[9], -0.5], [[10, 11], -math.inf], [[12], 3]],
        "min_length": 4,
    }
    read = model_defaults(stated)
    assert set(read.bad_words) == {(5, 6), (7,), (8,), (10, 11)}
    assert read.logit_bias == {9: -0.5, 12: 3.0}
    assert read.min_length == 4
    assert model_defaults({"sequence_bias": {"(9,)": -0.5}}).logit_bias == {9: -0.5}


@pytest.mark.parametrize(
    ("stated", "is_told"),
    [
        ({"encoder_repetition_penalty": 1.1}, True),
        ({"encoder_repetition_penalty": 1}, False),
        ({"num_beams": 4}, True),
        ({"num_beams": 1, "typical_p": 1.0, "bad_words_ids": None}, False),
        ({"begin_suppress_tokens": [1, 2]}, True),
        ({"forced_eos_token_id": 2}, True),
        ({"no_repeat_ngram_size": "3"}, True),
    ],
)
def test_a_default_that_cannot_be_honoured_is_told(
    caplog: pytest.LogCaptureFixture, stated: dict[str, Any], is_told: bool
) -> None:
    """Refusing every request of such a model would be worse, saying nothing dishonest."""
    with caplog.at_level(logging.WARNING):
        assert model_defaults(stated) == ModelDefaults()
    assert [record.getMessage() for record in caplog.records] == [
        f"generation_config.json sets {key} to {value!r}, which is not supported: answers are made "
        "without it"
        for key, value in stated.items()
        if is_told
    ]
