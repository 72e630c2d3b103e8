"""Which requests may share a step while it is unknown which of them made a step fail.

Live requests are partitioned into cells; a step computes requests of one cell, and cells take
turns. Normally all are in one cell. When a step fails, the requests that it computed become a cell
and run again; if that fails, in halves, then alone. Only failing alone twice in a row proves guilt,
as a transient fault may hit any request once; where the step is not surely the cause (a worker may
die of anything), each failure weighs less. So k guilty requests among n cost about k * log2(n)
failed steps; no request is found guilty of a shared step, and all others proceed meanwhile.

A suspect is cleared once it is past the point of failure: by two tokens, by two more for each
further suspicion, by fewer again as it proceeds without failures. The growing distance isolates
what fails only together (a step too big for the device's memory, say), which proves no guilt.
A request and its siblings are one suspect.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Final

from scheduler_svc.core.request import Request, RequestState

TRIES_TOGETHER: Final = 2  # failures after which a cell is split
DISTANCE: Final = 2  # tokens past the failure that clear a suspect, per suspicion
PEACE: Final = 64  # tokens without a failure that cancel one suspicion


@dataclass(slots=True, eq=False)
class Cell:
    """Requests that may share a step."""

    num_failures: int = 0  # consecutive failed steps with all of its members
    guilt: Fraction = Fraction(0)  # of its only member; 1 = proved
    members: dict[str, None] = field(default_factory=dict)  # request ids, by arrival


@dataclass(slots=True)
class _Record:
    """The suspicions against a request that was in failed steps."""

    num_suspicions: int
    length: int  # tokens of its longest sibling when it was last suspected
    # tokens that a returned step must reach, for each sibling, to clear it
    goals: dict[Request, int] = field(default_factory=dict)


class Suspects:
    """The cells in order of their turns; one of them has all unsuspected requests."""

    def __init__(self) -> None:
        self._innocent = Cell()  # members not listed
        self._line = [self._innocent]
        self._cells: dict[str, Cell] = {}  # request_id → cell, for suspects
        self._records: dict[str, _Record] = {}  # request_id → record, once suspected

    @property
    def is_active(self) -> bool:
        """Whether any request is suspected. Then only one plan may be in flight: with two it would
        be unknown which one killed the worker."""
        return len(self._line) > 1

    def __str__(self) -> str:
        """For the log."""
        groups = [list(cell.members) for cell in self._line if cell is not self._innocent]
        shown = "; ".join(", ".join(group[:4]) + ", …" * (len(group) > 4) for group in groups[:4])
        more = " and others" * (len(groups) > 4)
        counts = f"{len(self._cells)} request(s) in {len(groups)} group(s)"
        return f"{counts}: {shown}{more}"

    def turns(self) -> list[Cell | None]:
        """The cells by turn: each is tried if those before have nothing to compute. None = all
        requests."""
        return [*self._line] if self.is_active else [None]

    def cell_of(self, request: Request) -> Cell:
        """The cell of the request and its siblings."""
        return self._cells.get(request.request_id, self._innocent)

    def end_turn(self, request: Request) -> None:
        """Moves the cell of a request that was planned behind all others."""
        if self.is_active:
            cell = self.cell_of(request)
            self._line.remove(cell)
            self._line.append(cell)

    def blame(self, computed: Iterable[tuple[Request, int]], tries_alone: int = 2) -> list[str]:
        """Suspects the requests of a failed step, each given with its tokens after the step.

        `tries_alone`: consecutive failures of this kind, alone, that prove guilt. Returns the ids
        of the guilty; they stay suspected until they end.
        """
        blamed: dict[Cell, dict[str, None]] = {}
        for request, end in sorted(computed, key=lambda pair: pair[0].ticket):
            if request.state is RequestState.FINISHED:
                continue
            members = blamed.setdefault(self.cell_of(request), {})
            if request.request_id not in members:
                members[request.request_id] = None
                self._suspect(request)
            record = self._records[request.request_id]
            record.goals[request] = end + DISTANCE * record.num_suspicions
        guilty: list[str] = []
        for cell, members in blamed.items():
            guilty += self._split(cell, list(members), tries_alone)
        return guilty

    def record_progress(self, computed: Iterable[tuple[Request, int]]) -> None:
        """Clears the suspects that a returned step has taken past their goals."""
        for request, end in computed:
            record = self._records.get(request.request_id)
            if record is not None and end >= record.goals.get(request, end + 1):
                self._reached(request, record)

    def remove(self, request: Request, is_last: bool) -> None:
        """Drops a request or sibling that has ended, perhaps the last of its family."""
        record = self._records.get(request.request_id)
        if record is None:
            return
        if request in record.goals:
            self._reached(request, record)
        if is_last:
            self._clear(request.request_id)
            del self._records[request.request_id]

    def _suspect(self, request: Request) -> None:
        """Adds a suspicion against a family, less those that PEACE has cancelled."""
        length = len(request.token_ids)
        record = self._records.setdefault(request.request_id, _Record(0, length))
        num_cancelled = max(0, length - record.length) // PEACE
        record.num_suspicions = max(0, record.num_suspicions - num_cancelled) + 1
        record.length = length

    def _reached(self, request: Request, record: _Record) -> None:
        del record.goals[request]
        if not record.goals:
            self._clear(request.request_id)

    def _clear(self, request_id: str) -> None:
        cell = self._cells.pop(request_id, None)
        if cell is not None:
            del cell.members[request_id]
            if not cell.members:
                self._line.remove(cell)

    def _split(self, cell: Cell, blamed: list[str], tries_alone: int) -> list[str]:
        """Moves the members of a failed step out of their cell, to be tried next. Returns the
        guilty."""
        num_failures = cell.num_failures + 1
        guilt = cell.guilt + Fraction(1, tries_alone) if len(blamed) == 1 else Fraction(0)
        if guilt >= 1:
            return blamed
        half = len(blamed) if num_failures < TRIES_TOGETHER else (len(blamed) + 1) // 2
        for request_id in blamed:
            self._clear(request_id)
        for members in (blamed[half:], blamed[:half]):
            if members:
                new = Cell(num_failures, guilt, dict.fromkeys(members))
                self._cells.update(dict.fromkeys(members, new))
                self._line.insert(0, new)
        return []
