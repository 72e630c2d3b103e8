"""OpenAI's HTTP API before Chairlift, as its clients find it: the real gateway `smg`."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from client.processes.gateway import GatewayOptions, gateway_line
from tests.support.processes import STOP_SECONDS, free_port

MISSING = [
    name for name in ("smg", "smg_grpc_proto", "openai") if not importlib.util.find_spec(name)
]
NEEDS = f"needs {', '.join(MISSING)}: pip install 'chairlift[dev]'"


@contextmanager
def gateway(log: Path, worker_ports: Sequence[int], *more: str) -> Iterator[int]:
    """`smg` as `chairlift serve` starts it, but before several schedulers; yields its port."""
    port = free_port()
    line = gateway_line(GatewayOptions(True, port, "127.0.0.1"), [])
    place = line.index("--worker-urls")
    line[place + 1 : place + 2] = [f"grpc://127.0.0.1:{worker}" for worker in worker_ports]
    with log.open("wb") as output:
        process = subprocess.Popen([*line, *more], stdout=output, stderr=subprocess.STDOUT)
    try:
        wait_for_models(port, len(worker_ports))
        yield port
    finally:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        finally:
            process.kill()


def wait_for_models(port: int, num_workers: int = 1, seconds: float = 120) -> str:
    """Waits until so many healthy workers serve the one model; returns its name."""
    deadline = time.monotonic() + seconds
    seen = ""
    while time.monotonic() < deadline:
        try:
            models, workers = _get(port, "/v1/models")["data"], _get(port, "/workers")["workers"]
            seen = f"{models} {workers}"
            if models and sum(bool(worker["is_healthy"]) for worker in workers) >= num_workers:
                return str(models[0]["id"])
        except (OSError, KeyError) as error:
            seen = f"{type(error).__name__}: {error}"
        time.sleep(0.2)
    raise AssertionError(f"the gateway does not serve after {seconds:g} s: {seen}")


def _get(port: int, path: str) -> Any:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as response:
        return json.load(response)
