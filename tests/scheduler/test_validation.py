"""What a request may ask, how defaults come about, and that all of it reaches core and text."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tokenizers import Tokenizer as TokenizerOfWords
from tokenizers import models
from transformers import PreTrainedTokenizerFast

from protos import inference_pb2 as pb
from scheduler_svc.errors import RequestRejected
from scheduler_svc.front.prompts import prompt_token_ids
from scheduler_svc.front.validation import check_request_id, validate
from scheduler_svc.text.tokenizer import Tokenizer
from tests.support.asked import END, MODEL, TOKENIZER, chat_request, request, sampling
from tests.support.fake_engine import FACTS
from tests.support.small_tokenizers import byte_level, chat, metaspace


def test_neutral_values_pass() -> None:
    """Client libraries fill in neutral values; refusing them would break every such client."""
    submission = validate(
        request(
            sampling={
                "repetition_penalty": 1, "frequency_penalty": 0, "presence_penalty": 0,
                "min_tokens": 0, "n": 1, "beam_width": 1, "length_penalty": 1,
                "early_stopping": False, "json_object": False, "speculate": 0,
            },
            resume={},
            cacheSalt="tenant",
        ),
        "r", 0, MODEL, 8,
    )  # fmt: skip
    assert submission.new.cache_salt == "tenant"


def test_defaults_are_neutral() -> None:
    """Unset is not zero: temperature 0 would be greedy, top_p 0 impossible."""
    new = validate(request(), "r", 77, MODEL, 8).new
    chosen = new.sampling
    assert (chosen.temperature, chosen.top_p, chosen.top_k, chosen.min_p) == (1.0, 1.0, 0, 0.0)
    assert chosen.seed == 77
    assert chosen.stop_token_ids == {END}
    assert new.max_tokens == FACTS.max_model_len - len("hello")
    assert (new.priority, new.cache_salt, new.request_id) == (0, "", "r")


def test_defaults_of_the_model_lose_against_the_request() -> None:
    """The generation config states how the model is meant to be used; a client may differ."""
    stated = {"temperature": 0.6, "top_p": 0.9, "top_k": 1000, "min_p": 0.1}
    model = replace(MODEL, tokenizer=Tokenizer(chat(), stated))
    by_model = validate(request(), "r", 0, model, 8).new.sampling
    assert (by_model.temperature, by_model.top_p, by_model.min_p) == (0.6, 0.9, 0.1)
    assert by_model.top_k == FACTS.vocab_size  # more than that is the same, and fits the worker
    asked = validate(sampling(temperature=0, top_k=0, top_p=1, min_p=0), "r", 0, model, 8)
    chosen = asked.new.sampling
    assert (chosen.temperature, chosen.top_p, chosen.top_k, chosen.min_p) == (0.0, 1.0, 0, 0.0)


@pytest.mark.parametrize(
    ("name", "bounds"),
    [
        ("temperature", [0.0, 1e-6, 3.4e38]),
        ("top_p", [1e-45, 1e-9, 1.0]),
        ("min_p", [0.0, 1e-45, 1.0]),
        ("top_k", [0, 2**31 - 1]),
        ("seed", [0, 2**63 - 1]),
    ],
)
def test_the_bounds_that_messages_name_are_accepted(name: str, bounds: list[float]) -> None:
    """Fields are float32: 1e-6 arrives as 9.99999997e-07, less than "at least 1e-06"."""
    for bound in bounds:
        asked = pb.GenerateRequest(text="x", sampling=pb.SamplingParams(**{name: bound}))
        validate(asked, "r", 0, MODEL, 8)


def test_a_tiny_temperature_of_the_model_is_greedy() -> None:
    """Else every request that leaves it unset would be refused for what the model says."""
    model = replace(MODEL, tokenizer=Tokenizer(chat(), {"temperature": 1e-7}))
    assert validate(request(), "r", 0, model, 8).new.sampling.temperature == 0.0


def test_seed_zero_is_a_seed() -> None:
    """Unset and zero differ: a client that asks for seed 0 wants the same answer again."""
    assert validate(sampling(seed=0), "r", 77, MODEL, 8).new.sampling.seed == 0
    largest = (1 << 63) - 1
    assert validate(sampling(seed=str(largest)), "r", 77, MODEL, 8).new.sampling.seed == largest
    assert validate(sampling(), "r", 77, MODEL, 8).new.sampling.seed == 77


def test_what_the_scheduler_needs_of_a_request_reaches_it() -> None:
    """A field that is checked and then forgotten is ignored without a word."""
    asked = sampling(
        min_tokens=2, max_tokens=9, logprobs=3, prompt_logprobs=0, speculate=4,
        logit_bias={"7": -1.5, "5": 100, "6": 0}, frequency_penalty=0.5,
    )  # fmt: skip
    new = validate(asked, "r", 0, MODEL, 8).new
    assert (new.max_tokens, new.speculate, new.prompt_logprobs) == (9, 4, 0)
    assert (new.sampling.min_tokens, new.sampling.logprobs) == (2, 3)
    assert new.sampling.logit_bias == ((5, 100.0), (7, -1.5))
    assert new.sampling.frequency_penalty == 0.5
    new = validate(request(), "r", 0, MODEL, 8).new
    assert (new.speculate, new.prompt_logprobs, new.sampling.logprobs) == (0, None, None)
    assert (new.sampling.min_tokens, new.sampling.logit_bias, new.sampling.bad_words) == (0, (), ())


def test_a_request_may_only_score() -> None:
    """Such a prompt may fill the whole context, as no answer needs a place."""
    asked = request(text="x" * 128, sampling={"max_tokens": 0, "prompt_logprobs": 2})
    new = validate(asked, "r", 0, MODEL, 8).new
    assert (len(new.prompt_token_ids), new.max_tokens, new.prompt_logprobs) == (128, 0, 2)


def test_candidates_are_bounded_by_the_vocabulary_and_in_number() -> None:
    """The worker cannot find more; and scores of a long prompt would fill the memory."""
    tiny = replace(MODEL, facts=replace(FACTS, vocab_size=120))
    for field in ("logprobs", "prompt_logprobs"):
        with pytest.raises(RequestRejected, match=rf"{field} is 121; .*at most 120 \(the vocab"):
            validate(sampling(**{field: 121}), "r", 0, tiny, 8)
    long = replace(MODEL, facts=replace(FACTS, max_model_len=20_000, pool_tokens=20_000))
    asked = {"text": "x" * 10_000, "sampling": {"prompt_logprobs": 104, "max_tokens": 0}}
    validate(request(**asked), "r", 0, long, 8)
    asked["sampling"]["prompt_logprobs"] = 105  # type: ignore[index]
    with pytest.raises(RequestRejected, match=r"105; .*at most 104 for a prompt of 10000 tokens"):
        validate(request(**asked), "r", 0, long, 8)


@pytest.mark.parametrize("limit", [1025, 1024])
def test_the_number_of_biases_is_bounded(limit: int) -> None:
    """Each is added at every step."""
    model = replace(MODEL, facts=replace(FACTS, vocab_size=2000))
    asked = sampling(logit_bias={str(token_id): 1 for token_id in range(limit)})
    if limit == 1024:
        assert len(validate(asked, "r", 0, model, 8).new.sampling.logit_bias) == 1024
        return
    with pytest.raises(RequestRejected, match="logit_bias is '1025 tokens'; allowed: up to 1024"):
        validate(asked, "r", 0, model, 8)


def test_bad_words_are_banned_wherever_they_stand() -> None:
    """In mid-text a word has other tokens than behind a space, and each kind of tokenizer puts the
    space elsewhere."""
    rust = byte_level([("e", "n"), ("d", "."), ("Ġ", "en"), ("Ġ", "x")])
    word = rust.token_to_id
    spaced = replace(
        MODEL, tokenizer=Tokenizer(PreTrainedTokenizerFast(tokenizer_object=rust)),
    )  # fmt: skip
    banned = validate(sampling(bad_words=["end"]), "r", 0, spaced, 8).new.sampling.bad_words
    assert set(banned) == {(word("en"), word("d")), (word("Ġen"), word("d"))}
    # who must not say x says no space in front of it either; nor is anything banned twice
    banned = validate(sampling(bad_words=["y", " y", "zy"]), "r", 0, spaced, 8).new.sampling
    assert banned.bad_words == ((word("y"),),)
    banned = validate(sampling(bad_words=["\n", " "]), "r", 0, spaced, 8).new.sampling
    assert set(banned.bad_words) == {(word("Ċ"),), (word("Ġ"),)}
    pieces = metaspace()
    model = replace(MODEL, tokenizer=Tokenizer(wrapped_metaspace()))
    banned = validate(sampling(bad_words=["the"]), "r", 0, model, 8).new.sampling.bad_words
    spelled = {tuple(map(pieces.id_to_token, ids)) for ids in banned}
    assert spelled == {("▁the",), ("t", "h", "e")}


def test_a_bad_word_without_tokens_is_named() -> None:
    """It could never be banned."""
    rust = TokenizerOfWords(models.BPE({"a": 0}, []))  # drops all other letters
    model = replace(MODEL, tokenizer=Tokenizer(PreTrainedTokenizerFast(tokenizer_object=rust)))
    with pytest.raises(RequestRejected, match=r"sampling.bad_words\[1\] is 'ü'; .*has tokens for"):
        validate(
            pb.GenerateRequest(
                tokens=pb.TokenIds(ids=[0]), sampling=pb.SamplingParams(bad_words=["a", "ü"])
            ),
            "r",
            0,
            model,
            8,
        )


def test_words_that_the_model_bans_stay_banned() -> None:
    """Its makers keep tokens out of answers that the model was not made to say."""
    stated = {
        "bad_words_ids": [[7, 8], [END], [298]], "suppress_tokens": [9, 299], "eos_token_id": END,
        "sequence_bias": [[[5], 2.0], [[6], -1.0]],
    }  # fmt: skip
    model = replace(
        MODEL, tokenizer=Tokenizer(chat(), stated), facts=replace(FACTS, vocab_size=299)
    )
    chosen = validate(request(), "r", 0, model, 8).new.sampling
    assert chosen.bad_words == ((7, 8), (9,), (298,))
    assert chosen.logit_bias == ((5, 2.0), (6, -1.0))
    e = byte_level().token_to_id("e")
    asked = sampling(bad_words=["e"], logit_bias={"6": 0, "4": 1})
    chosen = validate(asked, "r", 0, model, 8).new.sampling
    assert chosen.bad_words == tuple(sorted([(7, 8), (9,), (298,), (e,)]))
    assert chosen.logit_bias == ((4, 1.0), (5, 2.0))


@pytest.mark.parametrize(
    ("stated", "asked", "want"),
    [
        ({"min_new_tokens": 3}, {}, 3),
        ({"min_new_tokens": 3}, {"max_tokens": 2}, 2),
        ({"min_new_tokens": 3}, {"min_tokens": 0}, 0),
        ({"min_length": 9}, {}, 4),
        ({"min_length": 4}, {}, 0),
        ({"min_length": 9, "min_new_tokens": 1}, {}, 1),
    ],
)
def test_the_least_length_that_a_model_states(
    stated: dict[str, int], asked: dict[str, int], want: int
) -> None:
    """It is no reason to refuse a request that wants less."""
    model = replace(MODEL, tokenizer=Tokenizer(chat(), stated))
    assert validate(sampling(**asked), "r", 0, model, 8).new.sampling.min_tokens == want


def test_a_stop_string_waits_for_min_tokens() -> None:
    """The text must know how many tokens may not end the answer."""
    (text,) = validate(sampling(stop=["b"], min_tokens=2), "r", 0, MODEL, 8).texts
    b = byte_level().token_to_id("b")
    assert [text.push(b), text.push(b), text.push(b)] == ["b", "b", ""]
    assert text.matched_stop == "b"


def test_stop_tokens() -> None:
    """ignore_eos keeps the client's own stop tokens."""
    asked = validate(sampling(stop_token_ids=[5]), "r", 0, MODEL, 8).new.sampling
    assert asked.stop_token_ids == {5, END}
    asked = validate(sampling(stop_token_ids=[5], ignore_eos=True), "r", 0, MODEL, 8)
    assert asked.new.sampling.stop_token_ids == {5}


def test_the_edges_of_the_context_fit() -> None:
    """Off by one here refuses what would fit, or lets in what never ends."""
    new = validate(sampling(max_tokens=123), "r", 0, MODEL, 8).new
    assert len(new.prompt_token_ids) + new.max_tokens == FACTS.max_model_len
    assert validate(request(text="x" * 127), "r", 0, MODEL, 8).new.max_tokens == 1


def test_a_pool_smaller_than_the_context_bounds_requests() -> None:
    """Such a request would wait in the queue for ever, and all behind it."""
    model = replace(MODEL, facts=replace(FACTS, pool_tokens=64))
    assert validate(request(), "r", 0, model, 8).new.max_tokens == 59
    with pytest.raises(RequestRejected, match=r"at most 59: .*5 tokens.* KV pool holds 64 tokens"):
        validate(sampling(max_tokens=60), "r", 0, model, 8)
    with pytest.raises(RequestRejected, match="is 64; allowed: at most 63"):
        validate(request(text="x" * 64), "r", 0, model, 8)


def test_prompts() -> None:
    """Text gets the special tokens that the model was trained with; a template brings its own."""
    model = replace(MODEL, tokenizer=Tokenizer(wrapped_metaspace()))
    assert prompt_token_ids(pb.GenerateRequest(text="a"), model)[0] == 1
    assert prompt_token_ids(pb.TokenizeRequest(text="a"), model, add_special_tokens=False)[0] != 1
    tokens = pb.GenerateRequest(tokens=pb.TokenIds(ids=[7, 0, 299]))
    assert prompt_token_ids(tokens, model) == [7, 0, 299]
    ids = prompt_token_ids(chat_request(("user", "hi")), MODEL)
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    with pytest.raises(RequestRejected, match="chat is 'given'; allowed: text or tokens"):
        prompt_token_ids(chat_request(("user", "hi")), model)


def test_text_of_the_answer() -> None:
    """The stream of a valid request must honour its stop strings and special tokens."""
    hello = byte_level().encode("hi END.").ids
    (text,) = validate(sampling(stop=["END"]), "r", 0, MODEL, 8).texts
    assert "".join(map(text.push, hello)) == "hi "
    assert text.matched_stop == "END"
    assert not text.include_stop_str_in_output
    (text,) = validate(sampling(skip_special_tokens=False), "r", 0, MODEL, 8).texts
    assert text.push(END) == "<|im_end|>"


def test_siblings() -> None:
    """Two siblings that share one text would put their tokens into each other's characters."""
    submission = validate(sampling(n=8, stop=["b"]), "r", 5, MODEL, 8)
    assert submission.new.n == 8
    first, second, *_ = submission.texts
    assert len(submission.texts) == 8
    e_acute = byte_level().encode("é").ids
    assert [first.push(e_acute[0]), second.push(e_acute[0])] == ["", ""]
    assert [first.push(e_acute[1]), second.push(e_acute[1])] == ["é", "é"]
    first.push(byte_level().encode("b").ids[0])
    assert (first.matched_stop, second.matched_stop) == ("b", None)
    assert validate(request(), "r", 5, MODEL, 8).new.n == 1


def test_priority_and_salt_reach_the_core() -> None:
    """An urgent request that waits like all others; a tenant that sees another's cache."""
    new = validate(request(priority=-3, cacheSalt="tenant"), "r", 0, MODEL, 8).new
    assert (new.priority, new.cache_salt) == (-3, "tenant")


@pytest.mark.parametrize("bad", ["x" * 257, "a\nb", "a\x00"])
def test_request_ids(bad: str) -> None:
    """They go into logs and metadata: no line breaks, no novels."""
    with pytest.raises(RequestRejected, match="request_id"):
        check_request_id(bad)
    check_request_id("ünï-1:2/3 4")


def wrapped_metaspace() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=metaspace(), eos_token="</s>")
