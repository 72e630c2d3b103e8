"""Guards of the scheduler: each optimised part against its plain twin, in turns in one run.

`make test` runs both once and compares what they give; `make guards` measures. The least ratios
lie well below what was measured: a guard is to notice that an optimisation is gone, not that a
machine is another one.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from protos.plan import StepPlan
from scheduler_svc.core.limits import FULL_ATTENTION, Geometry, GroupGeometry
from scheduler_svc.core.memory.block_pool import BlockPool
from scheduler_svc.core.memory.prefix_cache import PrefixCache
from scheduler_svc.core.pack import pack
from scheduler_svc.core.request import Request, Sampling
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.seeds import streams, uniforms
from scheduler_svc.core.state import InFlight, State
from scheduler_svc.core.step.batch import Batch, Part
from scheduler_svc.core.step.fill import candidates, fill_by_phase
from scheduler_svc.text.text import Detokenizer, Pieces
from tests.bench.conftest import Guard
from tests.bench.step_cost import decoding
from tests.support.occupied import occupy
from tests.support.small_tokenizers import byte_level, metaspace
from tests.support.without_model import without_model

NUM_REQUESTS = 256


def step(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.plan()
    assert plan is not None
    scheduler.absorb(without_model(plan))
    return plan


@pytest.fixture(scope="module")
def state() -> State:
    """256 decoding requests, nothing in flight."""
    return decoding(NUM_REQUESTS).state


def all_at_once(state: State) -> list[Part]:
    batch = Batch(state)
    fill_by_phase(batch)
    state.memory.device.end_drawing()  # what was taken and not drawn is free again
    return batch.parts


def one_by_one(state: State) -> list[Part]:
    """What happens when they do not all fit."""
    batch = Batch(state)
    for row in candidates(state).tolist():
        batch.add_row(row, 1)
    state.memory.device.end_drawing()
    return batch.parts


def test_decodes(state: State, guard: Guard) -> None:
    """Decoding rows are added all at once, not in a Python loop."""
    (together,), alone = all_at_once(state), one_by_one(state)
    assert len(alone) == NUM_REQUESTS
    for name in ("rows", "num_new_tokens", "new_blocks", "tail_copies"):
        plain = np.concatenate([getattr(part, name) for part in alone], axis=-1)
        np.testing.assert_array_equal(getattr(together, name), plain)
    guard(partial(all_at_once, state), partial(one_by_one, state), at_least=10)


def plain_plan(state: State, committed: InFlight) -> dict[str, list[float]]:
    """The plan's larger arrays for decoding rows, request by request."""
    names = ("rows", "token_ids", "seq_lens", "blocks", "temperature", "top_k", "top_p", "u")
    plan: dict[str, list[float]] = {name: [] for name in names}
    for row, request in zip(committed.rows.tolist(), committed.requests, strict=True):
        plan["rows"].append(row)
        plan["token_ids"].append(request.token_ids[-1])
        plan["seq_lens"].append(len(request.token_ids))
        plan["blocks"] += state.memory.tables.of(0, row).tolist()
        plan["temperature"].append(request.sampling.temperature)
        plan["top_k"].append(request.sampling.top_k)
        plan["top_p"].append(request.sampling.top_p)
        plan["u"].append(plain_uniform(request.sampling.seed, 0, len(request.token_ids)))
    return plan


def plain_uniform(seed: int, sibling: int, position: int) -> float:
    """SplitMix64's finaliser with Python's integers."""

    def mix(value: int) -> int:
        value = (value + 0x9E3779B97F4A7C15) % 2**64
        value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        value = (value ^ value >> 27) * 0x94D049BB133111EB % 2**64
        return value ^ value >> 31

    return (mix(mix(mix(seed) ^ sibling) ^ position) >> 40) / 2**24


def test_pack(guard: Guard) -> None:
    """A plan is cut out of arrays, not collected from requests."""
    scheduler = decoding(NUM_REQUESTS)
    plan, state = scheduler.plan(), scheduler.state
    committed = state.in_flight[-1]
    plain = plain_plan(state, committed)
    for name, values in plain.items():
        packed = plan.sampling[name] if name in plan.sampling else getattr(plan, name)
        np.testing.assert_array_equal(packed, np.array(values, np.float32), name)
    guard(partial(pack, state, committed), partial(plain_plan, state, committed), at_least=2)


def test_a_step_does_not_look_at_who_waits(guard: Guard) -> None:
    """absorb included; 20,000 requests that find no row cost next to nothing."""
    alone, crowded = decoding(NUM_REQUESTS), decoding(NUM_REQUESTS, num_waiting=20_000)
    guard(partial(step, crowded), partial(step, alone), at_least=0.6, turns=31)


def test_a_step_of_many_costs_less_than_many_steps(guard: Guard) -> None:
    """absorb included: what a step costs is mostly not by the request."""
    many, few = decoding(1024), [decoding(64) for _ in range(16)]
    guard(partial(step, many), lambda: [step(scheduler) for scheduler in few], at_least=1.5)


def one_group(num_chunks: int, blocks_per_chunk: int) -> BlockPool:
    groups = (GroupGeometry(FULL_ATTENTION, 1, blocks_per_chunk),)
    return BlockPool(Geometry(16, num_chunks, 1, groups, max_model_len=8192), num_chunks, 2)


def published(num_tokens: int) -> tuple[PrefixCache, Request]:
    """A prompt whose blocks are all there."""
    pool = one_group(num_tokens // 16 + 10, 1)
    cache = PrefixCache(pool.allocators, 16)
    tokens = np.random.default_rng(2).integers(0, 50_000, num_tokens).tolist()
    request = Request("r", 0, tokens, num_tokens, num_tokens + 1, Sampling())
    for page, block in enumerate(occupy(pool, num_tokens // 16).tolist()):
        cache.publish(request, page, [block], [0])
    return cache, request


def test_prefix_lookup(guard: Guard) -> None:
    """The search is not made anew, however often a request is looked up."""
    cache, request = published(8192)

    def again() -> int:
        request.names.clear()
        request.hit = None
        hit = cache.match(request)
        return 0 if hit is None else hit.num_pages

    hit = cache.match(request)
    assert hit is not None
    assert hit.num_pages == again() == (8192 - 16) // 16
    guard(partial(cache.match, request), again, at_least=1.5)


def take_and_give(pool: BlockPool) -> None:
    for _ in range(10):
        pool.give(0, occupy(pool, 50))


def test_a_large_pool_allocates_like_a_small_one(guard: Guard) -> None:
    """Free blocks are at hand, not searched for."""
    small, large = (one_group(size, 4) for size in (50, 100_000))
    guard(partial(take_and_give, large), partial(take_and_give, small), at_least=0.5)


def test_uniform_numbers(guard: Guard) -> None:
    """One hash over arrays gives the numbers of all rows."""
    seeds, positions = np.arange(NUM_REQUESTS, dtype=np.uint64), np.arange(NUM_REQUESTS) + 7
    stream = streams(seeds, np.zeros_like(seeds))

    def plain() -> list[float]:
        return [plain_uniform(int(seed), 0, int(seed) + 7) for seed in range(NUM_REQUESTS)]

    assert uniforms(stream, positions).tolist() == plain()
    guard(partial(uniforms, stream, positions), plain, at_least=4)


@pytest.mark.parametrize(("kind", "least"), [("bytes", 30), ("pieces", 3)])
def test_detokenizer(kind: str, least: float, guard: Guard) -> None:
    """A token's text costs a look-up, or a short window, not decoding the whole answer again."""
    tokenizer = byte_level() if kind == "bytes" else metaspace()
    ids = tokenizer.encode("the naïve cat sat on a mat. " * 20, add_special_tokens=False).ids
    decode = partial(tokenizer.decode, skip_special_tokens=True)
    pieces = Pieces(decode) if kind == "bytes" else None

    def incremental() -> str:
        detokenizer = Detokenizer(decode, [], pieces)
        return "".join([*map(detokenizer.push, ids), detokenizer.finish()])

    def whole() -> str:
        texts = [decode(ids[: end + 1]) for end in range(len(ids))]
        return str(texts[-1])

    assert incremental() == whole()
    guard(incremental, whole, at_least=least)
