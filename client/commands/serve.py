"""`chairlift serve`: a scheduler and a worker on this machine, the socket between them, and perhaps
a gateway for OpenAI's HTTP API before them."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from typing import Final

from client.processes import launch
from client.processes.gateway import gateway_line, split_options
from client.processes.supervisor import Supervisor

# The address of a Unix socket has 107 bytes at most.
_MAX_FOLDER_BYTES: Final = 107 - len("/chairlift-abcdefgh/worker")

_HELP = """\
usage: chairlift serve [--gateway] [scheduler options] [-- smg options]

Starts a scheduler and a worker on this machine; Ctrl-C stops both. They communicate through a
private socket unless --worker-address is given.

  --gateway         start smg before them: OpenAI's HTTP API (needs the extra `gateway`)
  --http-port PORT  where the gateway listens (default: 8080)
  --http-host HOST  on which address (default: 127.0.0.1)
  -- OPTIONS        for smg itself, such as --tool-call-parser or --reasoning-parser

All other options are the scheduler's:
"""


def main(arguments: list[str]) -> int:
    """Serves until stopped; returns the exit code."""
    scheduler_line = launch.command("scheduler", [])
    launch.command("worker", [])  # reports a missing extra before the scheduler starts
    if "-h" in arguments or "--help" in arguments:
        print(_HELP, flush=True)
        return subprocess.run([*scheduler_line, "--help"], check=False).returncode
    wanted, arguments = split_options(arguments)
    gateway = gateway_line(wanted, arguments) if wanted.is_wanted else None
    with worker_address(arguments) as (address, is_ours):
        own = ["--worker-address", address] if is_ours else []
        default = "--exit-on-model-error=true"  # first, so that a given option overrides it
        return Supervisor(
            scheduler=launch.command("scheduler", [default, *arguments, *own]),
            worker=launch.command("worker", ["--connect", address]),
            gateway=gateway,
        ).run()


@contextlib.contextmanager
def worker_address(arguments: Sequence[str]) -> Iterator[tuple[str, bool]]:
    """Yields (address, is_ours): the given --worker-address, or a socket in a private folder, which
    is removed at the end."""
    given = None
    for position, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name == "--worker-address":
            given = value if equals else "".join(arguments[position + 1 : position + 2])
    if given is not None:
        yield given, False
        return
    folder = _private_folder()
    try:
        yield f"ipc://{folder}/worker", True
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _private_folder() -> str:
    """A new folder that only this user can enter, with a path short enough for a socket below it:
    TMPDIR on a cluster may be too long. Raises LaunchError if there is none."""
    places = [os.environ.get("XDG_RUNTIME_DIR", ""), "/tmp", "/var/tmp"]
    with contextlib.suppress(FileNotFoundError):  # no folder is writable
        places.insert(0, tempfile.gettempdir())
    for folder in places:
        if not folder or len(os.fsencode(folder)) > _MAX_FOLDER_BYTES:
            continue
        with contextlib.suppress(OSError):
            return tempfile.mkdtemp(prefix="chairlift-", dir=folder)
    raise launch.LaunchError(
        f"no folder for the socket between scheduler and worker: {', '.join(filter(None, places))} "
        f"cannot be written or are longer than {_MAX_FOLDER_BYTES} bytes; set TMPDIR to another "
        "folder, or --worker-address to ipc://PATH"
    )
