"""Biases, penalties, bans and masks against transformers' processors and plain formulas."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from protos.plan import StepPlan
from tests.support.sampled_steps import Case, Sampled, plan_of_cases, run_cases
from tests.support.tiny_models import llama
from worker.step import logits_edits, sampler

INF = math.inf
VOCAB = 50
NUM_CASES = 60
GRID = 256  # values of u
EOS = 3


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def random_logits(seed: int, rows: int = 1, vocab_size: int = VOCAB) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 3 * torch.randn(rows, vocab_size, generator=generator)


def edited(logits: torch.Tensor, case: Case, **options: object) -> torch.Tensor:
    """The logits [V] that one case is sampled from."""
    plan = plan_of_cases([case])
    return run_cases(logits, plan, last_tokens=[_last(case)], **options).logits[0]  # type: ignore


def _last(case: Case) -> int:
    return case.output[-1] if len(case.output) else 0


def random_text(rng: np.random.Generator) -> tuple[list[int], list[int]]:
    """A prompt and an output with repetitions."""
    lengths = rng.integers(1, 20, 2)
    prompt, output = (rng.integers(VOCAB, size=n).tolist() for n in lengths)
    return prompt, output + output[: rng.integers(3)]


def by_transformers(
    processors: list[object], logits: torch.Tensor, prompt: list[int], output: list[int]
) -> torch.Tensor:
    ids = torch.tensor([prompt + output])
    return LogitsProcessorList(processors)(ids, logits.clone())[0]  # type: ignore[arg-type]


def test_each_edit_equals_transformers() -> None:
    """Who moves here must get the answers that he is used to, with and without run-ahead. Numbers
    are equal bit by bit."""
    rng = np.random.default_rng(1)
    print(f"\n{'processor':36} {'cases':>5} {'equal':>5} {'of them planned ahead':>22}")
    for name in ("RepetitionPenalty", "SequenceBias", "NoBadWords", "MinNewTokensLength"):
        equal = ahead = 0
        for seed in range(NUM_CASES):
            logits, (prompt, output) = random_logits(seed), random_text(rng)
            case = Case(prompt, output, run_ahead=bool(seed % 2))
            if name == "RepetitionPenalty":
                penalty = float(np.float32(rng.choice([0.5, 0.9, 1.3, 2.0])))
                case.settings = {"repetition_penalty": penalty}
                right = [RepetitionPenaltyLogitsProcessor(penalty)]
            elif name == "SequenceBias":
                case.bias = [(int(t), float(rng.normal())) for t in rng.permutation(VOCAB)[:9]]
                right = [SequenceBiasLogitsProcessor([[[t], value] for t, value in case.bias])]
            elif name == "NoBadWords":
                tokens = rng.permutation(VOCAB)[:4].tolist()
                pair = [output[-1] if seed % 3 else 7, tokens[0]]
                words = [[token] for token in tokens[1:]] + [pair]
                case.bias = [(token, -INF) for token in tokens[1:]]
                if case.run_ahead:
                    case.bias_after = [(pair[1], pair[0], -INF)]
                elif output[-1] == pair[0]:
                    case.bias = [*case.bias, (pair[1], -INF)]
                right = [NoBadWordsLogitsProcessor(words)]
            else:
                case.bias = [(EOS, -INF)] if len(output) < 9 else []
                right = [MinNewTokensLengthLogitsProcessor(len(prompt), 9, EOS)]
            expected = by_transformers(right, logits, prompt, output)
            equal += torch.equal(edited(logits, case), expected)
            ahead += case.run_ahead
        print(f"{name:36} {NUM_CASES:5} {equal:5} {ahead:22}")
        assert equal == NUM_CASES, name


def test_frequency_and_presence_count_the_output_only() -> None:
    """As vLLM and OpenAI define them; transformers has no such processors."""
    rng = np.random.default_rng(2)
    for seed in range(NUM_CASES):
        logits, (prompt, output) = random_logits(seed), random_text(rng)
        frequency, presence = (float(np.float32(x)) for x in rng.uniform(-2, 2, 2))
        settings = {"frequency_penalty": frequency, "presence_penalty": presence}
        expected = logits[0].clone()
        for token, count in Counter(output).items():
            expected[token] -= torch.tensor(frequency) * count
            expected[token] -= torch.tensor(presence)
        for run_ahead in (False, True):
            got = edited(logits, Case(prompt, output, settings, run_ahead=run_ahead))
            assert torch.equal(got, expected), (seed, run_ahead)


@pytest.mark.parametrize("repeats", [0, 1, 3])
def test_the_unknown_token_counts_once_more(repeats: int) -> None:
    """It may be new, in the prompt, or generated before; penalised twice, or with the old count,
    answers would depend on run-ahead."""
    settings = {"repetition_penalty": 1.5, "frequency_penalty": 0.25, "presence_penalty": 0.5}
    for prompt in ([5, 6], [5, 6, 9]):
        output = [*[9] * repeats, 8, 9]
        known, unknown = (Case(prompt, output, settings, run_ahead=ahead) for ahead in (0, 1))
        logits = random_logits(repeats)
        assert torch.equal(edited(logits, unknown), edited(logits, known))


def test_the_order_of_edits() -> None:
    """logit_bias comes before the penalties (a positive sum is divided), the repetition penalty
    before the others (which it does not scale), bans last."""
    logits = torch.tensor([[1.0, -1.0, 4.0, -4.0, 2.0]])
    settings = {"repetition_penalty": 2.0, "frequency_penalty": 0.5, "presence_penalty": 0.25}
    case = Case([1], [0, 0, 2], settings, bias=[(0, -3.0), (1, 2.0), (4, -INF)])
    got = edited(logits, case).tolist()
    assert got == [-2.0 * 2 - 1 - 0.25, (1.0) / 2, 2 - 0.5 - 0.25, -4.0, -INF]


def test_everything_together_against_transformers() -> None:
    """Allowed tokens and their probabilities after all processors and filters, over a grid of u,
    by value, as which of equal logits top_p keeps is open. Prints the table."""
    rng = np.random.default_rng(3)
    grid = (np.arange(GRID) + 0.5) / GRID
    worst, num_allowed = 0.0, 0
    for seed in range(NUM_CASES):
        logits, (prompt, output) = random_logits(seed), random_text(rng)
        temperature, top_p, min_p, penalty = (
            float(np.float32(x))
            for x in (rng.uniform(0.4, 2), rng.uniform(0.3, 1), rng.uniform(0, 0.2), 1.3)
        )
        top_k = int(rng.integers(2, VOCAB))
        biases = [(int(t), float(rng.normal())) for t in rng.permutation(VOCAB)[:5]]
        banned = [t for t in rng.permutation(VOCAB)[:6].tolist() if t != EOS]
        case = Case(
            prompt,
            output,
            {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
            | {"repetition_penalty": penalty},
            bias=[*biases, *((token, -INF) for token in (*banned, EOS))],
            run_ahead=bool(seed % 2),
        )
        expected = by_transformers(
            [
                SequenceBiasLogitsProcessor([[[t], value] for t, value in biases]),
                RepetitionPenaltyLogitsProcessor(penalty),
                NoBadWordsLogitsProcessor([[token] for token in banned]),
                MinNewTokensLengthLogitsProcessor(len(prompt), 99, EOS),
                TemperatureLogitsWarper(temperature),
                TopKLogitsWarper(top_k),
                TopPLogitsWarper(top_p),
                MinPLogitsWarper(min_p),
            ],
            logits,
            prompt,
            output,
        ).softmax(-1)
        cases = [Case(**{**vars(case), "u": u}) for u in grid]
        sampled = run_cases(
            logits.expand(GRID, -1), plan_of_cases(cases), last_tokens=[output[-1]] * GRID
        )
        counts = torch.tensor(sampled.tokens).bincount(minlength=VOCAB)
        assert not counts[expected == 0].any(), seed
        difference = (counts / GRID - expected).abs().max().item()
        assert difference <= 1.1 / GRID, seed
        worst, num_allowed = max(worst, difference), num_allowed + int((expected > 0).sum())
    print(
        f"\nall processors and filters: {NUM_CASES} cases, {num_allowed} allowed tokens, none "
        f"other drawn; shares of {GRID} u off by at most {worst * GRID:.2f} grid points"
    )


def mixed(seed: int, count: int, vocab_size: int) -> list[Case]:
    """Every fourth one asks for nothing."""
    rng = np.random.default_rng(seed)
    cases = []
    for i in range(count):
        case = Case(u=float(rng.integers(2**20) / 2**20), settings={"temperature": float(i % 3)})
        if i % 4:
            case.prompt, case.output = (rng.integers(vocab_size, size=n) for n in (20, 9))
            case.prompt, case.output = case.prompt.tolist(), case.output.tolist()
            names = ("repetition_penalty", "frequency_penalty", "presence_penalty")
            case.settings = {**case.settings, **dict.fromkeys(names, 0.5 + 0.1 * i)}
            case.run_ahead = bool(i % 2)
        if i % 4 > 1:
            case.bias = [(int(t), -INF if t % 2 else 1.5) for t in rng.permutation(vocab_size)[:9]]
        if i % 5 == 4:
            case.is_beam = True
        cases.append(case)
    return cases


@pytest.mark.parametrize(("vocab_size", "num_threads"), [(50, 1), (4099, 2)])
def test_a_row_does_not_depend_on_its_neighbours(vocab_size: int, num_threads: int) -> None:
    """The same seed gives the same tokens alone, in any batch, and in any slice of it."""
    torch.set_num_threads(num_threads)
    cases, logits = mixed(1, 24, vocab_size), random_logits(2, 24, vocab_size)
    last = [case.output[-1] if len(case.output) else 0 for case in cases]
    masks = {i: range(i % 3, vocab_size, 3) for i in range(0, 24, 3)}
    together = run_cases(logits, plan_of_cases(cases), last_tokens=last, masks=masks)
    for at_once in (1, 7):
        sliced = run_cases(
            logits, plan_of_cases(cases), last_tokens=last, masks=masks, at_once=at_once
        )
        assert sliced.tokens == together.tokens
        assert torch.equal(sliced.logits, together.logits)
    for i in range(24):
        own_mask = {0: masks[i]} if i in masks else None
        alone = run_cases(
            logits[i : i + 1], plan_of_cases([cases[i]]), last_tokens=[last[i]], masks=own_mask
        )
        assert torch.equal(alone.logits[0], together.logits[i])
        assert alone.tokens == [together.tokens[i]]


def test_rows_without_edits_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """They must cost nothing: no step without edits enters the edits at all, and beside edited rows
    they keep every bit, NaN included."""
    logits = random_logits(1, 3)
    logits[1] = math.nan
    cases = [Case(), Case(), Case([1], [2], {"repetition_penalty": 2.0})]
    seen = run_cases(logits, plan_of_cases(cases)).logits
    assert torch.equal(seen[:2].view(torch.int32), logits[:2].view(torch.int32))
    assert not torch.equal(seen[2], logits[2])
    monkeypatch.setattr("worker.step.sampling.edit_logits", None)
    plan = plan_of_cases(cases[:1])
    run = run_cases(logits, plan, sample=lambda given, _: given.argmax(dim=-1))
    assert run.tokens == [int(logits[0].argmax())]


def test_tokens_beyond_the_logits_have_no_effect() -> None:
    """A prompt, a bad word or a stop token may be an id of an embedding or a tokenizer that is
    larger than the vocabulary."""
    case = Case([VOCAB, VOCAB + 9], [], {"repetition_penalty": 2.0})
    case.bias = [(VOCAB, 3.0), (VOCAB, -INF)]
    got = edited(random_logits(1), case)
    assert torch.equal(got, random_logits(1)[0])


def masked(logits: torch.Tensor, case: Case, allowed: list[int]) -> Sampled:
    return run_cases(logits, plan_of_cases([case]), last_tokens=[_last(case)], masks={0: allowed})


@pytest.mark.parametrize("vocab_size", [31, 32, 33, 64, 1000])
def test_a_mask_leaves_what_it_allows(vocab_size: int) -> None:
    """Bits at both ends of words, and of the last one."""
    logits = random_logits(vocab_size, 1, vocab_size)
    for allowed in ([0], [vocab_size - 1], [*range(0, vocab_size, 7), vocab_size - 1], [31 % 31]):
        got = masked(logits, Case(), allowed).logits[0]
        assert torch.isfinite(got).nonzero().flatten().tolist() == sorted(set(allowed))
        assert torch.equal(got[allowed], logits[0, allowed])


@pytest.mark.parametrize("temperature", [0.0, 1e-6, 1.0])
@pytest.mark.parametrize("settings", [{}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.1}])
def test_something_is_always_left(temperature: float, settings: dict[str, float]) -> None:
    """A grammar that allows only what bad_words ban, or what the model finds impossible: the mask
    wins. Bans that ban everything are dropped. Never NaN, never a token that the mask forbids."""
    settings = {**settings, "temperature": temperature}
    logits = random_logits(1)
    banned = Case(settings=settings, bias=[(t, -INF) for t in (4, 5, 5)], u=0.7)
    for allowed in ([4], [4, 5]):
        assert masked(logits, banned, allowed).tokens[0] in allowed
    assert masked(logits, banned, [4, 9]).tokens == [9]
    impossible = logits.clone()
    impossible[:, :40] = -INF
    assert masked(impossible, Case(settings=settings), [7]).tokens == [7]
    all_banned = Case(settings=settings, bias=[(t, -INF) for t in range(VOCAB)])
    plan = plan_of_cases([all_banned, Case(settings=settings)])
    both = run_cases(logits.expand(2, -1), plan)
    assert torch.equal(both.logits[0], both.logits[1])
    assert both.tokens[0] == both.tokens[1]


@pytest.mark.parametrize("temperature", [0.0, 1e-6, 1.0])
def test_extreme_settings_stay_numbers(temperature: float) -> None:
    """Finite settings may overflow float32; then a forbidden token would be as likely as any."""
    for bias in (3e38, -3e38):
        for penalty in (1e-38, 3e38):
            settings = {"repetition_penalty": penalty, "temperature": temperature}
            tokens = list(range(VOCAB))
            case = Case(tokens, [2], settings, bias=[(t, bias) for t in tokens], u=0.3)
            run = masked(random_logits(4), case, [11, 12])
            assert run.tokens[0] in (11, 12)
            assert not run.logits.isnan().any()


def test_slices_of_dense_work_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks, beams and bans copy rows: a few at a time."""
    cases = [Case(is_beam=True, bias=[(1, -INF)]) for _ in range(5)]
    logits, masks = random_logits(1, 5), {i: range(1 + i, VOCAB) for i in range(5)}
    right = run_cases(logits, plan_of_cases(cases), masks=masks)
    monkeypatch.setattr(logits_edits, "MOST_AT_ONCE", 2 * VOCAB)
    assert torch.equal(run_cases(logits, plan_of_cases(cases), masks=masks).logits, right.logits)
    assert sampler.MOST_AT_ONCE > 2 * VOCAB


# Through the runner


@pytest.mark.parametrize("is_padded", [False, True])
def test_a_history_that_is_ahead_equals_one_that_is_known(served, is_padded: bool) -> None:
    """Two steps in flight: what the first one sampled is in no plan, and is penalised all the
    same. It does not leave the row: the other row's last token is another."""
    prompts = [[1, 2, 3], [4, 5, 6, 7]]
    it = served(llama, depth=2)
    if is_padded:
        it.runner.use_static_inputs(captures=False)
    first, ahead = it.first_plan(*prompts, max_tokens=9), it.core.plan()
    assert ahead.token_ids.tolist() == [-1, -1]
    settings = {"repetition_penalty": 1.7, "frequency_penalty": 1.5, "presence_penalty": 0.5}

    def with_history(plan: StepPlan, last: list[int], **changes: object) -> StepPlan:
        histories = [
            dict.fromkeys(prompt, 0) | {token: 1}
            for prompt, token in zip(prompts, last, strict=True)
        ]
        values = {name: np.full(2, value, np.float32) for name, value in settings.items()}
        tokens = [token for history in histories for token in history]
        counts = [count for history in histories for count in history.values()]
        start = np.cumsum([0, *map(len, histories)])
        return replace(
            plan,
            sampling={**plan.sampling, **values},
            history_start=start.astype(np.int32),
            history_tokens=np.array(tokens, np.int32),
            history_counts=np.array(counts, np.int32),
            **changes,
        )

    launched = it.runner.launch(first)
    running = it.runner.launch(with_history(ahead, [-1, -1]))
    known = launched.wait().token_ids
    got = running.wait().token_ids.tolist()
    from_device = it.logits[-1]
    again = it.step(with_history(ahead, known.tolist(), token_ids=known)).token_ids.tolist()
    assert torch.equal(it.logits[-1], from_device)
    assert again == got
    plain = it.step(replace(ahead, token_ids=known))
    assert not torch.equal(it.logits[-1], from_device), "no penalty was applied"
    assert plain.is_finite.tolist() == [1, 1]
