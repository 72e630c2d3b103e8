"""docs/architecture.md names what exists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "architecture.md").read_text()
PACKAGES = ("scheduler_svc", "worker")  # whose rooms the page shows
PATH = re.compile(r"`((?:\w+/)+(?:\w+\.\w+)?|(?:\w+/)+\w+)`")  # `a/`, `a/b`, `a/b.py`


def test_every_file_and_folder_that_it_names_exists() -> None:
    """A map that shows rooms that were moved is worse than none."""
    named = PATH.findall(PAGE)
    assert len(named) > 60
    assert [path for path in dict.fromkeys(named) if not (ROOT / path).exists()] == []


def test_it_has_ten_numbered_steps_in_text_and_picture() -> None:
    """Text and picture are read side by side."""
    steps = re.findall(r"^(\d+)\. \*\*", PAGE.partition("## The way of a request")[2], re.MULTILINE)
    drawn = re.findall(r'class="digit"[^>]*>(\d+)<', (ROOT / "docs" / "request.svg").read_text())
    assert steps == drawn == [str(number) for number in range(1, 11)]


def test_it_leaves_no_room_out() -> None:
    """A new room is first missed by whoever looks for it."""
    rooms = [path.parent for path in ROOT.glob("*/*/__init__.py") if path.parts[-3] in PACKAGES]
    named = " ".join(PATH.findall(PAGE))
    missing = [room.name for room in rooms if f"{room.relative_to(ROOT)}/" not in named]
    assert missing == []
