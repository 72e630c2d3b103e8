"""transformers on the same workload, run by the child process `python -m worker.model.compare`.

The client has no torch. The child loads the model once, then runs one system at a time on request
and sleeps in between, so that systems can be measured in turns.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Self

from client.bench.records import RequestRecord, Run
from client.bench.workload import WorkloadRequest, write_workload
from client.processes import launch
from client.processes.launch import LaunchError

SYSTEMS: Final = {  # the child's name of a system → its name in reports
    "static": "transformers static batches",
    "continuous": "transformers continuous batching",
}


class Transformers:
    """The child process, from `with` to its end."""

    def __init__(self, model: str, requests: Sequence[WorkloadRequest], threads: int = 0) -> None:
        """`model` is a folder or Hub id; `threads` 0 leaves the choice to torch."""
        self._requests = requests
        self._arguments = ["--model", model]
        self._arguments += ["--threads", str(threads)] if threads else []

    def __enter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory(prefix="chairlift-bench-")
        workload = Path(self._folder.name, "workload.jsonl")
        write_workload(workload, self._requests)
        self._child = subprocess.Popen(
            launch.command("compare", [*self._arguments, "--workload", str(workload)]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # no preexec_fn: it would fork, and gRPC's threads do not survive every fork
        )
        self._read()  # "ready": the model is loaded
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            self._child.kill()
        self._child.communicate()  # closing its input ends it
        self._folder.cleanup()

    def run(self, system: str, turn: int) -> Run:
        """Runs one of SYSTEMS over the whole workload, all requests at once; may take long."""
        assert self._child.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # then _read fails
            print(system, file=self._child.stdin, flush=True)
        answer = self._read()
        requests = [
            RequestRecord(
                request.id,
                len(request.prompt),
                request.max_new,
                due=0.0,
                end=row["end"],
                deliveries=[(moment, count) for moment, count in row["deliveries"]],
            )
            for request, row in zip(self._requests, answer["requests"], strict=True)
        ]
        return Run(SYSTEMS[system], turn, requests, notes=answer["notes"])

    def _read(self) -> dict[str, Any]:
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            code = self._child.wait()
            raise LaunchError(f"the comparison with transformers ended with exit code {code}")
        answer: dict[str, Any] = json.loads(line)
        return answer
