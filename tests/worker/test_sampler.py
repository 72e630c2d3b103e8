"""The sampler against transformers' own filters, against its neighbours, and against chance."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from worker.step import sampler
from worker.step.sampler import SampleRows, sample, split_rows

NUM_CASES = 250


def draw(
    logits: torch.Tensor,
    u: list[float] | np.ndarray,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> list[int]:
    """Tokens of one row of logits, one for each u."""
    count = len(u)
    return choose(
        logits.expand(count, -1),
        np.full(count, temperature, np.float32),
        np.full(count, top_k, np.int32),
        np.full(count, top_p, np.float32),
        np.full(count, min_p, np.float32),
        np.asarray(u, np.float32),
    ).tolist()


def choose(
    logits: torch.Tensor,
    temperature: np.ndarray,
    top_k: np.ndarray,
    top_p: np.ndarray,
    min_p: np.ndarray,
    u: np.ndarray,
) -> torch.Tensor:
    """`sample`, one sample per row of logits."""
    arrays = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    each = torch.arange(len(logits))
    kinds = [torch.from_numpy(rows) for rows in split_rows(arrays, logits.shape[1])]
    parameters = {name: torch.from_numpy(array) for name, array in arrays.items()}
    return sample(logits, SampleRows(each, each, *kinds, torch.from_numpy(u), parameters))


def kept_by_transformers(
    logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float
) -> torch.Tensor:
    """Probabilities [V] after the warpers in the order in which `generate` applies them."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    if min_p:
        warpers.append(MinPLogitsWarper(min_p))
    return warpers(torch.zeros(1, 1, dtype=torch.int64), logits[None]).softmax(-1)[0]


def random_case(seed: int) -> tuple[torch.Tensor, dict[str, float | int]]:
    """Logits and settings; every third case has many equal logits."""
    rng = np.random.default_rng(seed)
    vocab_size = int(rng.choice([5, 17, 100, 300, 1000]))
    logits = torch.from_numpy((rng.standard_normal(vocab_size) * rng.uniform(0.5, 6)).astype("f4"))
    if seed % 3 == 0:
        logits = (logits * 4).round() / 4
    return logits, {
        "temperature": float(np.float32(rng.uniform(0.3, 2.0))),
        "top_k": int(rng.choice([0, 1, 2, 5, 40, 256, 300, 4000])),
        "top_p": float(np.float32(rng.choice([1.0, rng.uniform(0.01, 0.999)]))),
        "min_p": float(np.float32(rng.choice([0.0, rng.uniform(0.001, 0.5)]))),
    }


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small tensors: more threads would only wait for each other."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture
def few_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes small vocabularies walk through all three sizes of candidates."""
    monkeypatch.setattr(sampler, "CANDIDATES", (8, 64))


@pytest.mark.parametrize("first", range(0, NUM_CASES, 50))
@pytest.mark.usefixtures("few_candidates")
def test_support_and_probabilities_equal_transformers(first: int) -> None:
    """Without this a served answer may hold tokens that `generate` could never give, or lack some.

    The tokens that a fine grid of u reaches, and how often, is compared with the probabilities
    that transformers' filters leave.
    """
    grid = (np.arange(512) + 0.5) / 512
    for seed in range(first, first + 50):
        logits, settings = random_case(seed)
        # by value: which of equal logits top_p keeps is open
        values, group = logits.unique(return_inverse=True)
        expected = torch.zeros(len(values), dtype=torch.float64)
        expected.index_add_(0, group, kept_by_transformers(logits, **settings).double())
        counts = group[draw(logits, grid, **settings)].bincount(minlength=len(values))
        # a token of probability p owns an interval of u of length p; without a filter the
        # intervals of equals are not neighbours, and each is off by up to one grid point
        is_filtered = (
            0 < settings["top_k"] < len(logits) or settings["top_p"] < 1 or settings["min_p"]
        )
        num_intervals = 1 if is_filtered else group.bincount()
        assert ((counts - expected * 512).abs() <= 1.1 * num_intervals).all(), (seed, settings)
        assert not counts[expected == 0].any(), (seed, settings)


@pytest.mark.parametrize("size", [1, 3, 8, 100])
@pytest.mark.usefixtures("few_candidates")
def test_equal_logits_are_kept_as_transformers_keeps_them(size: int) -> None:
    """Ties with the last of top_k all stay, which is easily lost when only the largest candidates
    are looked at; of equals that top_p cuts between, as many stay, the lowest ids of them."""
    logits = torch.zeros(200)
    logits[50 : 50 + size] = 1.0
    grid = (np.arange(2000) + 0.5) / 2000
    for settings in ({"top_k": 2}, {"top_k": 120}, {"top_p": 0.31}, {"top_k": 2, "top_p": 0.41}):
        full = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | settings
        expected = kept_by_transformers(logits, **full) > 0
        kept = torch.zeros(200, dtype=torch.bool)
        kept[draw(logits, grid, **full)] = True
        for value in (0.0, 1.0):
            assert kept[logits == value].sum() == expected[logits == value].sum(), settings
            assert (kept[logits == value].int().diff() <= 0).all(), settings


def mixed_rows(vocab_size: int, count: int) -> tuple[torch.Tensor, dict[str, np.ndarray]]:
    rng = np.random.default_rng(count)
    logits = torch.from_numpy((rng.standard_normal((count, vocab_size)) * 3).astype("f4"))
    logits[::4] = (logits[::4] * 2).round() / 2
    return logits, {
        "temperature": rng.choice([0.0, 0.7, 1.0, 1.6], count).astype(np.float32),
        "top_k": rng.choice([0, 0, 1, 50, 400], count).astype(np.int32),
        "top_p": rng.choice([1.0, 0.5, 0.95], count).astype(np.float32),
        "min_p": rng.choice([0.0, 0.0, 0.1], count).astype(np.float32),
        "u": (rng.integers(0, 2**24, count) / 2**24).astype(np.float32),
    }


@pytest.mark.parametrize(("vocab_size", "num_threads"), [(97, 1), (49152, 1), (49152, 2)])
def test_row_does_not_depend_on_its_neighbours(vocab_size: int, num_threads: int) -> None:
    """The same seed must give the same tokens alone, in any batch and after a crash."""
    torch.set_num_threads(num_threads)
    logits, settings = mixed_rows(vocab_size, 24)
    together = choose(logits, **settings)
    for row in range(24):
        alone = choose(
            logits[row : row + 1], **{name: array[[row]] for name, array in settings.items()}
        )
        assert alone.item() == together[row].item()
    order = np.random.default_rng(1).permutation(24)
    shuffled = choose(logits[order], **{name: array[order] for name, array in settings.items()})
    assert shuffled.tolist() == together[order].tolist()


@pytest.mark.parametrize("num_threads", [1, 2])
def test_intermediate_sums_do_not_depend_on_neighbours(num_threads: int) -> None:
    """Equal tokens could be luck, as only a borderline u tells: so the sums must be equal bits."""
    torch.set_num_threads(num_threads)
    logits, _ = mixed_rows(49152, 16)
    probs = logits.softmax(dim=-1)
    cumulative = probs.cumsum(dim=-1, dtype=torch.float64)
    for row in range(16):
        alone = logits[row : row + 1].clone().softmax(dim=-1)
        assert torch.equal(alone[0], probs[row])
        assert torch.equal(alone.cumsum(dim=-1, dtype=torch.float64)[0], cumulative[row])


@pytest.mark.parametrize("settings", [{}, {"top_k": 7}, {"top_p": 0.8}, {"min_p": 0.05}])
def test_distribution_is_that_of_the_softmax(settings: dict[str, float]) -> None:
    """Without this a biased sampler would pass: chi-square over 20,000 random draws."""
    logits = torch.tensor([2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -1.5, -2.0, -2.5])
    full = {"temperature": 0.9, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | settings
    expected = kept_by_transformers(logits, **full).double().numpy() * 20_000
    u = (np.random.default_rng(7).integers(0, 2**24, 20_000) / 2**24).astype(np.float32)
    counts = np.bincount(draw(logits, u, **full), minlength=10)
    kept = expected > 0
    assert not counts[~kept].any()
    chi_square = ((counts - expected)[kept] ** 2 / expected[kept]).sum()
    assert chi_square < 27.9  # 99.9 % quantile at 9 degrees of freedom: an upper bound for fewer


@pytest.mark.parametrize("settings", [{}, {"top_k": 3}, {"top_p": 0.999}, {"min_p": 1e-9}])
def test_ends_of_u_stay_inside(settings: dict[str, float]) -> None:
    """u = 0 must not pick a token of probability 0, the largest u must not run past the end."""
    logits = torch.full((1000,), float("-inf"))
    logits[[3, 500, 998]] = torch.tensor([0.0, 1.0, -20.0])
    first, last = draw(logits, [0.0, (2**24 - 1) / 2**24], **settings)
    assert {first, last} <= {3, 500, 998}


def test_greedy_takes_the_lowest_id_of_equals() -> None:
    """Two equal logits must not let the batch size choose: `generate` takes the first."""
    logits = torch.zeros(64, 49152)
    logits[:, [4, 700, 49151]] = 5.0
    settings = (np.zeros(64), np.full(64, 5), np.full(64, 0.5), np.zeros(64), np.full(64, 0.99))
    dtypes = ("f4", "i4", "f4", "f4", "f4")
    arrays = [array.astype(dtype) for array, dtype in zip(settings, dtypes, strict=True)]
    assert choose(logits, *arrays).tolist() == [4] * 64
    assert choose(logits[:1], *[array[:1] for array in arrays]).tolist() == [4]


@pytest.mark.parametrize("vocab_size", [511, 512, 513, 1000, 49152, 50257])
def test_greedy_is_the_first_of_the_largest(vocab_size: int) -> None:
    """The largest is looked for in parts; few different values, so that parts and the last one,
    which may be shorter, have equals."""
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randint(-9, 9, (40, vocab_size), generator=generator).float()
    logits[30:] = -100.0  # only a few stand out
    for row in range(30, 40):
        logits[row, torch.randint(vocab_size, (2,), generator=generator)] = 1.0
    logits[39, -1] = 2.0
    ones = np.ones(40, np.float32)
    chosen = choose(logits, 0 * ones, 0 * ones.astype(np.int32), ones, 0 * ones, 0 * ones)
    assert chosen.tolist() == [int(row.numpy().argmax()) for row in logits]


def test_tiny_temperature_is_greedy() -> None:
    """logits / temperature must not overflow into NaN."""
    logits = torch.tensor([50.0, 90.0, 89.0])
    assert draw(logits, [0.0, 0.5, 0.9999], temperature=1e-38) == [1, 1, 1]


def test_rows_that_are_not_finite_get_a_valid_id() -> None:
    """Their request fails, but the step that holds them must not, for the sake of the others."""
    for settings in ({}, {"top_k": 3}, {"top_p": 0.5}, {"temperature": 0.0}):
        for bad in (float("nan"), float("-inf"), float("inf")):
            assert 0 <= draw(torch.full((600,), bad), [0.7], **settings)[0] < 600


def test_empty_batch() -> None:
    """A step of prefill chunks alone samples nothing."""
    empty = np.zeros(0, np.float32)
    assert choose(torch.zeros(0, 10), empty, empty.astype("i4"), empty, empty, empty).shape == (0,)


class Elsewhere:
    """Logits that say they lie on a device, and give themselves to the CPU."""

    def __init__(self, logits: torch.Tensor) -> None:
        self._logits = logits
        self.device = torch.device("mps")

    def __len__(self) -> int:
        return len(self._logits)

    def cpu(self) -> torch.Tensor:
        return self._logits


def test_a_device_without_float64_leaves_sampling_to_the_cpu(monkeypatch):
    """MPS has none: every request that is not greedy failed there."""
    logits = torch.randn(3, 50)
    each, ones = torch.arange(3), torch.ones(3)
    kinds = [torch.tensor([0]), torch.tensor([1]), torch.tensor([2])]
    top_k = torch.tensor([0, 0, 5], dtype=torch.int32)
    parameters = {"temperature": ones, "top_k": top_k, "top_p": ones, "min_p": 0 * ones}
    samples = SampleRows(each, each, *kinds, 0.7 * ones, parameters)
    right = sample(logits, samples)
    went = []
    monkeypatch.setattr(torch.Tensor, "to", lambda tokens, device: went.append(device) or tokens)
    assert torch.equal(sample(Elsewhere(logits), samples), right)
    assert went == [torch.device("mps")]
