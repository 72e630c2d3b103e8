"""What the runner's lanes wait for when a step fails. Lanes are recorded, so no GPU is needed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch

from tests.support.tiny_models import llama
from worker import runner as runner_module
from worker.process.device_failure import DeviceFailed
from worker.step.sampler import sample


@dataclass
class RecordedLane:
    """A mark whose `wait` is noted down; `is_broken` makes it raise as after a device error."""

    waited: int = 0
    is_broken: bool = False

    def use(self):
        return nullcontext()

    def mark(self) -> RecordedLane:
        return self

    def after(self, mark: RecordedLane) -> None: ...

    def wait(self) -> None:
        self.waited += 1
        if self.is_broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def microseconds_since(self, earlier: RecordedLane) -> int:
        return 0


@pytest.fixture
def lanes(monkeypatch: pytest.MonkeyPatch) -> list[RecordedLane]:
    """Inbound, compute and outbound, in this order."""
    made: list[RecordedLane] = []

    def new_lane(_device: torch.device) -> RecordedLane:
        made.append(RecordedLane())
        return made[-1]

    monkeypatch.setattr(runner_module, "new_lane", new_lane)
    return made


def failing(*_: object) -> torch.Tensor:
    raise RuntimeError("a sampler's bug")


def test_inputs_of_a_failed_step_are_not_overwritten_under_it(
    served: Callable, lanes: list[RecordedLane]
) -> None:
    """What was begun still reads them; the next step would be computed from a mixture."""
    it = served(llama)
    plan = it.first_plan([1, 2, 3])
    it.sample_with(failing)
    with pytest.raises(RuntimeError, match="a sampler's bug"):
        it.runner.launch(plan)
    inbound, compute, outbound = lanes
    assert (inbound.waited, compute.waited, outbound.waited) == (1, 1, 0)
    it.sample_with(sample)
    assert len(it.step(plan).token_ids) == 1  # the set is free again


def test_a_broken_device_is_told_from_a_failed_step(
    served: Callable, lanes: list[RecordedLane]
) -> None:
    """Each step would fail, one request after another be given up, and the worker live on."""
    it = served(llama)
    it.sample_with(failing)
    lanes[1].is_broken = True
    with pytest.raises(DeviceFailed, match="a sampler's bug") as caught:
        it.runner.launch(it.first_plan([1, 2, 3]))
    assert "illegal memory access" in str(caught.value.__cause__)


def test_a_step_whose_result_fails_gives_its_buffers_back(
    served: Callable, lanes: list[RecordedLane]
) -> None:
    """Else the launching thread waits for them for ever, and the worker never ends."""
    it = served(llama)
    plan = it.first_plan([1, 2, 3])
    launched = [it.runner.launch(plan) for _ in range(2)]
    lanes[2].is_broken = True
    with pytest.raises(RuntimeError, match="illegal memory access"):
        launched[0].wait()
    it.runner.launch(plan)  # takes the first one's set
