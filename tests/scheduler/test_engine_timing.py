"""The engine with results that come late and in any legal timing: depth must not show."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest

from protos import link_pb2
from protos.plan import StepResult
from scheduler_svc.core.limits import (
    FULL_ATTENTION,
    SLIDING_ATTENTION,
    Geometry,
    GroupGeometry,
)
from scheduler_svc.core.request import FinishReason
from scheduler_svc.core.step_time import TARGET_STEP_MS, aim_of
from scheduler_svc.engine.events import Failed, Finished
from scheduler_svc.engine.worker_link import WorkerMessage
from tests.support.engine_harness import Bench, assert_nothing_is_held
from tests.support.expected_answers import expected_tokens

FULL = (GroupGeometry(FULL_ATTENTION, 1, 1),)
HYBRID = (GroupGeometry(FULL_ATTENTION, 1, 1), GroupGeometry(SLIDING_ATTENTION, 1, 1, 5))
GEOMETRIES = {
    "full": Geometry(4, 14 + 2, 64, FULL, max_model_len=32),
    "swap": Geometry(4, 14 + 2, 64, FULL, 32, num_swap_chunks=20),
    "overlapped": Geometry(4, 14 + 2, 64, FULL, 32, num_swap_chunks=20, overlaps_swap=True),
    "hybrid": Geometry(4, 24 + 2, 64, HYBRID, 32, num_swap_chunks=8, overlaps_swap=True),
}


@dataclass
class Asked:
    """A request, and what it must say."""

    request_id: str
    prompt: list[int]
    max_tokens: int
    stop: str  # a letter, or empty
    stop_token_ids: frozenset[int]
    temperature: float
    seed: int
    n: int
    is_aborted: bool = False

    def right(self, windows: list[int]) -> list[list[int]]:
        """The tokens of each sibling, the one that completes a stop string included."""
        n = self.n
        answers = expected_tokens(
            [self.prompt] * n, [self.max_tokens] * n, 50, [self.temperature] * n, [self.seed] * n,
            [self.stop_token_ids] * n, windows, list(range(n)),
        )  # fmt: skip
        for tokens in answers:
            ends = [i for i, token in enumerate(tokens) if self.stop and letter(token) == self.stop]
            del tokens[ends[0] + 1 if ends else len(tokens) :]
        return answers


def letter(token: int) -> str:
    return chr(ord("a") + token % 26)


def random_requests(rng: np.random.Generator, count: int) -> list[Asked]:
    asked = []
    for number in range(count):
        prompt = rng.integers(0, 50, int(rng.integers(1, 14))).tolist()
        asked.append(
            Asked(
                f"r{number}",
                prompt,
                int(rng.integers(1, 15)),
                letter(int(rng.integers(26))) if rng.random() < 0.6 else "",
                frozenset(rng.integers(0, 50, 3).tolist() if rng.random() < 0.4 else []),
                1.0 if rng.random() < 0.5 else 0.0,
                int(rng.integers(2**62)),
                int(rng.integers(2, 4)) if rng.random() < 0.3 else 1,
            )
        )
    return asked


def drive(bench: Bench, asked: list[Asked], rng: np.random.Generator) -> None:
    """Everything at seeded moments; one failed step, for a request may be in two of them."""
    waiting, faults = list(reversed(asked)), 1
    for _ in range(4000):
        if not waiting and not len(bench.engine._answers):
            return
        move = rng.random()
        if move < 0.4:
            bench.turn()
        elif move < 0.8:
            bench.link.answer()  # read with the next turn, perhaps along with others
        elif move < 0.95 and waiting:
            new = waiting.pop()
            bench.submit(
                new.request_id, new.prompt, new.max_tokens, new.stop, new.stop_token_ids,
                new.temperature, new.seed, n=new.n,
            )  # fmt: skip
        elif move < 0.965:
            live = [a for a in asked if a.request_id in bench.engine._answers]
            if live:
                victim = live[int(rng.integers(len(live)))]
                victim.is_aborted = True
                bench.engine.abort([victim.request_id])
        elif move < 0.98 and faults and bench.link.plans:
            faults = 0
            late = [bench.link.worker.step(plan) for plan in bench.link.plans]
            bench.link.fault("RuntimeError: out of luck")
            bench.turn()
            for result in late:  # a worker that had more than one step under way
                say_result(bench, result)
        elif move < 0.985 and bench.link.plans:
            late = [bench.link.worker.step(plan) for plan in bench.link.plans]
            bench.link.hello()
            for result in late:
                say_result(bench, result)
            bench.turn()
            bench.link.ready()
    raise AssertionError("nothing gets on")


def say_result(bench: Bench, result: StepResult) -> None:
    envelope = link_pb2.Envelope(step_result=link_pb2.StepResult(step_id=result.step_id))
    bench.link.on_message(WorkerMessage(envelope, result))


@pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES)
@pytest.mark.parametrize("depth", [1, 2])
def test_any_timing_gives_the_same_answers(geometry: Geometry, depth: int) -> None:
    """A token behind a stop string, one lost or doubled over a worker's death, a late result
    that is taken for another step's, an answer without an end."""
    bench = serve_in_any_timing(geometry, depth, seed=1, count=50)
    ends = [event for event in bench.events if isinstance(event, Finished)]
    assert {end.reason.value for end in ends} == {"stop", "length", "abort"}
    assert any(end.stop_string for end in ends)
    assert any(end.stop_token_id is not None for end in ends)
    assert sum(end.preemptions for end in ends)
    assert bench.link.num_workers > 2


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES)
@pytest.mark.parametrize("depth", [1, 2])
def test_many_timings_give_the_same_answers(geometry: Geometry, depth: int) -> None:
    """The same with many seeds: rare orders of events."""
    for seed in range(2, 30):
        serve_in_any_timing(geometry, depth, seed, count=40)


def serve_in_any_timing(geometry: Geometry, depth: int, seed: int, count: int) -> Bench:
    """Checks every token, text and end."""
    rng = np.random.default_rng(seed)
    bench = Bench(depth, geometry=geometry, num_rows=5)
    bench.connect()
    asked = random_requests(rng, count)
    drive(bench, asked, rng)
    bench.turn()
    assert_nothing_is_held(bench)
    windows = [group.sliding_window for group in geometry.groups]
    for request in asked:
        for index, right in enumerate(request.right(windows)):
            said, end = (
                bench.tokens(request.request_id, index),
                bench.end(request.request_id, index),
            )
            assert end.completion_tokens == len(said)
            if end.reason is FinishReason.ABORT:
                assert request.is_aborted
                assert said == right[: len(said)]
                continue
            assert said == right, request
            shown = right[:-1] if end.reason is FinishReason.STOP else right
            assert bench.text(request.request_id, index) == "".join(map(letter, shown))
    assert not any(isinstance(event, Failed) for event in bench.events)
    return bench


def test_a_result_from_before_a_fault_is_late() -> None:
    """A worker with two steps under way reports that the second one failed, and then the result
    of the first: to take it for wrong would end the session for nothing."""
    bench = Bench(depth=2)
    bench.connect()
    bench.submit("a", [1, 2, 3], 6)
    bench.turn()
    first = bench.link.worker.step(bench.link.plans.popleft())
    bench.link.fault("RuntimeError: out of luck")
    bench.turn()
    say_result(bench, first)
    bench.turn()
    assert bench.engine.status.is_ready
    assert bench.tokens("a") == []
    bench.serve()
    assert bench.tokens("a") == Asked("a", [1, 2, 3], 6, "", frozenset(), 0.0, 0, 1).right([0])[0]


def test_a_step_aims_at_what_the_worker_s_device_can_do() -> None:
    """The aim of every device is off, or that of another one."""
    bench = Bench()
    state = bench.engine._state
    state.limits = replace(state.limits, target_step_ms=None)
    assert state.step_cost.aim == 0, "there is no worker"
    bench.connect()
    assert state.geometry.device == "cpu"
    assert state.step_cost.aim == TARGET_STEP_MS["cpu"] / 1000
    assert aim_of(None, "cuda:1") == TARGET_STEP_MS["cuda"] / 1000
    assert aim_of(None, "none") == aim_of(0.0, "cpu") == 0
    assert aim_of(70.0, "cpu") == 0.07
