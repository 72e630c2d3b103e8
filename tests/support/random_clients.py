"""Random clients of a real gRPC server: they ask, leave, resume, abort, time out, stall, reuse ids.

Server, engine, core and text are real; the worker is a shadow worker in a thread of its own that
now and then dies, fails a step or goes silent for a while. Every complete answer must hold exactly
the tokens that follow from its prompt, every other one must end the way its client caused, and at
the end nothing may be left: no request, no owned block, no task.
"""

from __future__ import annotations

import asyncio
import queue
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import grpc

from protos import admin_pb2, admin_pb2_grpc, inference_pb2_grpc, link_pb2
from protos import inference_pb2 as pb
from protos.plan import StepPlan
from scheduler_svc.core.limits import (
    FULL_ATTENTION,
    SLIDING_ATTENTION,
    Geometry,
    GroupGeometry,
    Limits,
)
from scheduler_svc.core.policies import POLICIES
from scheduler_svc.engine.engine import Engine
from scheduler_svc.engine.worker_link import WorkerMessage
from scheduler_svc.front.server import Server
from scheduler_svc.settings.config import Config
from scheduler_svc.text.tokenizer import Tokenizer
from tests.support.calls import BYTES, END, nothing_is_left
from tests.support.expected_answers import expected_tokens
from tests.support.memory_link import MemoryLink
from tests.support.small_tokenizers import chat

VOCAB_SIZE = 90  # the first tokens of a byte-level vocabulary: whole characters
CLIENTS = 8
PEACE = 60  # plans between two misfortunes: a request that meets several in a row is to blame
SECONDS = 60.0  # longer than any call takes, however busy the machine is


class MortalWorker(MemoryLink):
    """Computes in a thread of its own, as slowly as it likes, and does not always live on."""

    def __init__(self, geometry: Geometry, num_rows: int, chance: random.Random) -> None:
        super().__init__(geometry, num_rows, VOCAB_SIZE)
        self.deaths = self.faults = 0
        self.is_mortal = True
        self._is_deaf = False
        self._peace = 0  # plans until the next misfortune may come
        self._chance = chance
        self._todo: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="shadow worker")

    def start(self, on_message: Callable[[WorkerMessage], None], on_death: Any = None) -> None:
        super().start(on_message)
        self._thread.start()
        self._todo.put(self.hello)

    def send(self, message: link_pb2.Envelope, plan: StepPlan | None = None) -> None:
        self._todo.put(lambda: self._take(message, plan))

    def stop(self) -> None:
        self._todo.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (act := self._todo.get()) is not None:
            act()

    def _take(self, message: link_pb2.Envelope, plan: StepPlan | None) -> None:
        kind = message.WhichOneof("message")
        if plan is not None and self._is_deaf:
            return  # planned before the scheduler knew of the death or the fault
        super().send(message, plan)
        if kind == "configure":
            self.ready()
        if plan is None:
            self._is_deaf &= kind not in ("configure", "resume")
            return
        self._peace -= 1
        fate = self._chance.random() if self.is_mortal and self._peace < 0 else 1.0
        if fate < 0.004:
            self._peace = PEACE
        if fate < 0.002:
            self.deaths += 1
            self._is_deaf = True
            self.say(bye=link_pb2.Bye(reason="it was its time"))
            self.hello()
        elif fate < 0.004:
            self.faults += 1
            self._is_deaf = True
            self.fault("a cosmic ray")
        else:
            if fate < 0.1:
                time.sleep(0.01)  # others get a turn, queues fill
            self.answer()


@dataclass
class Outcome:
    """What happened, so that a test can see that the interesting things did."""

    calls: Counter[str] = field(default_factory=Counter)  # by kind, and by the status of an end
    deaths: int = 0
    faults: int = 0


@dataclass
class Client:
    """One client's life: `calls` random calls, one after the other."""

    number: int
    channel: grpc.aio.Channel
    seed: int
    outcome: Outcome
    shared_ids: list[str]  # that every client may use
    windows: tuple[int, ...]  # of the model's cache groups
    chance: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed * 1_000 + self.number)
        self.inference: Any = inference_pb2_grpc.InferenceStub(self.channel)
        self.admin: Any = admin_pb2_grpc.AdminStub(self.channel)

    async def live(self, calls: int) -> None:
        for _ in range(calls):
            act = self.chance.choices(
                (self.ask, self.go_on, self.leave, self.abort, self.look, self.blunder),
                (10, 3, 3, 2, 2, 1),
            )[0]
            self.outcome.calls[act.__name__] += 1
            await act()

    def request(self) -> pb.GenerateRequest:
        """Prompts begin with one of three prefixes, so that blocks are shared."""
        prefix = [self.chance.randrange(3)] * self.chance.randrange(1, 30)
        prompt = prefix + self.chance.choices(range(VOCAB_SIZE), k=self.chance.randrange(1, 12))
        sampling = pb.SamplingParams(
            max_tokens=self.chance.randrange(1, 25),
            temperature=self.chance.choice((0.0, 1.0)),
            seed=self.chance.randrange(1 << 32),
            ignore_eos=True,
            n=self.chance.choice((1, 1, 1, 2, 3)),
        )
        if self.chance.random() < 0.2:
            sampling.stop_token_ids.extend(self.chance.choices(range(VOCAB_SIZE), k=8))
        if self.chance.random() < 0.1:
            sampling.stop.append(BYTES.decode([self.chance.randrange(VOCAB_SIZE)]))
        asked = pb.GenerateRequest(
            tokens=pb.TokenIds(ids=prompt), sampling=sampling, priority=self.chance.randrange(3)
        )
        if self.chance.random() < 0.3:
            asked.stream = False
        if self.chance.random() < 0.3:
            asked.request_id = self.chance.choice(self.shared_ids)
        return asked

    async def ask(self) -> None:
        """Reads to the end, at times slowly: all tokens, or a reason."""
        asked = self.request()
        pause = 0.005 if self.chance.random() < 0.1 else 0.0
        call = self.inference.Generate(asked, timeout=SECONDS)
        responses, status = await self.read(call, pause=pause)
        if status is grpc.StatusCode.OK:
            self.check(asked, responses)
        else:
            assert status is grpc.StatusCode.ALREADY_EXISTS, await call.details()
            assert asked.request_id, "an id that the server made up was taken"

    async def go_on(self) -> None:
        """Loses a stream and resumes each sibling: together they are the whole answer."""
        asked = self.request()
        call = self.inference.Generate(asked, timeout=SECONDS)
        responses, _ = await self.read(call, self.chance.randrange(1, 12))
        call.cancel()
        if not responses:
            assert await call.code() is grpc.StatusCode.ALREADY_EXISTS, await call.details()
            return
        for index in range(asked.sampling.n):
            mine = [each for each in responses[1:] if each.index == index]
            if mine and mine[-1].HasField("complete"):
                continue
            chunks = [each.chunk for each in mine]
            rest = pb.GenerateRequest(tokens=asked.tokens, sampling=asked.sampling)
            rest.sampling.ClearField("n")
            rest.resume.index = index
            rest.resume.text_length = sum(len(chunk.text) for chunk in chunks)
            rest.resume.output_token_ids.extend(t for chunk in chunks for t in chunk.token_ids)
            more, status = await self.read(call := self.inference.Generate(rest, timeout=SECONDS))
            assert status is grpc.StatusCode.OK, await call.details()
            self.outcome.calls["resumed amid an answer"] += bool(mine)
            responses += more[1:]
        self.check(asked, responses)

    async def read(
        self, call: Any, most: int = 1 << 30, pause: float = 0.0
    ) -> tuple[list[pb.GenerateResponse], grpc.StatusCode | None]:
        """Up to `most` responses, and the status if the call has ended."""
        responses: list[pb.GenerateResponse] = []
        try:
            while len(responses) < most:
                if (response := await call.read()) is grpc.aio.EOF:
                    return responses, grpc.StatusCode.OK
                responses.append(response)
                await asyncio.sleep(pause)
        except grpc.aio.AioRpcError as error:
            self.outcome.calls[error.code().name] += 1
            return responses, error.code()
        return responses, None

    def check(self, asked: pb.GenerateRequest, responses: list[pb.GenerateResponse]) -> None:
        sampling, prompt = asked.sampling, list(asked.tokens.ids)
        n = sampling.n
        want = expected_tokens(
            [prompt] * n,
            [sampling.max_tokens] * n,
            VOCAB_SIZE,
            [sampling.temperature] * n,
            [sampling.seed] * n,
            [frozenset(sampling.stop_token_ids)] * n,
            windows=self.windows,
            siblings=range(n),
        )
        assert responses[0].WhichOneof("event") == "started"
        for index in range(n):
            mine = [response for response in responses[1:] if response.index == index]
            kinds = [response.WhichOneof("event") for response in mine]
            assert kinds == ["chunk"] * (len(mine) - 1) + ["complete"], kinds
            tokens = [token for each in mine for token in each.chunk.token_ids]
            text = "".join(each.chunk.text for each in mine)
            end = mine[-1].complete
            self.outcome.calls[f"ended by {end.finish_reason}"] += 1
            assert end.usage.completion_tokens == len(tokens)
            if end.finish_reason == "abort":  # another client aborted this id
                assert asked.request_id
                assert end.usage.prompt_tokens in (0, len(prompt)), "0: before it was looked at"
                assert tokens == want[index][: len(tokens)]
                continue
            assert end.usage.prompt_tokens == len(prompt)
            if end.WhichOneof("matched_stop") == "stop_string":
                assert tokens == want[index][: len(tokens)]
                assert end.stop_string in sampling.stop
                assert end.stop_string not in text
            else:
                assert tokens == want[index], (tokens, want[index])
                assert end.finish_reason == ("length" if len(tokens) == sampling.max_tokens
                                             and tokens[-1] not in sampling.stop_token_ids
                                             else "stop")  # fmt: skip
                # the token that stops an answer is no part of its text
                said = tokens[:-1] if end.finish_reason == "stop" else tokens
                assert text == BYTES.decode(said), (text, said)

    async def leave(self) -> None:
        """Goes away in the middle, by cancelling or by a deadline."""
        asked = self.request()
        by_deadline = self.chance.random() < 0.5
        timeout = self.chance.uniform(0.001, 0.05) if by_deadline else SECONDS
        call = self.inference.Generate(asked, timeout=timeout)
        most = 1 << 30 if by_deadline else self.chance.randrange(4)
        _, status = await self.read(call, most)
        call.cancel()
        allowed = {None, grpc.StatusCode.OK, grpc.StatusCode.ALREADY_EXISTS}
        if by_deadline:
            allowed.add(grpc.StatusCode.DEADLINE_EXCEEDED)
        assert status in allowed, (status, await call.details())

    async def abort(self) -> None:
        chosen = self.chance.sample(self.shared_ids, self.chance.randrange(1, 4))
        await self.inference.Abort(pb.AbortRequest(request_ids=chosen), timeout=SECONDS)

    async def look(self) -> None:
        """What operators ask, while all of this goes on."""
        what = self.chance.randrange(6)
        if what == 0:
            await self.admin.ListRequests(admin_pb2.ListRequestsRequest(limit=5), timeout=SECONDS)
        elif what == 1:
            await self.admin.GetCache(admin_pb2.GetCacheRequest(), timeout=SECONDS)
        elif what == 2:
            await self.admin.FlushCache(admin_pb2.FlushCacheRequest(), timeout=SECONDS)
        elif what == 3:
            await self.inference.GetServerInfo(pb.GetServerInfoRequest(), timeout=SECONDS)
        elif what == 4:
            asked = admin_pb2.GetRequestRequest(request_id=self.chance.choice(self.shared_ids))
            status = await (call := self.admin.GetRequest(asked, timeout=SECONDS)).code()
            assert status in (grpc.StatusCode.OK, grpc.StatusCode.NOT_FOUND), await call.details()
        else:
            watched = self.admin.WatchSteps(admin_pb2.WatchStepsRequest(), timeout=SECONDS)
            await watched.initial_metadata()
            watched.cancel()

    async def blunder(self) -> None:
        """Requests that must be refused, by name and at once."""
        asked = self.request()
        name, spoil = self.chance.choice(
            (
                ("temperature", lambda: setattr(asked.sampling, "temperature", -1.0)),
                ("max_tokens", lambda: setattr(asked.sampling, "max_tokens", 100_000)),
                ("tokens", lambda: asked.tokens.ids.append(VOCAB_SIZE + 7)),
                ("n", lambda: setattr(asked.sampling, "n", 1_000)),
            )
        )
        spoil()
        call = self.inference.Generate(asked, timeout=SECONDS)
        responses, status = await self.read(call)
        assert not responses, f"a wrong {name} was served: {asked}"
        assert status in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.ALREADY_EXISTS)
        if status is grpc.StatusCode.INVALID_ARGUMENT:
            assert name in (said := await call.details()), said


def geometry(chance: random.Random) -> Geometry:
    """A small pool, of full attention or with windows, with or without room to swap."""
    groups = chance.choice(
        (
            (GroupGeometry(FULL_ATTENTION, 1, 1),),
            (GroupGeometry(FULL_ATTENTION, 1, 1), GroupGeometry(SLIDING_ATTENTION, 1, 2, 7)),
        )
    )
    return Geometry(
        page_size=4,
        num_chunks=chance.choice((48, 60, 90)) + 2,
        chunk_bytes=64,
        groups=groups,
        max_model_len=80,
        num_swap_chunks=chance.choice((0, 30)),
        overlaps_swap=chance.random() < 0.5,
    )


async def live(seed: int, calls: int) -> Outcome:
    """`calls` calls of each client against one server; what happened."""
    chance = random.Random(seed)
    num_rows = chance.choice((3, 6))
    policy = POLICIES[chance.choice(("fifo", "prefill_first", "priority"))]
    memory = geometry(chance)
    config = Config(
        host="127.0.0.1",
        port=0,
        page_size=memory.page_size,
        max_batch_tokens=24,
        max_requests_per_batch=num_rows,
    )
    limits = Limits(
        config.max_batch_tokens,
        num_rows,
        safety_margin=policy.safety_margin,
        max_plans_in_flight=chance.choice((1, 2)),
    )
    link = MortalWorker(memory, num_rows, random.Random(seed + 1))
    crashes: list[BaseException] = []

    engine = Engine(limits, config.to_configure(), link, policy=policy, heartbeat_timeout=600)

    def load_tokenizer(path: str) -> Tokenizer:
        tokenizer = Tokenizer(chat())
        assert END >= VOCAB_SIZE  # the shadow worker never says it
        return tokenizer

    outcome = Outcome()
    server = Server(config, engine, load_tokenizer)
    await server.start(crashes.append)
    try:
        async with asyncio.timeout(SECONDS):
            await server.served.wait_until_ready_is(True)
        shared_ids = [f"id-{number}" for number in range(CLIENTS)]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            windows = tuple(group.sliding_window for group in memory.groups)
            clients = [
                Client(number, channel, seed, outcome, shared_ids, windows)
                for number in range(CLIENTS)
            ]
            async with asyncio.TaskGroup() as tasks:
                for client in clients:
                    tasks.create_task(client.live(calls))
            link.is_mortal = False
            await nothing_is_left(channel)
    finally:
        await server.drain_and_stop()
    assert not crashes, crashes
    outcome.deaths, outcome.faults = link.deaths, link.faults
    return outcome
