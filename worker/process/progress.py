"""Progress reports of loading, for the log, systemd and the scheduler."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, float], None]  # (what is being done, share of it that is done, 0 to 1)
