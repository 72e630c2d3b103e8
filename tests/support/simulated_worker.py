"""`python -P -m tests.support.simulated_worker ADDRESS`: a worker whose device only waits.

It speaks the real link. A step takes `--step-ms` of time and no CPU, as on a GPU: it begins when
its plan is there and the step before has ended, whichever is later; its result is sent when it
ends. All tokens of a step are its number, modulo the vocabulary. When the session ends, a line of
JSON says for every step how many rows it had, how long the device was idle before it, and when its
result was sent.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import threading
import time

import numpy as np

from protos import link_pb2
from protos.link import PROTOCOL
from protos.plan import StepPlan, StepResult
from worker.process.link import SchedulerLink
from worker.process.session import Received, Session, SessionEnded


def ready(options: argparse.Namespace) -> link_pb2.Ready:
    group = link_pb2.CacheGroup(kind="full_attention", layers=[0], blocks_per_chunk=1)
    return link_pb2.Ready(
        model_path=options.model_path,
        model_type="simulated",
        architecture="SimulatedForCausalLM",
        vocab_size=options.vocab_size,
        max_model_len=4096,
        dtype="float32",
        device="none",
        attention="none",
        groups=[group],
        page_size=16,
        num_chunks=options.num_blocks + 2,
        chunk_bytes=1,
    )


def result_of(plan: StepPlan, vocab_size: int) -> StepResult:
    samples = len(plan.sample_rows)
    return StepResult(
        step_id=plan.step_id,
        device_microseconds=0,
        queue_microseconds=0,
        token_ids=np.full(samples, plan.step_id % vocab_size, np.int32),
        is_finite=np.ones(len(plan.rows), np.int32),
    )


def take_plans(session: Session, plans: queue.SimpleQueue[Received | None]) -> None:
    try:
        while True:
            plans.put(session.receive())
    except SessionEnded:
        plans.put(None)


def run(session: Session, step_seconds: float, vocab_size: int) -> list[tuple[int, float, float]]:
    """Rows, seconds of idle device before it, and time.monotonic() of its result, for each step
    until the session ends."""
    plans: queue.SimpleQueue[Received | None] = queue.SimpleQueue()
    threading.Thread(target=take_plans, args=(session, plans), daemon=True).start()
    steps: list[tuple[int, float, float]] = []
    end: float | None = None
    while (received := plans.get()) is not None:
        result = result_of(received.plan, vocab_size)
        start = received.at if end is None else max(received.at, end)
        gap = 0.0 if end is None else start - end
        end = start + step_seconds
        time.sleep(max(0.0, end - time.monotonic()))
        steps.append((len(received.plan.rows), gap, time.monotonic()))
        session.send_result(result)
    return steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address")
    parser.add_argument("--step-ms", type=float, default=5.0)
    parser.add_argument("--num-blocks", type=int, default=10_000)
    parser.add_argument("--vocab-size", type=int, default=256)
    parser.add_argument("--model-path", default="simulated", help="where its tokenizer is")
    options = parser.parse_args()
    hello = link_pb2.Hello(protocol=PROTOCOL, version="0", host="here", pid=os.getpid())
    link = SchedulerLink(options.address, hello)
    session = link.accept()
    session.send_ready(ready(options))
    print(json.dumps(run(session, options.step_ms / 1000, options.vocab_size)), flush=True)
    link.close("done")


if __name__ == "__main__":
    main()
