"""A gateway for tests: before a server, as `chairlift serve --gateway` starts it, or alone."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

READY_SECONDS = 90


def wait_for_model(port: int, log: Path, process: subprocess.Popen[bytes] | None = None) -> str:
    """The name of the model, once the gateway on this port has found it."""
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline:
        assert process is None or process.poll() is None, log.read_text()
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=5) as reply:
                models: list[dict[str, Any]] = json.load(reply)["data"]
        except OSError:
            models = []
        if models:
            return str(models[0]["id"])
        time.sleep(0.2)
    raise AssertionError(f"the gateway found no model:\n{log.read_text()}")


def gateway_alone(port: int, metrics_port: int, log: Path, *addresses: str) -> Any:
    """smg before schedulers at these addresses, as docs/gateway.md starts it for replicas."""
    line = [
        *(sys.executable, "-P", "-m", "smg.cli", "launch", "--host", "127.0.0.1"),
        *("--port", str(port), "--prometheus-host", "127.0.0.1"),
        *("--prometheus-port", str(metrics_port), "--history-backend", "none"),
        *("--policy", "cache_aware", "--worker-startup-check-interval", "1"),
        *("--health-check-interval-secs", "1", "--health-failure-threshold", "2"),
        *("--log-level", "error", "--worker-urls"),
        *(f"grpc://{address}" for address in addresses),
    ]
    with log.open("wb") as output:
        return subprocess.Popen(line, stdout=output, stderr=subprocess.STDOUT)
