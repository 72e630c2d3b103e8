"""The limits of a step, and the geometry of the KV memory that it uses."""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass
from typing import Final

from protos.link import FULL_ATTENTION as FULL_ATTENTION
from protos.link import SLIDING_ATTENTION as SLIDING_ATTENTION
from protos.plan import NUM_RESERVED_CHUNKS


@dataclass(frozen=True, slots=True)
class Limits:
    """What one step may use. Counts are positive unless said otherwise."""

    max_batch_tokens: int  # tokens computed in one step
    max_requests_per_batch: int  # requests in one step; also the number of rows
    cache_budget: int = 0  # pages read in one step, shared ones once; 0 = no limit
    safety_margin: float = 0.15  # share of blocks that must be free for a prefill to join
    max_plans_in_flight: int = 1  # plans without a result; 2 = run-ahead
    allow_block_sharing: bool = True  # the prefix cache
    target_step_ms: float | None = 0.0  # 0 = no target; None = the device's default (step_time.py)

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
        if self.target_step_ms is not None and not 0 <= self.target_step_ms < math.inf:
            raise ValueError(f"target_step_ms is {self.target_step_ms}; allowed: at least 0")


@dataclass(frozen=True, slots=True)
class GroupGeometry:
    """One cache group: layers of one attention type that share one block table."""

    kind: str
    num_layers: int
    blocks_per_chunk: int
    sliding_window: int = 0  # 0 for full attention; counts the current token


@dataclass(frozen=True, slots=True)
class Geometry:
    """The KV memory of a worker, as its Ready reports it."""

    page_size: int  # tokens of one layer's KV in one page
    num_chunks: int  # including the two reserved ones
    chunk_bytes: int
    groups: tuple[GroupGeometry, ...]
    max_model_len: int  # prompt + output tokens of one request
    num_swap_chunks: int = 0
    overlaps_swap: bool = False  # swap-outs run beside the forward, until the plan's result
    device: str = ""  # as torch names it: "cpu", "cuda:0"
    max_logits: int = (
        0  # tokens of one step whose logits can be computed; at least rows, or 0 = all
    )

    @property
    def usable_chunks(self) -> int:
        """Chunks of the pool that are not reserved."""
        return max(0, self.num_chunks - NUM_RESERVED_CHUNKS)

    def chunks_at_most(
        self, num_tokens: int, is_reserved: bool = False, num_beams: int = 1, num_prompt: int = 0
    ) -> int:
        """Most chunks that a request of `num_tokens` tokens holds, alone and one token a step; with
        `is_reserved`, it holds all of its pages from the start, out of the window too. Beams share
        the full pages of `num_prompt` tokens; in a window they may share none."""
        chunks = 0
        for group in self.groups:
            pages, shared = -(-num_tokens // self.page_size), num_prompt // self.page_size
            if group.sliding_window and not is_reserved:
                pages = min(pages, -(-group.sliding_window // self.page_size) + 1)
                is_ragged = int(group.blocks_per_chunk > 1)  # may start inside a chunk
                chunks += num_beams * (-(-pages // group.blocks_per_chunk) + is_ragged)
            else:
                shared = min(shared, pages)
                blocks = shared + num_beams * (pages - shared)
                chunks += -(-blocks // group.blocks_per_chunk)
        return chunks

    def pool_tokens(
        self, is_reserved: bool = False, num_beams: int = 1, num_prompt: int = 0
    ) -> int:
        """Tokens of the longest request that fits the pool and max_model_len; of each beam, if a
        prompt of `num_prompt` tokens is searched with more than one."""
        if not self.groups:
            return 0
        lengths = range(1, self.max_model_len + 1)
        return bisect.bisect_right(
            lengths,
            self.usable_chunks,
            key=lambda n: self.chunks_at_most(n, is_reserved, num_beams, num_prompt),
        )


NO_MEMORY: Final = Geometry(page_size=1, num_chunks=2, chunk_bytes=0, groups=(), max_model_len=0)


def longest_request(max_model_len: int, pool_tokens: int, num_beams: int = 1) -> tuple[int, str]:
    """Most tokens of prompt and answer together, and the reason for the limit, for messages."""
    if pool_tokens < max_model_len:
        each = f" of each of {num_beams} beams" if num_beams > 1 else ""
        return pool_tokens, f"the whole KV pool holds {pool_tokens} tokens{each}"
    return max_model_len, f"max_model_len is {max_model_len}"


def why_never_fits(
    prompt_tokens: int, max_tokens: int, max_model_len: int, pool_tokens: int, num_beams: int = 1
) -> str | None:
    """Why a request cannot fit an empty pool, with both numbers; None if it can. `pool_tokens` are
    those of each beam, if there are more than one."""
    longest, bound = longest_request(max_model_len, pool_tokens, num_beams)
    total = prompt_tokens + max_tokens
    if total <= longest:
        return None
    return f"prompt ({prompt_tokens} tokens) + max_tokens ({max_tokens}) is {total}; {bound}"
