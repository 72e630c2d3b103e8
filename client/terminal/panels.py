"""Answers side by side in live panels, for a terminal. Needs rich (the extra `cli`).

A panel shows the end of its answer while it grows. When all have ended, the whole texts replace
the panels, in order, so that the scrollback is complete.
"""

from __future__ import annotations

import shutil
from typing import Any, Self

from client.terminal.display import shortened
from client.terminal.streams import escape_controls

MAX_PANELS = 12  # more do not fit a terminal
_WIDE = 100  # terminal columns from which two panels are side by side


class Panels:
    """A live panel for each lane."""

    def __init__(self, lanes: dict[str, str]) -> None:
        """`lanes` maps each lane to its title, the prompt."""
        from rich.console import Console
        from rich.live import Live

        self._console = Console()
        self._titles = {lane: escape_controls(title) for lane, title in lanes.items()}
        self._texts = dict.fromkeys(lanes, "")
        self._notes: dict[str, str] = {}
        self._live = Live(
            console=self._console, get_renderable=self._grid, refresh_per_second=8, transient=True
        )

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        from rich.text import Text

        self._live.stop()
        for lane, title in self._titles.items():
            note = self._notes.get(lane, "interrupted")
            self._console.print(Text(f"[{lane}] {title}", style="bold"))
            self._console.print(Text(self._texts[lane].strip("\n")))
            self._console.print(Text(f"({note})\n", style="dim"))

    def delta(self, lane: str, text: str) -> None:
        self._texts[lane] += escape_controls(text)

    def end(self, lane: str, note: str) -> None:
        self._notes[lane] = escape_controls(note)

    def _grid(self) -> Any:
        from rich.table import Table

        columns, lines = shutil.get_terminal_size()
        across = 2 if columns >= _WIDE and len(self._titles) > 1 else 1
        down = -(-len(self._titles) // across)
        height = max(3, min(12, (lines - 1) // down))
        width = columns // across
        grid = Table.grid(expand=True)
        for _ in range(across):
            grid.add_column(ratio=1)
        panels = [self._panel(lane, width, height) for lane in self._titles]
        for start in range(0, len(panels), across):
            grid.add_row(*panels[start : start + across])
        return grid

    def _panel(self, lane: str, width: int, height: int) -> Any:
        from rich.panel import Panel
        from rich.text import Text

        text = Text(self._texts[lane])
        tail = text.wrap(self._console, max(1, width - 4))[-(height - 2) :]
        title = shortened(self._titles[lane], max(8, width - 12))
        return Panel(
            Text("\n").join(tail),
            title=Text(f"{lane} · {title}"),
            subtitle=Text(self._notes.get(lane, "")),
            border_style="dim" if lane in self._notes else "cyan",
            height=height,
        )
