"""Events of the prefix cache as KvEventBatch messages."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

from smg_grpc_proto.generated import common_pb2 as common

from scheduler_svc.core.memory.cache_events import CacheEvent, Cleared, RemovedBlock, StoredBlock

MAX_EVENTS: Final = 1024  # in one message


def batches(events: Sequence[CacheEvent], page_size: int) -> Iterator[Any]:
    """Messages without a sequence number, in order."""
    for start in range(0, len(events), MAX_EVENTS):
        batch = common.KvEventBatch(timestamp=time.time(), dp_rank=0)
        for event in events[start : start + MAX_EVENTS]:
            _write(batch.events.add(), event, page_size)
        yield batch


def _write(message: Any, event: CacheEvent, page_size: int) -> None:
    match event:
        case Cleared():
            message.cleared.SetInParent()
        case RemovedBlock():
            message.removed.block_hashes.append(folded(event.name))
        case StoredBlock():
            stored = message.stored
            stored.blocks.add(
                block_hash=folded(event.name), token_ids=event.token_ids, block_size=page_size
            )
            if event.parent is not None:
                stored.parent_block_hash = folded(event.parent)


def folded(name: bytes) -> int:
    """A block's name in the 64 bits of that API."""
    return int.from_bytes(name[:8], "little", signed=True)
