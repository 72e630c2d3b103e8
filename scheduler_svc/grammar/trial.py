"""The scheduler's end of the process in which grammars are tried (trial_process.py)."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from scheduler_svc.grammar.limits import TRIAL_CPU_SECONDS

ROOT: Final = Path(__file__).resolve().parents[2]
ANSWER_SECONDS: Final = 30.0  # the process may still be starting; a trial is killed long before
TOO_COSTLY: Final = (
    f"it takes more than {TRIAL_CPU_SECONDS:g} s of processor time, or too much memory"
)


class TrialProcess:
    """Starts with the first trial, and ends with this object, if not by `close`. Thread-safe."""

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        setup = json.dumps([tokenizer_json, vocab_size, list(eos_token_ids)]).encode()
        self._setup = len(setup).to_bytes(8, "big") + setup
        self._lock = threading.Lock()
        self._control: socket.socket | None = None

    def why_refused(self, grammar: str) -> str | None:
        """Why the grammar may not be compiled here; None if it may."""
        for _ in range(2):
            answer = self._try(grammar)
            if answer.strip():
                reason: str | None = json.loads(answer)
                return reason
            if answer:
                return TOO_COSTLY
            self.close()  # no trial began: the process was killed from outside
        raise RuntimeError("the process that tries grammars does not work; see the log")

    def _try(self, grammar: str) -> bytes:
        """What a trial says, as trial_process.py describes it; nothing if none began."""
        ours, theirs = socket.socketpair()
        answer = b""
        with ours, theirs, contextlib.suppress(OSError):  # the trial or its process was killed
            ours.settimeout(ANSWER_SECONDS)
            with self._lock:
                socket.send_fds(self._start(), [b"."], [theirs.fileno()])
            theirs.close()
            ours.sendall(grammar.encode())
            ours.shutdown(socket.SHUT_WR)
            while received := ours.recv(1 << 16):
                answer += received
        return answer

    def close(self) -> None:
        with self._lock:
            self._end()

    def _start(self) -> socket.socket:
        if self._control is None:
            self._control, theirs = socket.socketpair()
            with theirs:
                process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "scheduler_svc.grammar.trial_process"],
                    stdin=theirs.fileno(),
                    env={**os.environ, "PYTHONPATH": str(ROOT)},
                )
            self._process = process
            self._end_it = weakref.finalize(self, _end, process, self._control)
            self._control.sendall(self._setup)
        return self._control

    def _end(self) -> None:
        if self._control is not None:
            self._end_it()
            self._control = None


def _end(process: subprocess.Popen[bytes], control: socket.socket) -> None:
    control.close()
    process.kill()
    process.wait()
