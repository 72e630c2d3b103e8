"""The engine in its thread, and a real worker's runner at the other end of a link in memory."""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from protos import inference_pb2 as pb
from protos import link_pb2
from protos.link import PROTOCOL
from protos.plan import StepPlan
from scheduler_svc.core.limits import Limits
from scheduler_svc.engine.engine import Engine
from scheduler_svc.engine.events import Delta, Event, Failed, Finished, Submission
from scheduler_svc.engine.worker_link import WorkerMessage
from tests.support.loading import configure
from worker.model.load import LoadedModel
from worker.runner import Runner

WAIT_SECONDS = 60.0  # for the next event, before a test is given up


class WorkerGone(Exception):
    """Ends the thread of a worker that a test has killed."""


class _Worker:
    """Computes plans in a thread, one after the other, as worker/process/loop.py does."""

    def __init__(self, boot_id: int, runner: Runner, say: Callable[[WorkerMessage], None]) -> None:
        self.boot_id = boot_id
        self.plans: queue.SimpleQueue[StepPlan | None] = queue.SimpleQueue()
        self.masks: dict[int, link_pb2.Mask] = {}
        self.has_mask = threading.Condition()
        self.is_alive = True
        self._runner = runner
        self._say = say
        self.thread = threading.Thread(target=self._run, name="runner", daemon=True)
        self.thread.start()

    def take_mask(self, mask: link_pb2.Mask) -> None:
        with self.has_mask:
            assert mask.step_id not in self.masks, f"two masks for step {mask.step_id}"
            self.masks[mask.step_id] = mask
            self.has_mask.notify()

    def kill(self) -> None:
        with self.has_mask:
            self.is_alive = False
            self.has_mask.notify()
        self.plans.put(None)
        self.thread.join()

    def _run(self) -> None:
        while (plan := self.plans.get()) is not None and self.is_alive:
            step_id = plan.step_id
            try:
                result = self._runner.launch(plan, lambda id=step_id: self._wait(id)).wait()  # type: ignore[misc]
            except WorkerGone:
                return
            if self.is_alive:
                header = link_pb2.StepResult(step_id=result.step_id)
                envelope = link_pb2.Envelope(worker_boot_id=self.boot_id, step_result=header)
                self._say(WorkerMessage(envelope, result))

    def _wait(self, step_id: int) -> link_pb2.Mask:
        with self.has_mask:
            self.has_mask.wait_for(lambda: step_id in self.masks or not self.is_alive)
            if not self.is_alive:
                raise WorkerGone
            return self.masks[step_id]


class RunnerLink:
    """A fake of worker_link.WorkerLink."""

    def __init__(self, loaded: LoadedModel, told: link_pb2.Configure, chunks: int, swap: int):
        self._make_runner = lambda: Runner(loaded, told, chunks + 2, swap)
        self.ready = self._make_runner().ready()
        self.worker: _Worker | None = None
        self.num_masks = 0
        self._on_message: Callable[[WorkerMessage], None] = lambda message: None

    def start(self, on_message: Callable[[WorkerMessage], None], on_death: object = None) -> None:
        self._on_message = on_message

    def connect(self) -> None:
        """A new worker takes over."""
        boot_id = 1 if self.worker is None else self.worker.boot_id + 1
        self.worker = _Worker(boot_id, self._make_runner(), self._on_message)
        hello = link_pb2.Hello(protocol=PROTOCOL, version="0", host="here", pid=1)
        for message in ({"hello": hello}, {"ready": self.ready}):
            self._on_message(WorkerMessage(link_pb2.Envelope(worker_boot_id=boot_id, **message)))  # type: ignore[arg-type]

    def kill_worker(self) -> None:
        """At once, whatever it computes; another one takes over."""
        assert self.worker is not None
        self.worker.kill()
        gone = link_pb2.Envelope(worker_boot_id=self.worker.boot_id)
        self._on_message(WorkerMessage(gone, error="its connection is closed"))
        self.connect()

    def send(self, message: link_pb2.Envelope, plan: StepPlan | None = None) -> None:
        worker = self.worker
        if worker is None or message.worker_boot_id != worker.boot_id:
            return
        if plan is not None:
            worker.plans.put(plan)
        elif message.HasField("mask"):
            self.num_masks += 1
            worker.take_mask(message.mask)

    def drop(self, worker_boot_id: int, reason: str | None = None) -> None:
        pass

    def stop(self) -> None:
        if self.worker is not None:
            self.worker.kill()


@dataclass
class Answer:
    """Of one sibling."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    end: Finished | None = None
    error: Exception | None = None


class EngineOnRunner:
    """Serves submissions; use it by `serving`."""

    def __init__(self, loaded: LoadedModel, **settings: Any) -> None:
        chunks, swap = settings.pop("chunks", 400), settings.pop("swap_chunks", 0)
        depth, rows = settings.pop("depth", 2), settings.pop("max_requests", 8)
        told = configure(
            max_batch_tokens=64,
            max_requests_per_batch=rows,
            page_size=loaded.geometry.page_size,
            **settings,
        )
        self.link = RunnerLink(loaded, told, chunks, swap)
        limits = Limits(64, rows, max_plans_in_flight=depth)
        self.engine = Engine(limits, told, self.link)  # type: ignore[arg-type]
        self.events: queue.SimpleQueue[Event | BaseException] = queue.SimpleQueue()

    def _take(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Delta):
                event.is_taken = True
            self.events.put(event)

    def serve(
        self,
        submissions: Iterable[Submission],
        on_delta: Callable[[Delta], None] = lambda delta: None,
    ) -> dict[tuple[str, int], Answer]:
        """All of them to their ends, by request and sibling."""
        answers: dict[tuple[str, int], Answer] = defaultdict(Answer)
        live: dict[str, int] = {}
        for submission in submissions:
            live[submission.new.request_id] = submission.new.n
            self.engine.submit(submission)
        while live:
            event = self.events.get(timeout=WAIT_SECONDS)
            if isinstance(event, BaseException):
                raise event
            if isinstance(event, Failed):
                for index in range(live.pop(event.request_id)):
                    answers[event.request_id, index].error = event.error
                continue
            answer = answers[event.request_id, event.index]
            if isinstance(event, Delta):
                answer.tokens += event.token_ids
                answer.text += event.text
                on_delta(event)
            else:
                answer.end = event
                live[event.request_id] -= 1
                if not live[event.request_id]:
                    del live[event.request_id]
        return dict(answers)


@contextmanager
def serving(loaded: LoadedModel, **settings: Any) -> Iterator[EngineOnRunner]:
    bench = EngineOnRunner(loaded, **settings)
    bench.engine.attach(bench._take, lambda status: None)
    bench.engine.start(bench.events.put)
    bench.link.connect()
    try:
        yield bench
    finally:
        bench.engine.stop()


def tiny_llama(vocab_size: int, max_len: int = 512) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size, hidden_size=48, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=max_len,
        initializer_range=0.3, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def asked(**sampling: Any) -> pb.GenerateRequest:
    """A request for an answer at temperature 1, of up to 400 tokens."""
    fields = {"temperature": 1, "max_tokens": 400, **sampling}
    return pb.GenerateRequest(text="Answer:", sampling=pb.SamplingParams(**fields))
