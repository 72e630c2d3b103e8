"""Scoring prompts at prefill speed: `python -m tests.bench.scoring [--requests 1000] [--turns 3]`.

The same random prompts, in turns, with an empty prefix cache:

    score     max_tokens 0, prompt_logprobs 0: the log probability of each prompt token
    prefill   max_tokens 1: computes the prompts and samples one token of each

The embedded model, whose vocabulary of 49,152 makes logits of every token expensive: a prefill
needs those of the last one only. The table gives prompt tokens per second, medians over the turns.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from client import AsyncChairlift
from client.bench.machine import describe_machine, versions
from tests.support.processes import Server

AT_ONCE: Final = 128
WAYS: Final[dict[str, dict[str, Any]]] = {
    "prefill": {"max_tokens": 1, "temperature": 0},
    "score": {"max_tokens": 0, "prompt_logprobs": 0},
}


def prompts(count: int) -> list[list[int]]:
    source = random.Random(0)
    return [
        [source.randrange(3, 49_000) for _ in range(source.randint(32, 160))] for _ in range(count)
    ]


async def tokens_per_second(
    chairlift: AsyncChairlift, asked: list[list[int]], **sampling: Any
) -> float:
    await chairlift.flush_cache()
    places = asyncio.Semaphore(AT_ONCE)

    async def complete(prompt: list[int]) -> None:
        async with places:
            answer = await chairlift.complete(prompt, **sampling)
        assert answer.usage.prompt_tokens == len(prompt)

    begin = time.perf_counter()
    await asyncio.gather(*map(complete, asked))
    return sum(map(len, asked)) / (time.perf_counter() - begin)


async def measure(server: Server, turns: int, asked: list[list[int]]) -> None:
    rates: dict[str, list[float]] = {way: [] for way in WAYS}
    async with AsyncChairlift(server.address) as chairlift:
        await tokens_per_second(chairlift, asked[:8], **WAYS["prefill"])  # learns its speed
        for turn in range(turns):
            for way, sampling in WAYS.items():
                rates[way].append(await tokens_per_second(chairlift, asked, **sampling))
                print(f"turn {turn + 1}: {way} {rates[way][-1]:.0f} tokens/s", flush=True)
    for way, found in rates.items():
        print(f"{way:8}  {statistics.median(found):8.0f} prompt tokens/s")
    pairs = zip(rates["score"], rates["prefill"], strict=True)
    print(f"score / prefill  {statistics.median(a / b for a, b in pairs):.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--requests", type=int, default=1000)
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        Server(Path(folder) / "serve.log", wait_seconds=300) as server,
    ):
        print(describe_machine(), versions(), flush=True)
        asyncio.run(measure(server, options.turns, prompts(options.requests)))


if __name__ == "__main__":
    main()
