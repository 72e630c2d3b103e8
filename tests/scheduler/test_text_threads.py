"""Tokenising holds up nobody: its own threads, few of them, and without the GIL."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

import pytest

from scheduler_svc.text.text_threads import LONG_BYTES, NUM_SHORT, TextThreads
from scheduler_svc.text.tokenizer import Tokenizer
from tests.support.calls import until
from tests.support.small_tokenizers import chat


class Crowd:
    """Calls that are held until they may go on; counts those that run at a time."""

    def __init__(self) -> None:
        self.running = 0
        self.most = 0
        self.begun: list[int] = []
        self.may_go_on = threading.Event()
        self._lock = threading.Lock()

    def call(self, number: int) -> int:
        with self._lock:
            self.running += 1
            self.most = max(self.most, self.running)
            self.begun.append(number)
        assert self.may_go_on.wait(10)
        with self._lock:
            self.running -= 1
        return number


@pytest.mark.parametrize(("num_bytes", "most"), [(LONG_BYTES + 1, 1), (LONG_BYTES, NUM_SHORT)])
async def test_few_at_a_time(num_bytes: int, most: int) -> None:
    """Eight texts of 8 MB at once would take eight times the memory, and every core."""
    threads, crowd = TextThreads(), Crowd()
    calls = [asyncio.create_task(threads.run(num_bytes, crowd.call, i)) for i in range(8)]
    await until(lambda: crowd.running == most)
    await asyncio.sleep(0.02)  # in which more of them could begin
    crowd.may_go_on.set()
    assert await asyncio.gather(*calls) == list(range(8))
    assert crowd.most == most


async def test_short_texts_do_not_wait_for_long_ones() -> None:
    """Nobody pays for another's request: a chat of one line is answered while a book is read."""
    threads, crowd = TextThreads(), Crowd()
    long = [asyncio.create_task(threads.run(LONG_BYTES + 1, crowd.call, i)) for i in range(3)]
    await until(lambda: crowd.running == 1)
    assert await asyncio.wait_for(threads.run(10, lambda: "short"), 10) == "short"
    assert crowd.running == 1
    crowd.may_go_on.set()
    await asyncio.gather(*long)


async def test_what_a_client_gave_up_is_not_done() -> None:
    """Clients that time out and try again would pile up work that nobody waits for."""
    threads, crowd = TextThreads(), Crowd()
    calls = [asyncio.create_task(threads.run(LONG_BYTES + 1, crowd.call, i)) for i in range(4)]
    await until(lambda: crowd.running == 1)
    for call in calls[1:3]:
        call.cancel()
    await asyncio.wait(calls[1:3])
    crowd.may_go_on.set()
    assert await calls[3] == 3
    assert crowd.begun == [0, 3]


@pytest.mark.parametrize(
    "work",
    [
        lambda tokenizer: tokenizer.encode("the quick brown fox " * 20_000),
        lambda tokenizer: tokenizer.decode([40] * 400_000),
    ],
    ids=["encode", "decode"],
)
def test_others_run_meanwhile(work: Callable[[Tokenizer], object]) -> None:
    """With the GIL held, the engine and all streams stand still: 2 s for a megabyte."""
    tokenizer = Tokenizer(chat())
    num_turns, is_done = 0, False
    has_begun = threading.Event()

    def turn() -> None:
        nonlocal num_turns
        while not is_done:
            num_turns += 1
            has_begun.set()
            time.sleep(0.0005)  # and asks for the GIL anew

    other = threading.Thread(target=turn)
    other.start()
    assert has_begun.wait(10)
    before = num_turns
    work(tokenizer)
    meanwhile = num_turns - before
    is_done = True
    other.join()
    assert meanwhile > 3, "nothing else ran while a text was converted"
