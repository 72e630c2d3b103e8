"""The engine with a shadow worker at the other end of a link in memory; time is a number."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from protos import link_pb2
from scheduler_svc.core.limits import FULL_ATTENTION, Geometry, GroupGeometry, Limits
from scheduler_svc.core.policies import FIFO, Policy
from scheduler_svc.core.request import NewRequest, Sampling
from scheduler_svc.core.state import State
from scheduler_svc.engine.engine import Engine
from scheduler_svc.engine.events import Delta, Event, Failed, Finished, Status, Submission
from tests.support.check import check
from tests.support.expected_answers import expected_tokens
from tests.support.memory_link import MemoryLink

T = TypeVar("T")

GEOMETRY = Geometry(4, 12 + 2, 64, (GroupGeometry(FULL_ATTENTION, 1, 1),), max_model_len=32)


class Letters:
    """A text stream whose token t reads as the letter number t mod 26; finds one-letter stops."""

    include_stop_str_in_output = False

    def __init__(self, stop: str = "") -> None:
        self.stop = stop
        self.matched_stop: str | None = None

    @property
    def seeks_stop(self) -> bool:
        return bool(self.stop)

    def push_all(self, token_ids: Sequence[int]) -> str:
        return "".join(map(self.push, token_ids))

    def push(self, token_id: int) -> str:
        letter = chr(ord("a") + token_id % 26)
        if letter == self.stop:
            self.matched_stop = letter
            return ""
        return letter

    def finish(self) -> str:
        return ""


class Bench:
    """An engine, its link, a clock that a test moves, and all that was delivered."""

    def __init__(
        self,
        depth: int = 1,
        max_queue_size: int = 0,
        geometry: Geometry = GEOMETRY,
        policy: Policy = FIFO,
        num_rows: int = 4,
        max_batch_tokens: int = 16,
        allow_block_sharing: bool = True,
        step_timeout: float = 0.0,
        cache_budget: int = 0,
        target_step_ms: float = 0.0,
    ) -> None:
        self.now = 100.0
        self.events: list[Event] = []
        self.statuses: list[Status] = []
        limits = Limits(
            max_batch_tokens,
            num_rows,
            safety_margin=policy.safety_margin,
            max_plans_in_flight=depth,
            allow_block_sharing=allow_block_sharing,
            cache_budget=cache_budget,
            target_step_ms=target_step_ms,
        )
        self.link = MemoryLink(geometry, num_rows)
        self.engine = Engine(
            limits,
            link_pb2.Configure(model="shadow"),
            self.link,
            policy=policy,
            max_queue_size=max_queue_size,
            heartbeat_timeout=5.0,
            step_timeout=step_timeout,
            clock=lambda: self.now,
        )
        self.engine.attach(self._take, self.statuses.append)
        self.link.start(
            lambda message: self.engine._inbox.put(lambda: self.engine.on_worker(message))
        )

    def _take(self, events: list[Event]) -> None:
        """In the place of streams whose clients read at once."""
        for event in events:
            if isinstance(event, Delta):
                event.is_taken = True
        self.events += events

    def connect(self) -> None:
        self.link.hello()
        self.link.ready()
        self.turn()

    def turn(self) -> None:
        self.engine.turn(0)

    def submit(
        self,
        request_id: str,
        prompt: list[int],
        max_tokens: int = 4,
        stop: str = "",
        stop_token_ids: frozenset[int] = frozenset(),
        temperature: float = 0.0,
        seed: int = 0,
        **fields: Any,
    ) -> None:
        """`stop` is a stop string of one letter; `fields` are those of NewRequest."""
        sampling = Sampling(temperature, seed=seed, stop_token_ids=stop_token_ids)
        new = NewRequest(request_id, prompt, max_tokens, sampling, **fields)
        self.engine.submit(Submission(new, [Letters(stop) for _ in range(new.num_answers)]))

    def step(self, count: int = 1) -> None:
        """Plans and computes."""
        for _ in range(count):
            self.turn()
            self.link.answer()
        self.turn()

    def serve(self) -> None:
        """Turns until nobody is live."""
        for _ in range(500):
            self.turn()
            if not self.link.answer() and not len(self.engine._answers):
                return
        raise AssertionError(f"still live: {[a.request.request_id for a in self.engine._answers]}")

    def tokens(self, request_id: str, index: int = 0) -> list[int]:
        return [token for delta in self.deltas(request_id, index) for token in delta.token_ids]

    def text(self, request_id: str, index: int = 0) -> str:
        return "".join(delta.text for delta in self.deltas(request_id, index))

    def deltas(self, request_id: str, index: int) -> list[Delta]:
        return [
            event
            for event in self.events
            if isinstance(event, Delta) and (event.request_id, event.index) == (request_id, index)
        ]

    def end(self, request_id: str, index: int = 0) -> Finished:
        """The sibling's one and only end, behind which nothing is told of it."""
        mine = [
            event
            for event in self.events
            if not isinstance(event, Failed)
            and (event.request_id, event.index) == (request_id, index)
        ]
        assert sum(isinstance(event, Finished) for event in mine) == 1, mine
        assert isinstance(mine[-1], Finished), "something was told after the end"
        return mine[-1]

    def error(self, request_id: str) -> Exception:
        """What the request failed of; nothing is told of it behind that."""
        mine = [event for event in self.events if event.request_id == request_id]
        assert sum(isinstance(event, Failed) for event in mine) == 1, mine
        assert isinstance(mine[-1], Failed), "something was told after the failure"
        return mine[-1].error

    def ask(self, question: Callable[[State], T]) -> T:
        answer = self.engine.ask(question)
        self.turn()
        return answer.result(0)


def right(prompt: list[int], max_tokens: int, geometry: Geometry = GEOMETRY) -> list[int]:
    """What a greedy request must say."""
    windows = [group.sliding_window for group in geometry.groups]
    return expected_tokens([prompt], [max_tokens], 50, windows=windows)[0]


def assert_nothing_is_held(bench: Bench) -> None:
    """Once the plans in flight have returned."""
    while bench.link.answer():
        bench.turn()
    state = bench.engine._state
    assert state.requests == {}
    assert not state.rows.running
    assert state.memory.device.is_free
    assert state.memory.swap.is_free
    assert state.memory.prefix_cache.num_promised == 0
    check(state)
