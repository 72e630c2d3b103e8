"""The blocking client is derived from the asyncio one."""

from __future__ import annotations

from client.make_blocking import BLOCKING, blocking_source


def test_the_blocking_client_is_current() -> None:
    """An edit of client/aio.py without `make protos` would change one of the two clients only."""
    assert BLOCKING.read_text(encoding="utf-8") == blocking_source()
