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
ANSWER_SECONDS: Final = 5.0  # a trial is killed long before, unless the machine stands still
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
        ours, theirs = socket.socketpair()
        with ours:
            ours.settimeout(ANSWER_SECONDS)
            with theirs:
                self._hand_over(theirs)
            answer = b""
            with contextlib.suppress(OSError):  # the trial was killed, or does not answer
                ours.sendall(grammar.encode())
                ours.shutdown(socket.SHUT_WR)
                while received := ours.recv(1 << 16):
                    answer += received
        try:
            reason: str | None = json.loads(answer)
        except ValueError:
            return TOO_COSTLY
        return reason

    def close(self) -> None:
        with self._lock:
            self._end()

    def _hand_over(self, conversation: socket.socket) -> None:
        """Restarts the process if it has ended; it was killed from outside."""
        with self._lock:
            for _ in range(2):
                with contextlib.suppress(OSError):
                    socket.send_fds(self._start(), [b"."], [conversation.fileno()])
                    return
                self._end()
        raise RuntimeError("the process that tries grammars does not start; see the log")

    def _start(self) -> socket.socket:
        if self._control is None:
            self._control, theirs = socket.socketpair()
            with theirs:
                process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "scheduler_svc.grammar.trial_process"],
                    stdin=theirs.fileno(),
                    env={**os.environ, "PYTHONPATH": str(ROOT)},
                )
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
