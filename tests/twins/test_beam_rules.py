"""The rules of a beam search, by themselves: fed with a model's exact log probabilities, they give
the hypotheses and scores of transformers' `generate(num_beams=...)`."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from transformers import PreTrainedModel

from scheduler_svc.core.beams import Candidates, Search
from scheduler_svc.core.request import BeamSearch, Sampling
from tests.support import tiny_models
from tests.support.beam_oracle import Scored, generate_beams

MAX_TOKENS = 10


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    config = tiny_models.llama()
    config.num_hidden_layers = 1
    return tiny_models.build(config)


def candidates(model: PreTrainedModel, sequences: Sequence[list[int]], k: int) -> list[Candidates]:
    """The k most probable next tokens of each sequence, from the model's whole forward."""
    with torch.inference_mode():
        logits = model(torch.tensor(sequences)).logits[:, -1].float()
    logprobs, ids = torch.log_softmax(logits, dim=-1).topk(k)
    return [Candidates(i.int().numpy(), p.numpy()) for i, p in zip(ids, logprobs, strict=True)]


def search(
    model: PreTrainedModel,
    prompt: list[int],
    beams: BeamSearch,
    stops: Sequence[int],
    max_tokens: int = MAX_TOKENS,
) -> Search:
    state = Search(beams, Sampling(stop_token_ids=frozenset(stops), logprobs=2), max_tokens)
    while not state.has_ended:
        sequences = [prompt + beam.token_ids for beam in state.beams]
        state.advance(candidates(model, sequences, state.num_candidates))
    return state


def of(state: Search) -> Scored:
    return [(hypothesis.token_ids, hypothesis.score) for hypothesis in state.answers()]


def prompt_of(seed: int, length: int = 9) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(tiny_models.VOCAB_SIZE, (length,), generator=generator).tolist()


def likely_stops(model: PreTrainedModel, prompt: list[int], count: int) -> list[int]:
    """Tokens that a search meets early on: of the fourth tokens of the best hypotheses."""
    found = generate_beams(model, prompt, 5, BeamSearch(6, 6))
    return list(dict.fromkeys(tokens[-1 - n % 3] for n, (tokens, _) in enumerate(found)))[:count]


SETTINGS = [
    (2, 1, 1.0, False, 1),
    (3, 3, 1.0, True, 3),
    (5, 2, 0.0, False, 1),
    (3, 3, 0.0, True, 0),
    (2, 2, -0.7, False, 3),
    (5, 5, -0.7, True, 1),
    (3, 2, 2.0, False, 3),
    (4, 4, 2.0, True, 1),
]


@pytest.mark.parametrize(
    ("width", "num_answers", "length_penalty", "early_stopping", "num_stops"), SETTINGS
)
def test_hypotheses_are_those_of_transformers(
    model: PreTrainedModel,
    width: int,
    num_answers: int,
    length_penalty: float,
    early_stopping: bool,
    num_stops: int,
) -> None:
    beams = BeamSearch(width, num_answers, length_penalty, early_stopping)
    prompt = prompt_of(width)
    stops = likely_stops(model, prompt, num_stops)
    right = generate_beams(model, prompt, MAX_TOKENS, beams, stops)
    found = of(search(model, prompt, beams, stops))
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in right]
    assert [score for _, score in found] == pytest.approx([s for _, s in right], rel=1e-5)
    reasons = {len(tokens) < MAX_TOKENS for tokens, _ in found}
    assert reasons <= {num_stops > 0, False}


def test_scores_of_tokens_sum_up_to_the_hypothesis(model: PreTrainedModel) -> None:
    """As transformers' compute_transition_scores."""
    for hypothesis in search(
        model, prompt_of(3), BeamSearch(4, 4, length_penalty=0.0), ()
    ).answers():
        assert [score.token_id for score in hypothesis.scores] == hypothesis.token_ids
        assert sum(score.logprob for score in hypothesis.scores) == pytest.approx(hypothesis.score)
        for score in hypothesis.scores:
            assert len(score.top) == 2
            assert score.top[0][1] >= score.top[1][1]
            better = [token for token, logprob in score.top if logprob > score.logprob]
            assert len(better) == min(2, score.rank - 1)


def test_one_token_is_enough(model: PreTrainedModel) -> None:
    beams = BeamSearch(6, 6)
    right = generate_beams(model, prompt_of(5), 1, beams)
    found = of(search(model, prompt_of(5), beams, (), max_tokens=1))
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in right]
