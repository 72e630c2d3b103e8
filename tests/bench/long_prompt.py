"""The effect of a long prompt on others: `python -m tests.bench.long_prompt [--turns 3]`.

Two servers with the embedded model, one with the default target_step_ms, one with 0, are measured
in turns; the other one is idle. In every turn

    a prompt of 6,000 tokens arrives beside a running stream: the longest gap between two tokens
    of the stream until the prompt's first token, the time to that token, and the worker's
    processor time, which says more if others use the machine too;
    a burst of 16 prompts of 200 tokens arrives at an idle server: time to its first tokens, first
    and mean.

The first turn is not counted: in it the server learns the speed of its device.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, fields
from pathlib import Path

from client import Chairlift
from client.bench.machine import describe_machine, versions
from tests.support.processes import Server

_PROMPT_TOKENS = 6000
_BURST = 16
_BURST_TOKENS = 200
_BURST_OUTPUT = 16
_STREAMED_BEFORE = 20


@dataclass(frozen=True, slots=True)
class Turn:
    """Seconds."""

    longest_gap: float
    long_prompt: float
    long_prompt_cpu: float
    burst_first: float
    burst_mean: float
    burst_all: float


def measure(server: Server, starts: Iterator[int]) -> Turn:
    """`starts` are tokens that no prompt has begun with yet, so that the cache finds none."""
    with Chairlift(server.address) as chairlift:
        prompt_figures = beside_a_stream(chairlift, server.child("worker"), starts)
        first_tokens, end = burst(chairlift, starts)
        return Turn(*prompt_figures, min(first_tokens), statistics.mean(first_tokens), end)


def beside_a_stream(
    chairlift: Chairlift, worker: int, starts: Iterator[int]
) -> tuple[float, float, float]:
    """(longest gap, time to the prompt's first token, the worker's processor time) in seconds."""
    came: list[float] = []
    stream = chairlift.generate(
        [next(starts)] * 20, max_tokens=2000, temperature=0, ignore_eos=True
    )

    def read() -> None:
        came.extend(time.perf_counter() for _ in stream)

    reader = threading.Thread(target=read)
    reader.start()
    while len(came) < _STREAMED_BEFORE:
        time.sleep(0.01)
    begin, used = time.perf_counter(), cpu_seconds(worker)
    next(chairlift.generate(prompt(next(starts), _PROMPT_TOKENS), max_tokens=1))
    end, used = time.perf_counter(), cpu_seconds(worker) - used
    while came[-1] < end and reader.is_alive():  # the last gap may end after it
        time.sleep(0.01)
    stream.cancel()
    reader.join()
    gaps = [after - before for before, after in itertools.pairwise(came) if after > begin]
    return max(gaps), end - begin, used


def cpu_seconds(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def burst(chairlift: Chairlift, starts: Iterator[int]) -> tuple[list[float], float]:
    """Seconds to the first token of each prompt, and to the last token of all."""
    begin = time.perf_counter()
    streams = [
        chairlift.generate(
            prompt(next(starts), _BURST_TOKENS), max_tokens=_BURST_OUTPUT, ignore_eos=True
        )
        for _ in range(_BURST)
    ]
    firsts: list[float] = []

    def read(stream: Iterator[object]) -> None:
        next(stream)
        firsts.append(time.perf_counter() - begin)
        for _ in stream:
            pass

    readers = [threading.Thread(target=read, args=(stream,)) for stream in streams]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    return firsts, time.perf_counter() - begin


def prompt(start: int, num_tokens: int) -> list[int]:
    return [start, *(1000 + (7 * place) % 5000 for place in range(1, num_tokens))]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--weight-format", default="float32")
    parser.add_argument("--target-step-ms", type=float, help="instead of the device's default")
    options = parser.parse_args()
    print(describe_machine(), versions(), sep="\n", flush=True)
    aims = {"off": {"target_step_ms": 0}, "on": {}}
    if options.target_step_ms is not None:
        aims["on"] = {"target_step_ms": options.target_step_ms}
    starts = iter(range(100, 40_000))
    turns: dict[str, list[Turn]] = {name: [] for name in aims}
    with ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
        servers = {
            name: stack.enter_context(
                Server(
                    Path(folder) / f"{name}.log",
                    num_blocks=1000,
                    weight_format=options.weight_format,
                    **aim,
                )
            )
            for name, aim in aims.items()
        }
        for turn in range(options.turns + 1):
            for name, server in servers.items():
                figures = measure(server, starts)
                print(f"turn {turn} {name:3}: {figures}", flush=True)
                if turn:
                    turns[name].append(figures)
    print(f"\n{'seconds, medians':>18}  {'off':>7}  {'on':>7}   off / on, by turn")
    for spec in fields(Turn):
        off, on = ([getattr(turn, spec.name) for turn in turns[name]] for name in ("off", "on"))
        ratios = [before / after for before, after in zip(off, on, strict=True)]
        print(
            f"{spec.name:>18}  {statistics.median(off):7.2f}  {statistics.median(on):7.2f}   "
            f"{statistics.median(ratios):.2f}"
        )


if __name__ == "__main__":
    main()
