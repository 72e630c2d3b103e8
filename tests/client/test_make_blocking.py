"""The blocking client is derived from the asyncio one."""

from __future__ import annotations

from pathlib import Path

import pytest

from client.make_blocking import DERIVED, blocking_source, unused_substitutions


@pytest.mark.parametrize("source", DERIVED, ids=lambda source: source.name)
def test_the_blocking_client_is_current(source: Path) -> None:
    """An edit of a source without `make protos` would change one of the two clients only."""
    text = DERIVED[source].read_text(encoding="utf-8")
    assert text == blocking_source(source)
    assert "async" not in text.replace("client/aio", "").lower()


def test_every_substitution_is_needed() -> None:
    """One that matches nothing any more has been forgotten, or was meant to match."""
    assert unused_substitutions() == []
