"""Grammar masks: their way to the worker, when they come, and what is wrong with them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from protos import link_pb2
from protos.plan import StepPlan, StepResult
from tests.support.fake_scheduler import FakeScheduler, make_plan
from tests.support.plan_builder import with_samples
from tests.support.sampled_steps import mask_message
from tests.support.tiny_models import VOCAB_SIZE, llama
from tests.worker.test_loop import FakeRunner, FakeStep, Start, address, scheduler, start
from worker.batch.mask_values import check_mask
from worker.batch.plan_values import InvalidPlan

__all__ = ["address", "scheduler", "start"]  # fixtures

PATIENCE = 20.0


def awaiting(plan: StepPlan) -> StepPlan:
    object.__setattr__(plan, "awaits_mask", True)
    return plan


# The runner


def test_the_forward_runs_before_the_mask_comes(served):
    """The mask is computed beside it; waiting first would double the time of a step."""
    it = served(llama)
    happened = []
    it.loaded.model.register_forward_hook(lambda *_: happened.append("forward"))
    plan = it.first_plan([1, 2, 3], [4, 5, 6])
    free = it.step(plan).token_ids[0]
    awaiting(plan)

    def mask_of() -> link_pb2.Mask:
        happened.append("mask")
        return mask_message(plan.step_id, {1: [17]}, VOCAB_SIZE)

    happened.clear()
    result = it.runner.launch(plan, mask_of).wait()
    assert happened == ["forward", "mask"]
    assert result.token_ids.tolist() == [free, 17]
    assert it.runner._last_token[plan.rows[1]] == 17


@pytest.mark.parametrize("is_padded", [False, True])
def test_masked_steps_run_ahead(served, is_padded):
    """Two steps in flight, each with a mask of its own; the second reads the first one's token on
    the device. Tokens that the mask forbids are never drawn; the rest is chosen as without it."""
    it = served(llama, depth=2)
    if is_padded:
        it.runner.use_static_inputs(captures=False)
    it.core.submit_prompts([1, 2, 3], [4, 5, 6], max_tokens=9)
    launched, allowed = [], []
    for turn in range(6):
        plan = awaiting(it.core.plan())
        assert (turn > 0) == (plan.token_ids.min() == -1)
        tokens = list(range(turn, VOCAB_SIZE, 9))
        mask = mask_message(plan.step_id, {0: tokens}, VOCAB_SIZE)
        launched.append(it.runner.launch(plan, lambda mask=mask: mask))
        allowed.append(tokens)
        if turn:
            it.core.absorb(launched[turn - 1].wait())
    logits = it.logits
    results = [step._plan.step_id for step in launched]
    assert results == sorted(results)
    for turn, tokens in enumerate(allowed):
        assert torch.isfinite(logits[turn][0]).nonzero().flatten().tolist() == tokens
        assert torch.isfinite(logits[turn][1]).all()
    last = launched[-1].wait()
    assert last.token_ids[0] in allowed[-1]


def test_time_spent_waiting_for_a_mask_is_not_the_devices(served):
    """The scheduler's budget follows from the reported time: late masks would shrink its steps."""
    it = served(llama)
    plan = awaiting(it.first_plan([1, 2, 3]))

    def mask_of() -> link_pb2.Mask:
        threading.Event().wait(0.5)
        return mask_message(plan.step_id, {}, VOCAB_SIZE)

    spans = it.runner.launch(plan, mask_of)._spans
    assert len(spans) == 2
    assert spans[1][0].microseconds_since(spans[0][1]) >= 500_000


WRONG = {
    "another step": (link_pb2.Mask(step_id=9), "mask of step 9 came for step 4"),
    "a sample beyond": (
        link_pb2.Mask(step_id=4, sample_indices=[0, 2], words=[b"1234"] * 2),
        r"samples \[0, 2\]; they must rise within 0\.\.1",
    ),
    "a negative one": (
        link_pb2.Mask(step_id=4, sample_indices=[-1], words=[b"1234"]),
        r"samples \[-1\]; they must rise",
    ),
    "one sample twice": (
        link_pb2.Mask(step_id=4, sample_indices=[1, 1], words=[b"1234"] * 2),
        r"samples \[1, 1\]; they must rise",
    ),
    "words missing": (
        link_pb2.Mask(step_id=4, sample_indices=[0, 1], words=[b"1234"]),
        "1 rows of words for 2 samples",
    ),
    "half a word": (
        link_pb2.Mask(step_id=4, sample_indices=[1], words=[b"123456"]),
        "6 bytes for sample 1; allowed: a multiple of 4",
    ),
    "nothing allowed": (
        link_pb2.Mask(step_id=4, sample_indices=[1], words=[bytes(4)]),
        rf"allows samples \[1\] none of the {VOCAB_SIZE} tokens",
    ),
}


@pytest.mark.parametrize(("mask", "message"), WRONG.values(), ids=WRONG)
def test_a_wrong_mask_fails_its_step_alone(served, mask, message):
    """Sampling without it would break the grammar silently; the next step must find its buffers."""
    it = served(llama)
    plan = it.first_plan([1, 2, 3], [4, 5, 6])
    object.__setattr__(plan, "step_id", 4)
    right = it.step(plan).token_ids.tolist()
    awaiting(plan)
    for _ in range(3):
        with pytest.raises(InvalidPlan, match=message):
            it.runner.launch(plan, lambda: mask)
    with pytest.raises(InvalidPlan, match="awaits a mask, and none can come"):
        it.runner.launch(plan)
    everything = mask_message(4, {0: range(VOCAB_SIZE)}, VOCAB_SIZE)
    assert it.runner.launch(plan, lambda: everything).wait().token_ids.tolist() == right


def test_bits_beyond_the_vocabulary_are_ignored():
    """A tokenizer may know more ids than the model has logits, or fewer."""
    plan = with_samples(make_plan(4), [0], [0], [0])
    object.__setattr__(plan, "step_id", 4)
    for given, expected in (
        (b"\xff" * 16, [-1, 0x7FFFFF]),
        (b"\xff\x00\x00\x80", [-(2**31) + 255, 0]),
    ):
        mask = link_pb2.Mask(step_id=4, sample_indices=[0], words=[given])
        samples, words = check_mask(mask, plan, 55)
        assert samples.tolist() == [0]
        assert words.tolist() == [expected]


# The session and the loop


class MaskRunner(FakeRunner):
    """Answers the samples that the mask names; more than five are wrong."""

    def launch(
        self, plan: StepPlan, mask_of: Callable[[], link_pb2.Mask] | None = None
    ) -> FakeStep:
        step = super().launch(plan)
        if plan.awaits_mask:
            mask = mask_of()
            if len(mask.sample_indices) > 5:
                raise InvalidPlan("too many samples")
            step._result = make_result(plan.step_id, mask.sample_indices)
        return step


def make_result(step_id: int, tokens: Sequence[int]) -> StepResult:
    return StepResult(step_id, 1, 0, np.array(tokens, np.int32), np.zeros(0, np.int32))


def mask_of_step(step_id: int, *samples: int) -> link_pb2.Mask:
    return link_pb2.Mask(step_id=step_id, sample_indices=samples)


@pytest.fixture
def serving(start: Start, scheduler: FakeScheduler) -> FakeScheduler:
    start(lambda configure, progress: MaskRunner())
    scheduler.configure()
    scheduler.receive("ready")
    return scheduler


def test_a_mask_may_come_early_or_late(serving: FakeScheduler) -> None:
    """Before its plan, behind the next plan, in any order: each step gets its own."""
    serving.send(mask=mask_of_step(1, 7))
    serving.send_plan(awaiting(make_plan(1)))
    assert serving.receive_result().token_ids.tolist() == [7]
    serving.send_plan(awaiting(make_plan(2)))
    serving.send_plan(awaiting(make_plan(3)))
    serving.send_plan(make_plan(4, token_ids=[1]))
    serving.send(mask=mask_of_step(3, 9))
    serving.send(mask=mask_of_step(2, 8))
    results = [serving.receive_result() for _ in range(3)]
    assert [(r.step_id, r.token_ids.tolist()) for r in results] == [(2, [8]), (3, [9]), (4, [2])]


def test_masks_of_discarded_plans_are_dropped(serving: FakeScheduler) -> None:
    """After a Fault everything planned upon the failed step is void, its masks too."""
    serving.send_plan(make_plan(1, token_ids=[13]))
    serving.send_plan(awaiting(make_plan(2)))
    serving.send(mask=mask_of_step(2, 1))
    assert serving.receive("fault").fault.step_id == 1
    serving.send(resume=link_pb2.Resume(next_step_id=3))
    serving.send(mask=mask_of_step(2, 2))
    serving.send_plan(awaiting(make_plan(3)))
    serving.send(mask=mask_of_step(3, 3))
    assert serving.receive_result().token_ids.tolist() == [3]


def test_a_wrong_mask_is_a_fault_of_its_step(serving: FakeScheduler) -> None:
    """The worker must live on."""
    serving.send_plan(awaiting(make_plan(1)))
    serving.send(mask=mask_of_step(1, *range(6)))
    fault = serving.receive("fault").fault
    assert (fault.step_id, fault.error) == (1, "too many samples")
    serving.send(resume=link_pb2.Resume(next_step_id=2))
    serving.send_plan(make_plan(2, token_ids=[1]))
    assert serving.receive_result().step_id == 2


def test_a_session_that_ends_ends_the_wait(
    start: Start, scheduler: FakeScheduler, address: str
) -> None:
    """The mask will never come; the next scheduler must find a worker that is not busy."""
    serving = start(lambda configure, progress: MaskRunner())
    scheduler.configure()
    scheduler.receive("ready")
    scheduler.send_plan(make_plan(1, token_ids=[5]))
    scheduler.send_plan(awaiting(make_plan(2)))
    assert scheduler.receive_result().step_id == 1
    while serving.link.busy[:2] != ("mask", 2):
        threading.Event().wait(0.01)
    scheduler.close()
    second = FakeScheduler(address, boot_id=8)
    try:
        second.configure()
        second.receive("ready")
        assert serving.link.busy[0] == "idle"
        second.send_plan(awaiting(make_plan(1)))
        second.send(mask=mask_of_step(1, 4))
        assert second.receive_result().token_ids.tolist() == [4]
    finally:
        second.close()


def test_waiting_for_a_mask_is_no_hanging_step(
    start: Start, scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler is late then: a worker that ended itself would lose every request's KV."""
    ended = threading.Event()
    monkeypatch.setattr("worker.process.watchdog.POLL_SECONDS", 0.01)
    monkeypatch.setattr("worker.process.watchdog.Watchdog.__init__.__defaults__", (ended.set, {}))
    serving = start(lambda configure, progress: MaskRunner())
    scheduler.configure(step_timeout=0.1)
    scheduler.receive("ready")
    scheduler.send_plan(awaiting(make_plan(1)))
    beat = scheduler.receive("heartbeat").heartbeat
    while (beat.busy, beat.busy_step) != ("mask", 1):
        beat = scheduler.receive("heartbeat").heartbeat
    assert not ended.wait(0.5)
    scheduler.send(mask=mask_of_step(1, 4))
    assert scheduler.receive_result().token_ids.tolist() == [4]
    serving.link.set_busy("step", 1)
    assert ended.wait(PATIENCE), "the watchdog does not watch: this test proves nothing"
