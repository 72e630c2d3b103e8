"""When masks are computed, and what is sent: with a state that a test changes by hand."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from protos import link_pb2
from scheduler_svc.core.in_flight import ConstrainedSample
from scheduler_svc.core.request import Request, RequestState, Sampling
from scheduler_svc.engine.masks import MASK_SECONDS, NUM_THREADS, Masks
from scheduler_svc.grammar.matcher import GrammarFailed

WAIT_SECONDS = 20.0


class Countdown:
    """In the place of a Matcher: says which tokens it was asked to follow."""

    grammar: Any = SimpleNamespace(constraint=SimpleNamespace(field="sampling.regex"))

    def __init__(self, before: Callable[[], None] = lambda: None) -> None:
        self.before = before
        self.given_up = threading.Event()

    def copy(self) -> Countdown:
        return self

    def give_up(self) -> None:
        self.given_up.set()

    def masks(self, output: Sequence[int], drafts: Sequence[int] = ()) -> list[bytes]:
        self.before()
        known = [*output, *drafts]
        return [bytes(known[: len(output) + i]) for i in range(len(drafts) + 1)]


class Bench:
    def __init__(self) -> None:
        self.now = 1.0
        self.state: Any = SimpleNamespace(in_flight=deque(), requests={})
        self.commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.sent: queue.SimpleQueue[link_pb2.Mask] = queue.SimpleQueue()
        self.failed: list[tuple[str, str]] = []
        self.masks = Masks(self.state, self._fail, self.commands.put, lambda: self.now)

    def _fail(self, request: Request, why: str) -> None:
        self.failed.append((request.name, why))
        self.finish(request)

    def finish(self, request: Request) -> None:
        request.state = RequestState.FINISHED
        self.state.requests.pop(request.request_id, None)

    def request(self, name: str, output: Sequence[int] = (), matcher: Any = None) -> Request:
        """With a prompt of two tokens."""
        request = Request(name, 0, [7, 7, *output], 2, 99, Sampling())
        self.state.requests[name] = [request]
        self.masks.add(name, matcher or Countdown())
        return request

    def plan(self, step_id: int, *samples: tuple[int, Request, int, tuple[int, ...]]) -> None:
        listed = [ConstrainedSample(*sample) for sample in samples]
        step = SimpleNamespace(step_id=step_id, constrained_samples=lambda: listed)
        self.state.in_flight.append(step)
        self.masks.begin(step, lambda envelope: self.sent.put(envelope.mask))  # type: ignore[arg-type]

    def mask(self) -> tuple[int, dict[int, list[int]]]:
        """The next one that is sent: its step, and what each sample's words say."""
        mask = self.sent.get(timeout=WAIT_SECONDS)
        words = [list(one) for one in mask.words]
        return mask.step_id, dict(zip(mask.sample_indices, words, strict=True))


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    assert bench.sent.empty(), "a mask was sent twice"
    bench.masks.close()


def test_known_samples_are_masked_at_once(bench: Bench) -> None:
    """The worker waits for a mask until the next result, which never comes."""
    a, b = bench.request("a"), bench.request("b", [4, 5])
    bench.plan(0, (0, a, 2, ()), (3, b, 4, ()))
    assert bench.mask() == (0, {0: [], 3: [4, 5]})


def test_a_sample_behind_an_unknown_token_waits_for_it(bench: Bench) -> None:
    """Under run-ahead a mask is that of the position before."""
    a, b = bench.request("a"), bench.request("b", [1])
    bench.plan(0, (0, a, 2, ()))
    assert bench.mask() == (0, {0: []})
    bench.plan(1, (0, a, 3, ()), (1, b, 3, ()))
    bench.masks.advance()
    assert bench.sent.empty()
    a.token_ids.append(9)
    bench.state.in_flight.popleft()
    bench.masks.advance()
    assert bench.mask() == (1, {0: [9], 1: [1]})


def test_drafts_are_masked_one_by_one(bench: Bench) -> None:
    """Samples behind a draft have its mask, or the numbers of the samples are mixed up."""
    a, b = bench.request("a", [1]), bench.request("b")
    bench.plan(0, (2, a, 3, ()), (3, a, 4, (5,)), (4, a, 5, (5, 6)), (5, b, 2, ()))
    assert bench.mask() == (0, {2: [1], 3: [1, 5], 4: [1, 5, 6], 5: []})


def test_a_mask_is_sent_though_all_have_ended(bench: Bench) -> None:
    """An abort, and the worker waits for ever."""
    a = bench.request("a")
    bench.plan(0, (0, a, 3, ()))
    assert bench.sent.empty()
    bench.finish(a)
    bench.masks.advance()
    assert bench.mask() == (0, {})
    bench.plan(1, (0, a, 3, ()))  # planned before it ended
    assert bench.mask() == (1, {})
    assert len(bench.masks) == 0


def test_discarded_plans_are_forgotten(bench: Bench) -> None:
    """A mask of a lost worker's plan goes to the next one, which has a plan of that number."""
    a = bench.request("a")
    bench.plan(0, (0, a, 3, ()))
    bench.state.in_flight.clear()
    a.token_ids.append(9)
    bench.masks.advance()
    bench.plan(0, (1, a, 3, ()))
    assert bench.mask() == (0, {1: [9]})


def test_siblings_and_beams_have_matchers_of_their_own(bench: Bench) -> None:
    """One follows the other's tokens; or none is there for a beam that was forked on the way."""
    first = bench.request("a", [1])
    second = Request("a", 1, [7, 7, 2], 2, 99, Sampling(), index=1)
    bench.state.requests["a"].append(second)
    bench.plan(0, (0, first, 3, ()), (1, second, 3, ()))
    assert bench.mask() == (0, {0: [1], 1: [2]})
    first.state = RequestState.FINISHED
    bench.state.requests["a"].remove(first)
    bench.masks.advance()
    assert len(bench.masks) == 2  # the grammar's, and the second one's
    bench.finish(second)
    bench.masks.advance()
    assert len(bench.masks) == 0


def fails() -> None:
    raise GrammarFailed("too many items")


def breaks() -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize(
    ("before", "why"),
    [(fails, "sampling.regex cannot be followed further: too many items"),
     (breaks, "sampling.regex cannot be followed further: an internal error in Chairlift "
              "(ZeroDivisionError); see the log")],
)  # fmt: skip
def test_a_grammar_that_fails_is_its_requests_error(
    bench: Bench, before: Callable[[], None], why: str
) -> None:
    """One client's grammar holds up the step of all others."""
    a, b = bench.request("a", matcher=Countdown(before)), bench.request("b", [3])
    bench.plan(0, (0, a, 2, ()), (1, b, 3, ()))
    assert bench.mask() == (0, {1: [3]})
    bench.commands.get(timeout=WAIT_SECONDS)()
    assert bench.failed == [("a", why)]
    bench.masks.advance()
    assert len(bench.masks) == 2


def test_a_failure_does_not_end_a_later_request_of_that_name(bench: Bench) -> None:
    """The client has ended the request, and sends another one under the same id."""
    a = bench.request("a", matcher=Countdown(fails))
    bench.plan(0, (0, a, 2, ()))
    assert bench.mask() == (0, {})
    bench.finish(a)
    bench.request("a")
    bench.commands.get(timeout=WAIT_SECONDS)()
    assert bench.failed == []


def test_nobody_waits_for_masks_that_take_too_long(bench: Bench) -> None:
    """Some hostile grammars take all threads, and then every step waits for them."""
    go_on = threading.Event()
    try:
        begun = threading.Semaphore(0)

        def wait() -> None:
            begun.release()
            assert go_on.wait(WAIT_SECONDS)

        stuck = [bench.request(f"stuck{i}", matcher=Countdown(wait)) for i in range(NUM_THREADS)]
        other = bench.request("other", [3])
        samples = [(i, request, 2, ()) for i, request in enumerate(stuck)]
        bench.plan(0, *samples, (NUM_THREADS, other, 3, ()))
        for _ in stuck:
            assert begun.acquire(timeout=WAIT_SECONDS)
        bench.masks.advance()
        assert bench.failed == []
        bench.now += MASK_SECONDS + 0.1
        bench.masks.advance()
        assert [name for name, _ in bench.failed] == [request.name for request in stuck]
        assert bench.failed[0][1].startswith("sampling.regex cannot be followed further")
        assert bench.mask() == (0, {NUM_THREADS: [3]})
    finally:
        go_on.set()
