"""transformers on the same work: drives `python -m worker.model.compare`, which holds the model.

The client has no torch. The child loads the model once and then does one system at a time, when it
is told to; in between it sleeps, so that the systems can be measured in turns.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from client import launch
from client.bench.records import RequestRecord, Run
from client.bench.workload import Ask, write_workload
from client.launch import LaunchError

SYSTEMS: Final = {  # what the child calls it → what a report calls it
    "static": "transformers static batches",
    "continuous": "transformers continuous batching",
}


class Transformers:
    """The child, from `with` to the end of it."""

    def __init__(self, model: str, asks: Sequence[Ask], threads: int = 0) -> None:
        """`model` is a folder or Hub id, `threads` 0 torch's choice."""
        self._model = model
        self._asks = asks
        self._threads = threads

    def __enter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory(prefix="chairlift-bench-")
        workload = Path(self._folder.name, "workload.jsonl")
        write_workload(workload, list(self._asks))
        self._child = subprocess.Popen(
            launch.command(
                "compare",
                ["--model", self._model, "--workload", str(workload)]
                + (["--threads", str(self._threads)] if self._threads else []),
            ),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # no preexec_fn: it makes this a fork, and gRPC's threads do not survive all forks
        )
        self._answer()  # "ready": the model is loaded
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            self._child.kill()
        self._child.communicate()  # the end of its input is the end of it
        self._folder.cleanup()

    def run(self, system: str, turn: int) -> Run:
        """One of SYSTEMS over the whole workload, all requests at once; may take long."""
        assert self._child.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # then there is no answer, which is the error
            print(system, file=self._child.stdin, flush=True)
        answer = self._answer()
        requests = [
            RequestRecord(
                ask.id,
                len(ask.prompt),
                ask.max_new,
                due=0.0,
                end=row["end"],
                deliveries=[(moment, count) for moment, count in row["deliveries"]],
            )
            for ask, row in zip(self._asks, answer["requests"], strict=True)
        ]
        return Run(SYSTEMS[system], turn, requests, notes=answer["notes"])

    def _answer(self) -> dict[str, Any]:
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            code = self._child.wait()
            raise LaunchError(f"the comparison with transformers ended with exit code {code}")
        answer: dict[str, Any] = json.loads(line)
        return answer
