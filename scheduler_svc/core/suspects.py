"""Which requests may share a step while it is not known whose fault a failed step was.

The live requests are parted into cells; a step computes requests of one cell, and the cells take
turns. While all is well there is one cell, and it is everybody's. When a step fails, those that it
computed become a cell of their own and run again; if that fails too, in halves, then alone. Who
fails alone twice in a row is guilty: a fault that passes may hit anybody once. Where it is less
than sure that the step was the cause (a worker may die of anything), each failure counts for less.

So k guilty requests among n cost about k * log2(n) failed steps. Nobody is blamed for what shared
a step with others, newcomers least of all, and everybody else goes on meanwhile.

A suspect is cleared once it has got past the place where the step failed: by two tokens at first,
by two more after each further failure that it is suspected of, by fewer again as it goes on in
peace. The growing distance keeps apart what fails only together (a step too big for the device's
memory, say), which nobody is guilty of. A request and its siblings are one suspect.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Final

from scheduler_svc.core.request import Request, RequestState

TRIES_TOGETHER: Final = 2  # failures after which a cell is split
DISTANCE: Final = 2  # tokens past the failure, for each suspicion, after which one is cleared
PEACE: Final = 64  # tokens without a failure that make up for one suspicion


@dataclass(slots=True, eq=False)
class Cell:
    """Requests that may share a step."""

    num_failures: int = 0  # failed steps in a row that all of its members were in
    guilt: Fraction = Fraction(0)  # of its only member, by the last of them; 1 = proved
    members: dict[str, None] = field(default_factory=dict)  # request ids, by arrival


@dataclass(slots=True)
class _Record:
    """What is held against a request that was in failed steps."""

    num_suspicions: int
    length: int  # tokens of its longest sibling when it was last suspected
    # where each sibling is to get to: the end, in tokens, of a step that came back
    goals: dict[Request, int] = field(default_factory=dict)


class Suspects:
    """The cells, the next one's turn first. Everybody who is not suspected is in one of them."""

    def __init__(self) -> None:
        self._innocent = Cell()  # its members are not listed
        self._line = [self._innocent]
        self._cells: dict[str, Cell] = {}  # request_id → cell, of suspects only
        self._records: dict[str, _Record] = {}  # of live requests that are or were suspected

    @property
    def is_active(self) -> bool:
        """Whether anybody is suspected. Then one plan at a time may be in flight: of two, nobody
        could say which one killed the worker."""
        return len(self._line) > 1

    def __str__(self) -> str:
        """For the log."""
        groups = [list(cell.members) for cell in self._line if cell is not self._innocent]
        shown = "; ".join(", ".join(group[:4]) + ", …" * (len(group) > 4) for group in groups[:4])
        more = " and others" * (len(groups) > 4)
        counts = f"{len(self._cells)} request(s) in {len(groups)} group(s)"
        return f"{counts}: {shown}{more}"

    def turns(self) -> list[Cell | None]:
        """Whose turn it is, first to last, if those before have nothing to compute; None stands
        for everybody."""
        return [*self._line] if self.is_active else [None]

    def cell_of(self, request: Request) -> Cell:
        return self._cells.get(request.request_id, self._innocent)

    def took_turn(self, request: Request) -> None:
        """A step was planned that computes the request, and others of its cell."""
        if self.is_active:
            cell = self.cell_of(request)
            self._line.remove(cell)
            self._line.append(cell)

    def blame(self, computed: Iterable[tuple[Request, int]], tries_alone: int = 2) -> list[str]:
        """A step has failed that computed these requests, each up to so many of its tokens.

        `tries_alone`: how many failures of this kind in a row, alone, prove that one is guilty.
        Returns the ids of the guilty; they are suspected until they end.
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
            guilty += self._part(cell, list(members), tries_alone)
        return guilty

    def came_back(self, computed: Iterable[tuple[Request, int]]) -> None:
        """The result of a step is there: these requests have got so far."""
        for request, end in computed:
            record = self._records.get(request.request_id)
            if record is not None and end >= record.goals.get(request, end + 1):
                self._reached(request, record)

    def ended(self, request: Request, is_last: bool) -> None:
        """A request or sibling has ended, the last of its family or not."""
        record = self._records.get(request.request_id)
        if record is None:
            return
        if request in record.goals:
            self._reached(request, record)
        if is_last:
            self._clear(request.request_id)
            del self._records[request.request_id]

    def _suspect(self, request: Request) -> None:
        """One more suspicion against a family, less what it has made up for."""
        length = len(request.token_ids)
        record = self._records.setdefault(request.request_id, _Record(0, length))
        made_up = max(0, length - record.length) // PEACE
        record.num_suspicions = max(0, record.num_suspicions - made_up) + 1
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

    def _part(self, cell: Cell, blamed: list[str], tries_alone: int) -> list[str]:
        """Takes those of a cell that were in a failed step out of it, to be tried next; the ids
        of the guilty."""
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
