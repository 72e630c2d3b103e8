"""The numbers that bound a step, and the shape of the KV memory they apply to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

FULL_ATTENTION: Final = "full_attention"


@dataclass(frozen=True, slots=True)
class Limits:
    """What one step may use. All counts are positive unless said."""

    max_batch_tokens: int  # tokens computed in one step
    max_requests_per_batch: int  # requests in one step; also the number of rows
    cache_budget: int = 0  # pages read in one step; 0 = as many as the pool has blocks
    safety_margin: float = 0.15  # share of blocks that must be free for a prefill to join
    max_plans_in_flight: int = 1  # plans without a result; 2 = run ahead

    def __post_init__(self) -> None:
        if not 1 <= self.max_requests_per_batch <= self.max_batch_tokens:
            raise ValueError(
                f"max_requests_per_batch is {self.max_requests_per_batch}; allowed: 1 to "
                f"max_batch_tokens ({self.max_batch_tokens}), so that every decoding request "
                "finds a place in a step"
            )
        if not 0 <= self.safety_margin < 1:
            raise ValueError(f"safety_margin is {self.safety_margin}; allowed: 0 <= margin < 1")
        if self.max_plans_in_flight not in (1, 2):
            raise ValueError(f"max_plans_in_flight is {self.max_plans_in_flight}; allowed: 1, 2")


@dataclass(frozen=True, slots=True)
class GroupGeometry:
    """One cache group: layers of one attention type that share one block table."""

    kind: str
    num_layers: int
    blocks_per_chunk: int


@dataclass(frozen=True, slots=True)
class Geometry:
    """The KV memory that a worker has, as its Ready says."""

    page_size: int  # tokens of one layer's KV in one page
    num_chunks: int  # the two reserved ones included
    chunk_bytes: int
    groups: tuple[GroupGeometry, ...]
    max_model_len: int  # prompt + output tokens of one request

    @property
    def usable_chunks(self) -> int:
        return max(0, self.num_chunks - 2)

    @property
    def pool_tokens(self) -> int:
        """Tokens of one request that alone fills the pool."""
        if not self.groups:
            return 0
        blocks = self.usable_chunks * min(group.blocks_per_chunk for group in self.groups)
        return blocks * self.page_size // len(self.groups)


NO_MEMORY: Final = Geometry(page_size=1, num_chunks=2, chunk_bytes=0, groups=(), max_model_len=0)
