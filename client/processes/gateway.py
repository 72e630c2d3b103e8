"""The command line of the gateway `smg`, which speaks OpenAI's HTTP API before a scheduler."""

from __future__ import annotations

import argparse
import importlib.util
import os
import socket
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from client.processes.launch import LaunchError

DEFAULT_HTTP_PORT: Final = 8080
_DEFAULTS: Final = {"host": "0.0.0.0", "port": "50051"}  # the scheduler's
_GRACE_SECONDS: Final = 30  # for running answers when it is told to stop


@dataclass(frozen=True, slots=True)
class GatewayOptions:
    """The options of `chairlift serve` that are the gateway's."""

    is_wanted: bool
    http_port: int
    http_host: str
    own: tuple[str, ...] = ()  # for smg itself


def split_options(arguments: Sequence[str]) -> tuple[GatewayOptions, list[str]]:
    """The gateway's options, and the scheduler's; what follows `--` is for smg itself. Raises
    LaunchError for options that have no gateway to go to."""
    mine, separator, own = _partition(arguments)
    parser = argparse.ArgumentParser(prog="chairlift serve", add_help=False, allow_abbrev=False)
    parser.add_argument("--gateway", action="store_true")
    parser.add_argument("--http-port", type=int, default=DEFAULT_HTTP_PORT)
    parser.add_argument("--http-host", default="127.0.0.1")
    known, others = parser.parse_known_args(mine)
    if separator and not known.gateway:
        raise LaunchError("options behind -- are for the gateway; give --gateway, too")
    return GatewayOptions(known.gateway, known.http_port, known.http_host, own), others


def _partition(arguments: Sequence[str]) -> tuple[Sequence[str], bool, tuple[str, ...]]:
    if "--" not in arguments:
        return arguments, False, ()
    place = arguments.index("--")
    return arguments[:place], True, tuple(arguments[place + 1 :])


def gateway_line(options: GatewayOptions, scheduler: Sequence[str]) -> list[str]:
    """The command line of a gateway before the scheduler that is started with these options.
    Raises LaunchError if the gateway is not installed, or the port is taken."""
    if (
        importlib.util.find_spec("smg") is None
        or importlib.util.find_spec("smg_grpc_proto") is None
    ):
        raise LaunchError(
            "the gateway needs smg and smg-grpc-proto, not installed here: "
            "pip install 'chairlift[gateway]'"
        )
    _refuse_if_taken(options.http_host, options.http_port)
    host, port = endpoint(scheduler, os.environ)
    return [
        *(sys.executable, "-P", "-m", "smg.cli", "launch"),
        *("--host", options.http_host, "--port", str(options.http_port)),
        *("--worker-urls", f"grpc://{_reachable(host)}:{port}"),
        *("--worker-startup-check-interval", "1", "--policy", "cache_aware"),
        *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(_free_port())),
        *("--history-backend", "none", "--log-level", "error"),
        *("--shutdown-grace-period-secs", str(_GRACE_SECONDS)),
        *options.own,
    ]


def endpoint(arguments: Sequence[str], environ: Mapping[str, str]) -> tuple[str, str]:
    """Host and port that a scheduler with these options listens on: command line, environment,
    TOML file or default, in this order."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("host", "port", "config"):
        parser.add_argument(f"--{name}")
    given = vars(parser.parse_known_args(arguments)[0])
    file = {}
    if path := given["config"] or environ.get("CHAIRLIFT_CONFIG", ""):
        try:
            file = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            file = {}  # the scheduler says what is wrong with it
    host, port = (
        str(given[name] or environ.get(f"CHAIRLIFT_{name.upper()}") or file.get(name) or default)
        for name, default in _DEFAULTS.items()
    )
    return host, port


def _reachable(host: str) -> str:
    if host in ("0.0.0.0", "::", ""):
        return "[::1]" if host == "::" else "127.0.0.1"
    return f"[{host}]" if ":" in host else host


def _refuse_if_taken(host: str, port: int) -> None:
    if not 0 < port < 1 << 16:
        raise LaunchError(f"--http-port is {port}; allowed: 1 to 65535")
    try:
        socket.create_server((host, port)).close()
    except OSError as error:
        raise LaunchError(
            f"the gateway cannot listen on {host}, port {port} ({error.strerror or error}); choose "
            "another --http-port"
        ) from None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
