"""Detects a worker that sends heartbeats but makes no progress with its steps.

Progress is a result, or the start of a step when none was in flight. While the worker reports that
it is loading, capturing or compiling, which may take long, or waits for a mask that the scheduler
has yet to send, the clock is stopped.

A step that the worker reports as finished, although its result never came, need not wait for the
limit: results and heartbeats arrive in order. Two heartbeats must report it, in case a worker
counts slightly differently.
"""

from __future__ import annotations

from typing import Final

from protos import link_pb2

UNHURRIED: Final = ("loading", "capturing", "compiling", "mask")


class StepWatchdog:
    """Watches one worker. Times are seconds by the caller's clock; a `limit` of 0 never expires.

    Every method takes `oldest`, the id of the oldest step without a result, None if there is none.
    """

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._since = 0.0  # time of the last progress
        self._oldest: int | None = None
        self._claimed: int | None = None  # the oldest step, once reported as finished

    def check(self, oldest: int | None, now: float) -> str | None:
        """Why the worker must be dropped; None while all is well."""
        if oldest != self._oldest:
            self._oldest, self._claimed, self._since = oldest, None, now
        seconds = now - self._since
        if oldest is None or not self._limit or seconds <= self._limit:
            return None
        return f"step {oldest} has made no progress for {seconds:.1f} s (step_timeout)"

    def on_heartbeat(
        self, heartbeat: link_pb2.Heartbeat, oldest: int | None, now: float
    ) -> str | None:
        """`check` with what a heartbeat reports."""
        if heartbeat.busy in UNHURRIED:
            self._since = now
        # 0 may also mean that the worker left the field out
        if oldest is None or not 0 < oldest <= heartbeat.last_finished_step:
            self._claimed = None
        elif self._claimed == oldest:
            return f"it reported step {oldest} as finished, but sent no result"
        else:
            self._claimed = oldest
        return self.check(oldest, now)
