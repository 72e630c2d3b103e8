"""Notices a worker that beats its heart but makes no progress with its steps.

Progress is a result, or the start of a step when none was under way. While the worker says that
it is loading, capturing or compiling, which may take long, the clock stands still.

A step that the worker calls finished, although its result never came, need not wait for the limit:
results and heartbeats come in order. Two heartbeats must say so, for the first may have been
written by a worker that counts a little differently.
"""

from __future__ import annotations

from typing import Final

from protos import link_pb2

UNHURRIED: Final = ("loading", "capturing", "compiling")


class StepWatchdog:
    """For one worker. Times are seconds by the caller's clock; `limit` 0 = steps may take for ever.

    Every method takes `oldest`, the id of the oldest step without a result, None if there is none.
    """

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._since = 0.0  # of the last progress
        self._oldest: int | None = None
        self._claimed: int | None = None  # the oldest step, once it was called finished

    def look(self, oldest: int | None, now: float) -> str | None:
        """Why the worker must be given up; None while all is well."""
        if oldest != self._oldest:
            self._oldest, self._claimed, self._since = oldest, None, now
        seconds = now - self._since
        if oldest is None or not self._limit or seconds <= self._limit:
            return None
        return f"step {oldest} has made no progress for {seconds:.1f} s (step_timeout)"

    def beat(self, heartbeat: link_pb2.Heartbeat, oldest: int | None, now: float) -> str | None:
        """What a heartbeat says of it; as `look`."""
        if heartbeat.busy in UNHURRIED:
            self._since = now
        # 0 is also what a worker says that leaves the field out
        if oldest is None or not 0 < oldest <= heartbeat.last_finished_step:
            self._claimed = None
        elif self._claimed == oldest:
            return f"it calls step {oldest} finished, but no result of it came"
        else:
            self._claimed = oldest
        return self.look(oldest, now)
