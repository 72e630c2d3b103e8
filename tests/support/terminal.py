"""A command on a terminal of its own, driven by what it shows."""

from __future__ import annotations

import codecs
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Self

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_SECONDS = 20.0
_SEQUENCE = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|\x1b[=>]|\r")


class Terminal:
    """`chairlift` with these arguments; stopped when left."""

    def __init__(self, *arguments: str, code: str | None = None, **environment: str) -> None:
        """`code` runs instead of `python -m client`."""
        program = ["-m", "client"] if code is None else ["-c", code]
        self._line = [sys.executable, "-P", *program, *arguments]
        self._environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "TERM": "xterm",
            "COLUMNS": "100",
            "LINES": "40",
            "PROMPT_TOOLKIT_NO_CPR": "1",  # nobody here answers where the cursor is
            **environment,
        }
        self.raw = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def __enter__(self) -> Self:
        self._ours, theirs = pty.openpty()
        self.process = subprocess.Popen(
            self._line,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=self._environment,
            start_new_session=True,
        )
        os.close(theirs)
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._ours)

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def paste(self, text: str) -> None:
        """As a terminal passes on what was pasted."""
        self.type(f"\x1b[200~{text}\x1b[201~")

    def interrupt(self) -> None:
        """Ctrl-C while no input is read."""
        self.process.send_signal(signal.SIGINT)

    def expect(self, text: str) -> str:
        """Waits until `text` is shown after all that was expected before; what came up to it."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while text not in self.shown:
            if not self._receive(deadline):
                raise AssertionError(f"{text!r} is not shown:\n{self.shown}\n{self.raw[-300:]!r}")
        before, _, _ = self.shown.partition(text)
        self._seen += len(before) + len(text)
        return before

    def end(self) -> int:
        """The exit code, once it has ended by itself."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while self._receive(deadline):
            pass
        return self.process.wait(PATIENCE_SECONDS)

    _seen = 0

    @property
    def shown(self) -> str:
        """The text since what was expected last, without the sequences that place it."""
        return _SEQUENCE.sub("", self.raw)[self._seen :]

    def _receive(self, deadline: float) -> bool:
        ready, _, _ = select.select([self._ours], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            return False
        try:
            data = os.read(self._ours, 4096)
        except OSError:  # Linux, when the other side has closed
            return False
        self.raw += self._decoder.decode(data)  # a read may end inside a character
        return bool(data)
