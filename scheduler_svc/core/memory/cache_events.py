"""What the prefix cache stores and drops, recorded for those who route requests by it."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler_svc.core.memory.block_names import Name


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """A full block that requests can share from now on."""

    name: Name
    parent: Name | None  # of the block before it; None for the first of a prompt
    token_ids: tuple[int, ...]  # [page_size]


@dataclass(frozen=True, slots=True)
class RemovedBlock:
    name: Name


@dataclass(frozen=True, slots=True)
class Cleared:
    """All blocks are gone."""


CacheEvent = StoredBlock | RemovedBlock | Cleared


class CacheEvents:
    """Follows the blocks of one cache group; made when somebody listens for the first time."""

    def __init__(self) -> None:
        self.stored: dict[Name, StoredBlock] = {}  # in the cache now; parents come first
        self._new: list[CacheEvent] = []

    def store(self, block: StoredBlock) -> None:
        self.stored[block.name] = block
        self._new.append(block)

    def remove(self, name: Name) -> None:
        if self.stored.pop(name, None) is not None:
            self._new.append(RemovedBlock(name))

    def clear(self) -> None:
        self.stored.clear()
        self._new = [Cleared()]

    def take(self) -> list[CacheEvent]:
        """The events since the last call."""
        events, self._new = self._new, []
        return events
