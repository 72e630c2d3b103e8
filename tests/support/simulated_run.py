"""A simulated run: what is given (`Setup`), and what came of it (`Outcome`)."""

from __future__ import annotations

from dataclasses import dataclass, field

from scheduler_svc.core.limits import (
    FULL_ATTENTION,
    SLIDING_ATTENTION,
    Geometry,
    GroupGeometry,
    Limits,
)
from scheduler_svc.core.request import FinishReason, TokenScore
from scheduler_svc.core.state import Counters

Key = tuple[str, int]  # request_id and index


@dataclass(frozen=True)
class Setup:
    """The memory and the limits of a run."""

    num_blocks: int = 64  # chunks, strictly speaking
    page_size: int = 4
    max_batch_tokens: int = 64
    max_requests: int = 8
    max_model_len: int = 128
    safety_margin: float = 0.15
    cache_budget: int = 0
    max_plans_in_flight: int = 1
    groups: tuple[tuple[int, int], ...] = ((0, 1),)  # (sliding window or 0, blocks per chunk)
    swap_chunks: int = 0
    overlaps_swap: bool = False
    allow_block_sharing: bool = True
    policy: str = "fifo"
    vocab_size: int = 50
    target_step_ms: float = 0.0  # then steps take random times
    max_logits: int = 0

    def geometry(self) -> Geometry:
        return Geometry(
            page_size=self.page_size,
            num_chunks=2 + self.num_blocks,
            chunk_bytes=64,
            groups=tuple(
                GroupGeometry(
                    SLIDING_ATTENTION if window else FULL_ATTENTION, 1, blocks_per_chunk, window
                )
                for window, blocks_per_chunk in self.groups
            ),
            max_model_len=self.max_model_len,
            num_swap_chunks=self.swap_chunks,
            overlaps_swap=self.overlaps_swap,
            max_logits=self.max_logits,
        )

    def limits(self) -> Limits:
        return Limits(
            max_batch_tokens=self.max_batch_tokens,
            max_requests_per_batch=self.max_requests,
            cache_budget=self.cache_budget,
            safety_margin=self.safety_margin,
            max_plans_in_flight=self.max_plans_in_flight,
            allow_block_sharing=self.allow_block_sharing,
            target_step_ms=self.target_step_ms,
        )


@dataclass
class Outcome:
    """What a run did."""

    steps: int = 0
    tokens: dict[Key, list[int]] = field(default_factory=dict)
    scores: dict[Key, list[TokenScore]] = field(default_factory=dict)
    prompt_scores: dict[Key, list[TokenScore]] = field(default_factory=dict)
    reasons: dict[Key, FinishReason] = field(default_factory=dict)
    beam_scores: dict[Key, float] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)
    cached_tokens: dict[Key, int] = field(default_factory=dict)
    counters: Counters = field(default_factory=Counters)
    forks: int = 0
    tail_copies: int = 0
    chunked_prefills: int = 0
    verified: int = 0  # guessed tokens
    rejected: int = 0
    masks: int = 0
    late_masks: int = 0  # of plans made before the tokens that they depend on were known
    histories: int = 0
    bans: int = 0
    scored: int = 0  # tokens of prompts
    mixed_steps: int = 0
    most_running: int = 0
    lost_workers: int = 0
    trace: list[bytes] = field(default_factory=list)
