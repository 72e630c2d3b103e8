"""Which cached blocks to reclaim first: `python -m tests.bench.eviction`.

Runs the real scheduler core, without a model, over traces of three kinds of use, once with the
least recently used block reclaimed first and once with the most recent, as the source document
has it; prints the share of prompt tokens found in the prefix cache.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np

from scheduler_svc.core.memory.cache_pool import CachePool
from scheduler_svc.core.request import NewRequest
from tests.support.simulation import Setup, Simulation
from tests.support.without_model import without_model

PAGE = 16
VOCABULARY = 50_000
SETUP = Setup(
    num_blocks=600, page_size=PAGE, max_batch_tokens=2048, max_requests=16, max_model_len=4096,
    vocab_size=VOCABULARY,
)  # fmt: skip


def tokens(rng: np.random.Generator, count: int) -> list[int]:
    return rng.integers(0, VOCABULARY, count).tolist()


def system_prompts(rng: np.random.Generator) -> list[list[int]]:
    """Many users on 24 system prompts of 512 tokens, some much more popular than others."""
    prompts = [tokens(rng, 512) for _ in range(24)]
    popularity = 1 / np.arange(1, 25)
    chosen = rng.choice(24, 1200, p=popularity / popularity.sum())
    return [prompts[i] + tokens(rng, int(rng.integers(16, 200))) for i in chosen]


def chats(rng: np.random.Generator) -> list[list[int]]:
    """60 conversations of 4 to 12 turns; each sends its whole history again, 16 are active."""
    waiting = [int(rng.integers(4, 13)) for _ in range(60)]
    active: list[tuple[list[int], int]] = []
    trace = []
    while waiting or active:
        while waiting and len(active) < 16:
            active.append((tokens(rng, 64), waiting.pop()))
        history, turns = active.pop(int(rng.integers(len(active))))
        trace.append(history)
        if turns > 1:
            active.append((history + tokens(rng, int(rng.integers(60, 200))), turns - 1))
    return trace


def one_off_among_popular(rng: np.random.Generator) -> list[list[int]]:
    """Half of the prompts never come again; the others begin with one of 4 system prompts."""
    prompts = [tokens(rng, 768) for _ in range(4)]
    return [
        tokens(rng, 800) if rng.random() < 0.5 else prompts[int(rng.integers(4))] + tokens(rng, 64)
        for _ in range(800)
    ]


TRACES: dict[str, Callable[[np.random.Generator], list[list[int]]]] = {
    "many users, few system prompts": system_prompts,
    "multi-turn chats": chats,
    "one-off prompts among popular ones": one_off_among_popular,
}


class ReclaimsNewest(CachePool):
    """The source document's order; see docs/prefix-cache.md."""

    def take(self) -> int:
        if self.clean:
            return super().take()
        chunk, forget = self.cached.popitem()
        forget(chunk)
        return chunk


def hit_rate(trace: list[list[int]], reclaims_newest: bool) -> float:
    """Share of prompt tokens found, with 8 requests under way at a time, 16 tokens each."""
    simulation = Simulation(SETUP)
    state = simulation.state
    if reclaims_newest:
        state.memory.device.chunks.__class__ = ReclaimsNewest
    simulation.worker.step = without_model  # type: ignore[method-assign]
    waiting = deque(enumerate(trace))
    while waiting or state.requests:
        while waiting and len(state.requests) < 8:
            number, prompt = waiting.popleft()
            simulation.submit(NewRequest(str(number), prompt, 16))
        simulation.turn()
    cache = state.memory.prefix_cache
    return cache.num_hit / cache.num_queried


def main() -> None:
    print(f"{'trace':<38}{'least recent first':>20}{'most recent first':>20}")
    for name, make in TRACES.items():
        trace = make(np.random.default_rng(1))
        rates = [hit_rate(trace, newest) for newest in (False, True)]
        print(f"{name:<38}{rates[0]:>20.1%}{rates[1]:>20.1%}")


if __name__ == "__main__":
    main()
