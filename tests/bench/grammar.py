"""What a constrained answer costs its neighbours: `python -m tests.bench.grammar`.

Eight free answers of the embedded model run beside a ninth, which is free as well or held to a JSON
schema, in turns, with the same seeds. Printed is how many tokens per second the eight get, and the
median of the turns' ratios. Everything runs as it is served: client, scheduler, worker.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from client import AsyncChairlift
from tests.support.processes import Server

NUM_NEIGHBOURS = 8
SCHEMA = {
    "type": "array",
    "minItems": 1000,  # it ends by length, so that it runs beside the others all the time
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 40},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}},
        },
        "required": ["name", "age", "tags"],
        "additionalProperties": False,
    },
}


async def tokens_per_second(
    chairlift: AsyncChairlift, num_tokens: int, constraint: dict[str, Any]
) -> float:
    """Of the neighbours together."""
    options: dict[str, Any] = {"max_tokens": num_tokens, "ignore_eos": True, "temperature": 1}
    ninth = asyncio.create_task(
        chairlift.complete("A list of people:", **{**options, "max_tokens": 2 * num_tokens},
                           seed=99, **constraint)
    )  # fmt: skip
    await asyncio.sleep(0.5)  # it decodes by then
    began = time.perf_counter()
    answers = await asyncio.gather(
        *(chairlift.complete(f"Story {i}:", **options, seed=i) for i in range(NUM_NEIGHBOURS))
    )
    seconds = time.perf_counter() - began
    assert not ninth.done(), "the ninth answer ended first; give it more tokens"
    await ninth
    return sum(len(answer.token_ids) for answer in answers) / seconds


async def measure(address: str, num_turns: int, num_tokens: int) -> list[tuple[float, float]]:
    """(beside a free answer, beside a constrained one) of each turn."""
    constraint = {"json_schema": json.dumps(SCHEMA)}
    async with AsyncChairlift(address) as chairlift:
        for warm_up in ({}, constraint):
            await tokens_per_second(chairlift, num_tokens, warm_up)
        turns = []
        for turn in range(num_turns):
            order: list[dict[str, Any]] = [{}, constraint]
            pair = {}
            for chosen in order if turn % 2 else reversed(order):
                pair[bool(chosen)] = await tokens_per_second(chairlift, num_tokens, chosen)
            turns.append((pair[False], pair[True]))
        return turns


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=96, help="of each neighbour's answer")
    arguments = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        Server(Path(folder) / "log", model="smollm2-135m-instruct") as server,
    ):
        turns = asyncio.run(measure(server.address, arguments.turns, arguments.tokens))
    for free, constrained in turns:
        print(f"{free:7.1f} tokens/s beside a free answer, {constrained:7.1f} beside a constrained")
    ratio = statistics.median(constrained / free for free, constrained in turns)
    print(f"median ratio {ratio:.3f}")


if __name__ == "__main__":
    main()
