"""How many tokens a second reach 256 clients: `python -m tests.bench.streaming`.

Four roles in as many processes: this one; the scheduler as it is served, gRPC, engine, text and
link; a worker whose device only waits (simulated_worker.py); and a process with all clients, each
with a stream of its own over real gRPC. Every token is the number of its step, so a client knows
when the worker sent it. Prints tokens and messages a second, delays from the worker's result to
the client, and who used how much of the CPUs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models
from transformers import PreTrainedTokenizerFast

from protos import inference_pb2 as pb
from protos import inference_pb2_grpc
from scheduler_svc.__main__ import SWITCH_SECONDS, make_engine
from scheduler_svc.front import server
from scheduler_svc.settings.config import Config
from scheduler_svc.text.tokenizer import Tokenizer

VOCAB_SIZE = 20_000  # steps that can be told apart
NUM_CHANNELS = 8


@dataclass(frozen=True)
class Figures:
    tokens_per_second: float
    messages_per_second: float
    delay_p50: float  # seconds from the worker's result to the client
    delay_p99: float
    server_cpu: float  # CPU seconds a second
    clients_cpu: float

    def __str__(self) -> str:
        return (
            f"{self.tokens_per_second:,.0f} tokens/s in {self.messages_per_second:,.0f} messages/s,"
            f" delay p50 {self.delay_p50 * 1000:.0f} ms, p99 {self.delay_p99 * 1000:.0f} ms;"
            f" CPUs used: scheduler {self.server_cpu:.2f}, clients {self.clients_cpu:.2f}"
        )


def measure(num_clients: int = 256, max_tokens: int = 600, step_ms: float = 10.0) -> Figures:
    """One run; the worker offers num_clients tokens every step_ms, and no more."""
    module = [sys.executable, "-P", "-m"]
    with tempfile.TemporaryDirectory() as folder:
        address = f"ipc://{folder}/w"
        worker = subprocess.Popen(
            [*module, "tests.support.simulated_worker", address, "--step-ms", str(step_ms),
             "--vocab-size", str(VOCAB_SIZE), "--num-blocks", "20000"],
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        scheduler = subprocess.Popen(
            [*module, "tests.bench.streaming", "serve", address, str(num_clients)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert scheduler.stdin is not None
        assert scheduler.stdout is not None
        port = scheduler.stdout.readline().strip()
        clients = subprocess.run(
            [*module, "tests.bench.streaming", "clients", port, str(num_clients),
             str(max_tokens)],
            stdout=subprocess.PIPE, text=True, check=True, timeout=120,
        )  # fmt: skip
        said, _ = scheduler.communicate("end\n", timeout=60)
        steps, _ = worker.communicate(timeout=60)
    return figures(json.loads(clients.stdout), json.loads(said), json.loads(steps))


def figures(heard: dict[str, Any], server_cpu: list[float], steps: list[list[float]]) -> Figures:
    """Of the time in which every client has a stream: from the first full step to the last."""
    sent = np.array([step[2] for step in steps])
    rows = np.array([step[0] for step in steps])
    full = sent[rows == rows.max()]
    begin, end = full[0], full[-1]
    times = np.array(heard["times"])  # of each message
    counts = np.array(heard["counts"])  # tokens in each
    inside = (times >= begin) & (times <= end)
    delays = (np.repeat(times, counts) - sent[np.array(heard["tokens"])])[np.repeat(inside, counts)]

    def share(used: list[float]) -> float:
        return float(np.diff(np.interp([begin, end], used[0::2], used[1::2]))[0] / (end - begin))

    return Figures(
        tokens_per_second=len(delays) / (end - begin),
        messages_per_second=int(inside.sum()) / (end - begin),
        delay_p50=float(np.quantile(delays, 0.5)),
        delay_p99=float(np.quantile(delays, 0.99)),
        server_cpu=share(server_cpu),
        clients_cpu=share(heard["cpu"]),
    )


# The scheduler's process


def words() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer with VOCAB_SIZE tokens of some four letters."""
    tokenizer = RustTokenizer(models.BPE({f"w{i}": i for i in range(VOCAB_SIZE)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


async def serve(address: str, num_clients: int) -> None:
    """Prints its port; when stdin speaks, ends and prints pairs of time and CPU seconds used."""
    sys.setswitchinterval(SWITCH_SECONDS)
    config = Config(
        host="127.0.0.1",
        port=0,
        worker_address=address,
        max_requests_per_batch=num_clients,
        safety_margin=0.0,
        heartbeat_timeout=60.0,
    )
    serving = server.Server(config, make_engine(config), lambda path: Tokenizer(words()))
    await serving.start(lambda error: os._exit(1))
    await serving.served.wait_until_ready_is(True)
    print(serving.port, flush=True)
    used = await cpu_until(asyncio.create_task(asyncio.to_thread(sys.stdin.readline)))
    await serving.drain_and_stop()
    print(json.dumps(used))


async def cpu_until(end: asyncio.Future[Any]) -> list[float]:
    """Pairs of time and CPU seconds that this process had used by then."""
    used: list[float] = []
    while not end.done():
        used += [time.monotonic(), time.process_time()]
        await asyncio.wait([end], timeout=0.2)
    return [*used, time.monotonic(), time.process_time()]


# The clients' process


async def clients(port: str, num_clients: int, max_tokens: int) -> None:
    """Reads all streams to their ends; prints what came when."""
    own_connection = [("grpc.use_local_subchannel_pool", 1)]
    channels = [
        grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=own_connection)
        for _ in range(NUM_CHANNELS)
    ]
    stubs: list[Any] = [inference_pb2_grpc.InferenceStub(channel) for channel in channels]
    times: list[float] = []
    counts: list[int] = []
    tokens: list[int] = []

    async def read(number: int) -> None:
        sampling = pb.SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        prompt = pb.TokenIds(ids=[number, *range(15)])
        request = pb.GenerateRequest(tokens=prompt, sampling=sampling)
        call = stubs[number % NUM_CHANNELS].Generate(request)
        num_tokens = 0
        while (response := await call.read()) is not grpc.aio.EOF:
            if response.HasField("chunk"):
                times.append(time.monotonic())
                counts.append(len(response.chunk.token_ids))
                tokens.extend(response.chunk.token_ids)
                num_tokens += counts[-1]
        assert num_tokens == max_tokens, f"client {number} got {num_tokens} tokens"

    reading = asyncio.gather(*(read(number) for number in range(num_clients)))
    cpu = await cpu_until(reading)
    await reading
    print(json.dumps({"times": times, "counts": counts, "tokens": tokens, "cpu": cpu}))
    for channel in channels:
        await channel.close()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.streaming")
    roles = parser.add_subparsers(dest="role")
    role = roles.add_parser("serve", help="internal")
    role.add_argument("address")
    role.add_argument("num_clients", type=int)
    role = roles.add_parser("clients", help="internal")
    role.add_argument("port")
    role.add_argument("num_clients", type=int)
    role.add_argument("max_tokens", type=int)
    parser.add_argument("--num-clients", type=int, default=256)
    parser.add_argument("--max-tokens", type=int, default=600)
    parser.add_argument("--step-ms", type=float, default=10.0)
    options = parser.parse_args()
    if options.role == "serve":
        asyncio.run(serve(options.address, options.num_clients))
    elif options.role == "clients":
        asyncio.run(clients(options.port, options.num_clients, options.max_tokens))
    else:
        print(measure(options.num_clients, options.max_tokens, options.step_ms))


if __name__ == "__main__":
    main()
