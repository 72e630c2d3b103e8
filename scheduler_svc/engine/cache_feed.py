"""Events of the prefix cache, from the engine's thread to those who route requests by it.

A subscription begins with what the cache holds, then follows every change. Nothing is recorded
before the first subscription, so that serving without a gateway pays nothing; blocks that were
stored before it are never reported. A subscriber that reads too slowly loses its backlog and begins
anew.

`forward` and `begin` belong to the engine's thread, a subscription to the event loop's.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Final

from scheduler_svc.core.memory.cache_events import CacheEvent, Cleared
from scheduler_svc.core.state import State

MAX_BACKLOG: Final = 1 << 16  # events that a subscriber has not read


class Subscription:
    """What one subscriber has not read yet."""

    def __init__(self) -> None:
        self.is_behind = False  # events were lost: subscribe again
        self._loop = asyncio.get_running_loop()
        self._events: deque[CacheEvent] = deque()
        self._news = asyncio.Event()

    def offer(self, events: Sequence[CacheEvent]) -> None:
        """Called in the engine's thread."""
        self._loop.call_soon_threadsafe(self._put, events)

    def _put(self, events: Sequence[CacheEvent]) -> None:
        if len(self._events) + len(events) > MAX_BACKLOG and self._events:
            self.is_behind = True
            self._events.clear()
        if not self.is_behind:
            self._events.extend(events)
        self._news.set()

    async def next(self) -> list[CacheEvent]:
        """All events that have come, as soon as there are any; none if it is behind."""
        while not self._events and not self.is_behind:
            self._news.clear()
            await self._news.wait()
        events = list(self._events)
        self._events.clear()
        return events


class CacheFeed:
    """Distributes the prefix cache's events to the subscribers."""

    def __init__(self) -> None:
        self._subscriptions: list[Subscription] = []

    def begin(self, state: State, subscription: Subscription) -> None:
        """Adds a subscriber, who gets what the cache holds first."""
        events = state.listen_to_cache()
        self.forward(state)
        self._subscriptions.append(subscription)
        subscription.offer([Cleared(), *events.stored.values()])

    def end(self, subscription: Subscription) -> None:
        self._subscriptions.remove(subscription)

    def forward(self, state: State) -> None:
        """Passes on what has happened since the last call."""
        if state.cache_events is None:
            return
        events = state.cache_events.take()
        if events:
            for subscription in self._subscriptions:
                subscription.offer(events)
