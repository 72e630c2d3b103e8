"""Requests that wait for a row, in order.

A heap with lazy deletion: adding costs O(log n), removing O(1), and reading the first k, all that a
step does, O(k log k), however many wait behind them.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from scheduler_svc.core.request import Request


class PendingQueue:
    """An ordered set of requests. Not a FIFO: a preempted request returns to its old place."""

    def __init__(self) -> None:
        # key: (urgency, ticket, serial). The unique serial tells an entry from removed ones of the
        # same request, and keeps requests from being compared
        self._heap: list[tuple[tuple[int, int, int], Request]] = []
        self._live: dict[int, int] = {}  # ticket → serial
        self._next_serial = 0

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, request: Request) -> bool:
        return request.ticket in self._live

    def add(self, request: Request, urgency: int = 0) -> None:
        """Inserts a request by urgency (lower first), then by arrival."""
        assert request not in self, f"{request.name} is already waiting"
        self._live[request.ticket] = self._next_serial
        key = (urgency, request.ticket, self._next_serial)
        self._next_serial += 1
        heapq.heappush(self._heap, (key, request))

    def remove(self, request: Request) -> None:
        """Removes a waiting request."""
        del self._live[request.ticket]
        if len(self._heap) > 2 * len(self._live) + 64:
            self._heap = [entry for entry in self._heap if self._is_live(*entry)]
            heapq.heapify(self._heap)
        while self._heap and not self._is_live(*self._heap[0]):
            heapq.heappop(self._heap)

    def in_order(self) -> Iterator[Request]:
        """The requests, first to last, read lazily; the queue must not change meanwhile."""
        frontier = [(self._heap[0][0], 0)] if self._heap else []
        while frontier:
            key, place = heapq.heappop(frontier)
            request = self._heap[place][1]
            if self._is_live(key, request):
                yield request
            for child in (2 * place + 1, 2 * place + 2):
                if child < len(self._heap):
                    heapq.heappush(frontier, (self._heap[child][0], child))

    def _is_live(self, key: tuple[int, int, int], request: Request) -> bool:
        return self._live.get(request.ticket) == key[2]
