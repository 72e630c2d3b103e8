"""target_step_ms on a virtual clock: what the time of a step does to those who wait for it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from scheduler_svc.core.policies import PREFILL_FIRST
from scheduler_svc.core.step_time import MIN_PROMPT_TOKENS, PromptTime, StepCost, keys_read
from tests.support.timed_run import FAST_GPU, SLOW_CPU, Speed, TimedRun, limits

WORKLOADS = Path(__file__).resolve().parents[1] / "workloads"
BUSY_CPU = Speed(0.05, 3.5e-3, 1.6e-6)  # the same one, shared with others
LARGE_MODEL = Speed(0.2, 0.03, 3e-6)
SLOW_GPU = Speed(16e-3, 32e-6, 1.6e-9)


def slower(speed: Speed, times: float) -> Speed:
    return Speed(speed.base * times, speed.per_token * times, speed.per_key * times)


def beside_a_stream(run: TimedRun, num_streams: int = 1, prompt: int = 6000) -> TimedRun:
    """Streams that have been running for a while, and now a long prompt."""
    for number in range(num_streams):
        run.submit(f"stream {number}", 20, 3000)
    run.run(until=lambda: len(run.tokens_at["stream 0"]) == 20)
    run.submit("long", prompt, 1)
    return run


def prompt_seconds(run: TimedRun) -> float:
    begin = run.now
    run.run(until=lambda: bool(run.tokens_at["long"]))
    return run.now - begin


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_streams", [1, 16])
@pytest.mark.parametrize(
    ("speed", "aim"),
    [(SLOW_CPU, 600), (BUSY_CPU, 600), (LARGE_MODEL, 600), (SLOW_GPU, 50), (FAST_GPU, 10)],
)
def test_a_long_prompt_holds_up_nobody_who_decodes(
    speed: Speed, aim: float, num_streams: int, depth: int
) -> None:
    """A stream stops for as long as max_batch_tokens of somebody else's prompt take."""
    run = beside_a_stream(TimedRun(limits(aim, depth), speed), num_streams)
    began = run.now
    prompt_seconds(run)
    decoding_alone = speed.base + num_streams * (speed.per_token + 2000 * speed.per_key)
    assert run.longest_gap("stream 0", began) <= 3 * max(aim / 1000, decoding_alone)


@pytest.mark.parametrize("is_first", [True, False], ids=["first", "later"])
@pytest.mark.parametrize(("speed", "aim"), [(SLOW_CPU, 600), (BUSY_CPU, 600), (SLOW_GPU, 50)])
def test_the_prompt_takes_as_long_as_in_whole_steps(
    speed: Speed, aim: float, is_first: bool
) -> None:
    """Chunks so short that a prompt is computed at the price of many steps that do little."""
    if is_first and speed is SLOW_GPU:
        pytest.skip("it takes three steps, and learning the speed takes as many")
    seconds = []
    for target in (0.0, aim):
        run = beside_a_stream(TimedRun(limits(target), speed))
        if not is_first:
            prompt_seconds(run)
            run.submit("long", 6000, 1)  # takes the name over
        seconds.append(prompt_seconds(run))
    assert seconds[0] >= 0.95 * seconds[1]
    assert seconds[0] != seconds[1]


def test_it_follows_when_the_device_becomes_slower_or_faster() -> None:
    """Steps stay as long as they have become, or chunks as short."""
    run = beside_a_stream(TimedRun(limits(500), SLOW_CPU), prompt=15_000)
    run.run(until=lambda: len(run.steps) == 40)
    tokens_before = run.steps[-1].num_tokens
    run.speed = slower(SLOW_CPU, 10)
    run.run(until=lambda: len(run.steps) == 50)
    slow = run.steps[45:50]
    assert all(step.ended - step.began < 3 * 0.5 for step in slow)
    assert all(step.num_tokens > MIN_PROMPT_TOKENS for step in slow)
    run.speed = slower(SLOW_CPU, 0.1)
    run.run(until=lambda: len(run.steps) == 62)
    assert run.steps[-1].num_tokens > 3 * tokens_before


def test_one_pause_of_the_machine_is_soon_forgotten() -> None:
    """A step that took long by accident leaves a prompt with short chunks until it ends."""
    run = beside_a_stream(TimedRun(limits(500), SLOW_CPU))
    run.run(until=lambda: len(run.steps) == 40)
    usual = run.steps[-1].num_tokens
    run.speed = slower(SLOW_CPU, 50)
    run.plan()
    run.take_result()
    run.speed = SLOW_CPU
    run.run(until=lambda: len(run.steps) == 50)
    assert run.steps[-1].num_tokens > 0.8 * usual


def test_a_worker_that_tells_no_times_gets_whole_steps() -> None:
    """A clock that stands still cuts every prompt into the shortest chunks."""

    class Untold(TimedRun):
        def take_result(self) -> None:
            step, result = self._running[0]
            self._running[0] = step, replace(result, device_microseconds=0)
            super().take_result()

    run = beside_a_stream(Untold(limits(500), SLOW_CPU))
    prompt_seconds(run)
    assert max(step.num_tokens for step in run.steps) == 2048


def test_prompts_get_on_though_decoding_alone_takes_longer_than_the_aim() -> None:
    """An aim that the device cannot reach stops all prompts for as long as anybody decodes."""
    run = beside_a_stream(TimedRun(limits(10), SLOW_CPU), num_streams=32)
    whole = beside_a_stream(TimedRun(limits(0), SLOW_CPU), num_streams=32)
    assert prompt_seconds(run) < 3 * prompt_seconds(whole)


def test_a_prompt_that_nobody_waits_beside_takes_max_batch_tokens() -> None:
    """A prompt alone is computed in short chunks for nobody's good."""
    run = TimedRun(limits(500), SLOW_CPU)
    run.submit("warm", 20, 20)
    run.run()
    before = len(run.steps)
    run.submit("long", 6000, 1)
    run.run()
    assert [step.num_tokens for step in run.steps[before:]] == [2048, 2048, 1904]


@pytest.mark.parametrize("workload", ["mixed", "equal"])
@pytest.mark.parametrize(("speed", "aim"), [(SLOW_CPU, 600), (FAST_GPU, 50)])
def test_the_first_tokens_of_a_burst_come_earlier(workload: str, speed: Speed, aim: float) -> None:
    """Everybody's first token waits for a step that is filled to the brim with prompts; or the
    whole burst pays for it with its throughput."""
    requests = map(json.loads, (WORKLOADS / f"{workload}.jsonl").read_text().splitlines())
    shapes = [(len(wanted["prompt"]), wanted["max_new"]) for wanted in requests]
    first_tokens, ends = [], []
    for target in (aim, 0.0):
        run = TimedRun(limits(target), speed)
        for number, shape in enumerate(shapes):
            run.submit(f"r{number}", *shape)
        run.run()
        first_tokens.append([times[0] for times in run.tokens_at.values()])
        ends.append(run.now)
    assert min(first_tokens[0]) < 0.5 * min(first_tokens[1])
    if speed is SLOW_CPU:  # the other one computes all prompts within few times the aim anyway
        assert np.mean(first_tokens[0]) < np.mean(first_tokens[1])
    assert ends[0] < 1.03 * ends[1]


def test_an_answer_that_was_interrupted_goes_on_beside_a_prompt() -> None:
    """What comes back from the swap pool needs one token, and waits for a long prompt's end."""
    time = PromptTime(StepCost(0.5), np.array([100], np.int32))
    chunk = time.cut(6000, 0)
    time.spend(chunk, 0)
    assert 0 < chunk < 6000
    assert time.cut(1, 3000) == 1
    assert time.cut(2, 0) == 0


@pytest.mark.parametrize("aim", [1e-300, 1e-9, 0.5, 3600.0])
@pytest.mark.parametrize("seconds", [-1.0, 0.0, 1e-300, 1e13])
def test_no_time_that_a_worker_tells_stops_prompts(aim: float, seconds: float) -> None:
    """A clock that jumps makes the estimate infinite, and the next plan fails."""
    cost = StepCost(aim)
    tokens, ends = np.array([1, 100], np.int32), np.array([50, 100], np.int32)
    for told in [seconds] * 50 + [0.1] * 50:
        cost.learn(tokens, ends, told)
        assert 1 <= PromptTime(cost, ends[:1]).cut(6000, 0) <= 6000
    assert 0.05 < cost.of(101, float(keys_read(tokens, ends).sum())) < 0.2


def test_prefill_first_keeps_to_it_as_well() -> None:
    """The policy that computes prompts first forgets the rows that decode behind them."""
    run = beside_a_stream(TimedRun(limits(500), SLOW_CPU, PREFILL_FIRST))
    prompt_seconds(run)
    assert run.longest_gap("stream 0") <= 3 * 0.5


def test_the_speed_is_an_input_and_off_takes_no_notice_of_it() -> None:
    """Equal results give other plans the next time; or a target of 0 is not off."""

    def trace(target: float, speed: Speed) -> list[bytes]:
        run = beside_a_stream(TimedRun(limits(target), speed))
        prompt_seconds(run)
        return run.trace

    assert trace(500, SLOW_CPU) == trace(500, SLOW_CPU) != trace(500, BUSY_CPU)
    assert trace(0, SLOW_CPU) == trace(0, BUSY_CPU)


def test_no_step_grows_with_the_prompt() -> None:
    """The speed of a prompt's first chunks is taken for that of its last ones, which read more."""
    reads_much = Speed(0.01, 1e-3, 1e-6)
    run = beside_a_stream(TimedRun(limits(500), reads_much), prompt=15_000)
    prompt_seconds(run)
    longest = [step.ended - step.began for step in run.steps]
    assert max(longest) < 2 * 0.5
    assert max(longest[-50:]) < 1.1 * 0.5
