"""The gRPC server of the scheduler process, and its life from start to drained.

`serve` runs in the event loop: it starts the engine and the server, mirrors readiness into
grpc.health.v1, and on SIGTERM or SIGINT refuses new requests, lets running streams end within
drain_grace, and stops. What a call does is up to the services.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from protos import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc
from scheduler_svc.errors import Unavailable
from scheduler_svc.front import background
from scheduler_svc.front.admin_service import AdminService
from scheduler_svc.front.generations import Generations
from scheduler_svc.front.inference_service import InferenceService
from scheduler_svc.front.served_model import ServedModel
from scheduler_svc.front.statuses import StatusInterceptor
from scheduler_svc.front.streams import LiveStreams
from scheduler_svc.settings import systemd
from scheduler_svc.settings.config import Config
from scheduler_svc.settings.descriptors import max_connections
from scheduler_svc.text.tokenizer import Tokenizer
from scheduler_svc.text.tokenizer_files import import_ahead

if TYPE_CHECKING:
    from scheduler_svc.engine.engine import Engine

logger = logging.getLogger(__name__)

INFERENCE: Final = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name
ADMIN: Final = admin_pb2.DESCRIPTOR.services_by_name["Admin"].full_name
STOP_SECONDS: Final = 1.0  # for calls that still write when all streams have ended

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class CannotListen(Exception):
    """The address for clients or for workers is in use, or belongs to another machine."""


class EngineCrashed(Exception):
    """An invariant of the scheduler is broken, or a background task or thread has died: the process
    must be restarted."""


class ModelRefused(Exception):
    """The model cannot be served, and a restart would not change that."""


class Server:
    """The services and health, on one port, in front of an engine."""

    def __init__(
        self,
        config: Config,
        engine: Engine,
        load_tokenizer: Callable[[str], Tokenizer] = Tokenizer.load,
    ) -> None:
        """Needs a running event loop. Raises CannotListen; starts nothing."""
        loop = asyncio.get_running_loop()
        self._grace = config.drain_grace
        self._streams = LiveStreams(loop)
        self.served = ServedModel(
            config.model_name,
            loop,
            wait_seconds=config.worker_wait,
            load_tokenizer=load_tokenizer,
        )
        self._engine = engine
        engine.attach(self._streams.deliver, self.served.on_status)
        self._health = health.aio.HealthServicer()
        self._grpc = grpc.aio.server(
            interceptors=[StatusInterceptor()],
            options=[
                ("grpc.so_reuseport", 0),  # else a second server gets half of the connections
                # A stream is silent while its request is queued: let clients ping meanwhile.
                ("grpc.http2.max_ping_strikes", 0),
                ("grpc.max_allowed_incoming_connections", max_connections()),
                ("grpc.max_receive_message_length", config.max_message_bytes),
                ("grpc.max_send_message_length", config.max_message_bytes),
            ],
        )
        generations = Generations(config, engine, self._streams, self.served)
        inference = InferenceService(config, engine, self._streams, self.served, generations)
        inference_pb2_grpc.add_InferenceServicer_to_server(inference, self._grpc)
        admin = AdminService(engine, self._streams)
        admin_pb2_grpc.add_AdminServicer_to_server(admin, self._grpc)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._grpc)
        names = [INFERENCE, ADMIN, health.SERVICE_NAME, reflection.SERVICE_NAME]
        self._ready_names = [INFERENCE]  # whose health is that of the model
        if importlib.util.find_spec("smg_grpc_proto") is not None:
            from scheduler_svc.front.gateway import vllm_service

            shared = (config, engine, self._streams, self.served, generations)
            self._ready_names.append(vllm_service.add_to(self._grpc, *shared))
            names.append(vllm_service.SERVICE)
        reflection.enable_server_reflection(names, self._grpc)
        self.port = _bind(self._grpc, config.host, config.port)
        self._mirror: asyncio.Task[None] | None = None

    @property
    def num_live(self) -> int:
        """Requests that have not ended."""
        return len(self._streams)

    async def start(self, on_crash: Callable[[BaseException], None]) -> None:
        """Raises CannotListen when the engine cannot bind the worker link."""
        await self._health.set("", SERVING)
        await self._set_ready(False)
        self._mirror = background.spawn(self._mirror_readiness(), "readiness mirror")
        try:
            self._engine.start(on_crash)
        except (OSError, ValueError) as error:  # the address, or a key file
            raise CannotListen(str(error)) from error
        await self._grpc.start()

    async def drain_and_stop(
        self, hurry: asyncio.Event | None = None, why: str | None = None
    ) -> None:
        """New requests get UNAVAILABLE at once, running ones after the grace period.

        `hurry` ends the grace period; `why` is the message for new requests.
        """
        try:
            await self._drain(hurry or asyncio.Event(), why)
        finally:  # whatever happens, no port and no thread may keep the process alive
            try:
                await self._grpc.stop(STOP_SECONDS)
            finally:
                await asyncio.to_thread(self._engine.stop)
                self.served.close()

    async def _drain(self, hurry: asyncio.Event, why: str | None) -> None:
        if self._mirror is not None:
            self._mirror.cancel()
        self._streams.refuse(
            Unavailable(why or "the server is draining; try another server, or try later")
        )
        await self._health.enter_graceful_shutdown()
        ends: list[asyncio.Task[object]] = [
            asyncio.create_task(self._streams.wait_idle()),
            asyncio.create_task(hurry.wait()),
        ]
        await asyncio.wait(ends, timeout=self._grace, return_when=asyncio.FIRST_COMPLETED)
        for end in ends:
            end.cancel()
        self._streams.fail_all(Unavailable("the server stopped before the answer was complete"))

    async def _mirror_readiness(self) -> None:
        is_ready = False
        while True:
            await self.served.wait_until_ready_is(not is_ready)
            is_ready = not is_ready
            logger.info("%s", "ready" if is_ready else "not ready: waiting for a worker")
            await self._set_ready(is_ready)

    async def _set_ready(self, is_ready: bool) -> None:
        for name in self._ready_names:
            await self._health.set(name, SERVING if is_ready else NOT_SERVING)


async def serve(
    config: Config,
    engine: Engine,
    load_tokenizer: Callable[[str], Tokenizer] = Tokenizer.load,
) -> None:
    """Runs until SIGTERM or SIGINT; a second signal ends the grace period.

    Raises CannotListen, EngineCrashed or ModelRefused (with exit_on_model_error). Everything that
    was started is stopped before it returns or raises.
    """
    stop, hurry = asyncio.Event(), asyncio.Event()
    crashes: list[BaseException] = []
    refusals: list[str] = []
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        (hurry if stop.is_set() else stop).set()

    def on_crash(error: BaseException) -> None:  # from any thread
        crashes.append(error)
        loop.call_soon_threadsafe(hurry.set)
        loop.call_soon_threadsafe(stop.set)

    async def stop_on_model_error() -> None:
        error = await server.served.wait_for_error()
        if not stop.is_set():
            refusals.append(error)
            stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    server = Server(config, engine, load_tokenizer)
    with background.ends_the_process(on_crash):
        try:
            await server.start(on_crash)
            import_ahead()  # only now: an address in use must be reported at once
            if config.exit_on_model_error:
                background.spawn(stop_on_model_error(), "exit on model error")
            logger.info("listening on %s:%d for clients", config.host, server.port)
            systemd.notify("READY=1")
            await stop.wait()
            systemd.notify("STOPPING=1")
            if not crashes:
                logger.info("stopping; running streams have %g s to end", config.drain_grace)
        except BaseException:
            hurry.set()
            raise
        finally:
            await server.drain_and_stop(hurry, next(iter(refusals), None))
    if crashes:
        error = crashes[0]
        raise EngineCrashed(f"{type(error).__name__}: {error}") from error
    if refusals:
        raise ModelRefused(refusals[0])
    logger.info("stopped")


def _bind(server: Any, host: str, port: int) -> int:
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        bound: int = server.add_insecure_port(address)
    except RuntimeError as error:
        raise CannotListen(
            f"cannot listen on {address}: is another server using the port, or does the address "
            f"belong to another machine? Choose another with --host and --port ({error})"
        ) from error
    return bound
