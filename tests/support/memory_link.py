"""A link without sockets: a fake of worker_link.WorkerLink for tests of the engine.

What the engine sends is kept; a test answers by hand, or lets `ShadowWorker` do it.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from typing import Any

from protos import link_pb2
from protos.link import PROTOCOL
from protos.plan import StepPlan, StepResult
from scheduler_svc.core.limits import Geometry
from scheduler_svc.engine.worker_link import WorkerMessage
from tests.support.shadow_worker import ShadowWorker


class MemoryLink:
    """Plays the worker's side of a session over `geometry`."""

    def __init__(self, geometry: Geometry, num_rows: int, vocab_size: int = 50) -> None:
        self.geometry = geometry
        self.num_rows = num_rows
        self.vocab_size = vocab_size
        self.sent: list[link_pb2.Envelope] = []
        self.plans: deque[StepPlan] = deque()
        self.is_dropped = False
        self.on_message: Callable[[WorkerMessage], None] = lambda message: None
        self.num_workers = 0  # the boot_id of the newest one, too
        self._new_worker()

    def _new_worker(self) -> None:
        self.worker = ShadowWorker(
            self.geometry, self.num_rows, self.vocab_size, garbage_seed=self.num_workers
        )
        self.num_workers += 1

    def start(
        self,
        on_message: Callable[[WorkerMessage], None],
        on_death: Callable[[BaseException], None] | None = None,
    ) -> None:
        self.on_message = on_message

    def send(self, message: link_pb2.Envelope, plan: StepPlan | None = None) -> None:
        is_mine = message.worker_boot_id == self.num_workers  # not a former worker's
        if plan is None:
            self.sent.append(message)
            if is_mine and message.HasField("resume"):
                self.worker.last_step = message.resume.next_step_id - 1
        elif is_mine:
            self.plans.append(plan)

    def drop(self, worker_boot_id: int, reason: str | None = None) -> None:
        if worker_boot_id == self.num_workers:
            self.is_dropped = True

    def stop(self) -> None:
        pass

    # What a test makes the worker say

    def say(self, **message: object) -> None:
        envelope = link_pb2.Envelope(worker_boot_id=self.num_workers, **message)  # type: ignore[arg-type]
        self.on_message(WorkerMessage(envelope))

    def hello(self) -> None:
        """A fresh worker process: new memory, no plans. The session is its own from now on."""
        self.is_dropped = False
        self.plans.clear()
        self._new_worker()
        self.say(hello=link_pb2.Hello(protocol=PROTOCOL, version="0", host="here", pid=1))

    def ready_message(self) -> link_pb2.Ready:
        geometry = self.geometry
        layers = itertools.count()
        return link_pb2.Ready(
            model_path="/nowhere",
            model_type="shadow",
            architecture="ShadowForCausalLM",
            vocab_size=self.vocab_size,
            max_model_len=geometry.max_model_len,
            dtype="int64",
            device="cpu",
            page_size=geometry.page_size,
            num_chunks=geometry.num_chunks,
            chunk_bytes=geometry.chunk_bytes,
            groups=[
                link_pb2.CacheGroup(
                    kind=group.kind,
                    layers=itertools.islice(layers, group.num_layers),
                    sliding_window=group.sliding_window,
                    blocks_per_chunk=group.blocks_per_chunk,
                )
                for group in geometry.groups
            ],
            num_swap_chunks=geometry.num_swap_chunks,
            overlaps_swap=geometry.overlaps_swap,
        )

    def ready(self, group: tuple[int, dict[str, Any]] | None = None, **changes: Any) -> None:
        """`changes` are what is wrong in it, those of `group` in the cache group of that index."""
        message = self.ready_message()
        if group is not None:
            index, own = group
            if "layers" in own:
                message.groups[index].ClearField("layers")
            message.groups[index].MergeFrom(link_pb2.CacheGroup(**own))
            for name, value in own.items():
                if name != "layers":  # a 0 is not merged
                    setattr(message.groups[index], name, value)
        for name, value in changes.items():
            setattr(message, name, value)
        self.say(ready=message)

    def answer(self) -> bool:
        """Computes the oldest plan and sends its result; False if there is none."""
        if not self.plans:
            return False
        result = self.worker.step(self.plans.popleft())
        self.worker.finish(result.step_id)
        self.say_result(result)
        return True

    def say_result(self, result: StepResult) -> None:
        header = link_pb2.StepResult(step_id=result.step_id)
        envelope = link_pb2.Envelope(worker_boot_id=self.num_workers, step_result=header)
        self.on_message(WorkerMessage(envelope, result))

    def fault(self, error: str, is_fatal: bool = False) -> None:
        """The oldest plan fails; it and all behind it are discarded until Resume."""
        step_id = self.plans[0].step_id if self.plans else -1
        self.plans.clear()
        self.say(fault=link_pb2.Fault(step_id=step_id, error=error, is_fatal=is_fatal))
