"""The reference backend: gathers each request's keys, then plain attention. Any device and dtype.

The oracle for the other backends, and the fallback where they cannot run. It goes request by
request, because SDPA over a padded batch is far slower. Masks are explicit: SDPA's `is_causal`
aligns top-left, which is wrong for a chunk that continues a prompt.
"""

from __future__ import annotations

from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from worker.attention.interface import AttentionCall, StepContext

# Scores computed at once, over all heads: bounds the memory of a long chunk (step_memory.py).
MOST_SCORES: Final = 2**24


class ReferenceBackend:
    name = "reference"

    def begin_step(self, step: StepContext) -> None:
        if step.on_host is None:
            raise RuntimeError("the reference attention loops on the host: it cannot be captured")
        self._step = step

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall) -> Tensor:
        on_host, (index, pages) = self._step.on_host, self._step.pool.layer_views(call.layer)
        assert on_host is not None
        write(key, value, pages, self._step.groups[index].slot_mapping)
        group = on_host.groups[index]
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        starts = on_host.query_start_loc.tolist()
        table_start = group.table_start.tolist()
        blocks = torch.from_numpy(group.blocks).to(pages.device)
        for r, seq_len in enumerate(on_host.seq_lens.tolist()):
            if starts[r] == starts[r + 1]:
                continue
            first = int(group.first_positions[r])
            table = blocks[table_start[r] : table_start[r + 1]]
            keys, values = (
                found.to(query.dtype) for found in gather(pages, table, seq_len - first)
            )
            queries = max(1, MOST_SCORES // (query.shape[1] * keys.shape[1]))
            for begin in range(starts[r], starts[r + 1], queries):
                end = min(begin + queries, starts[r + 1])
                seen = seq_len - (starts[r + 1] - end)
                out[begin:end] = attend_one(
                    query[begin:end],
                    keys[:, : seen - first],
                    values[:, : seen - first],
                    first,
                    seen,
                    call,
                )
        return out


def write(key: Tensor, value: Tensor, pages: Tensor, slot_mapping: Tensor) -> None:
    """Writes key and value [T, Hkv, D] into the slots [T], rounded to the dtype of the pages."""
    page_size = pages.shape[3]
    blocks = torch.div(slot_mapping, page_size, rounding_mode="floor")
    places = slot_mapping % page_size
    pages[:, 0][blocks, :, places] = key.to(pages.dtype)
    pages[:, 1][blocks, :, places] = value.to(pages.dtype)


def gather(pages: Tensor, table: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Keys and values [Hkv, num_tokens, D] from the blocks [B] of a table."""
    page_size = pages.shape[3]
    needed = (num_tokens + page_size - 1) // page_size
    found = pages[table[:needed].long()]  # [blocks, 2, Hkv, page, D]
    found = found.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :num_tokens]
    return found[0], found[1]


def attend_one(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    first_position: int,
    seq_len: int,
    call: AttentionCall,
) -> Tensor:
    """One request: query [q, H, D] at the last q positions before seq_len; keys and values
    [Hkv, n, D] from first_position on. -> [q, H, D]."""
    num_queries = query.shape[0]
    position = torch.arange(seq_len - num_queries, seq_len, device=query.device)[:, None]
    key_position = torch.arange(first_position, seq_len, device=query.device)[None]
    visible = key_position <= position
    if call.sliding_window:
        visible &= key_position > position - call.sliding_window
    if call.softcap or call.sinks is not None:
        return _attend_explicitly(query, keys, values, visible, call)
    heads_first = query.transpose(0, 1)
    attended = F.scaled_dot_product_attention(
        heads_first[None],
        keys[None],
        values[None],
        attn_mask=visible,
        scale=call.scaling,
        enable_gqa=keys.shape[0] != heads_first.shape[0],
    )
    return attended[0].transpose(0, 1)


def _attend_explicitly(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: Tensor,
    call: AttentionCall,
) -> Tensor:
    """What SDPA cannot do: capped scores, and a sink that takes weight but has no value."""
    grouped = query.shape[1] // keys.shape[0]
    keys, values = (tensor.repeat_interleave(grouped, dim=0) for tensor in (keys, values))
    wide = torch.promote_types(query.dtype, torch.float32)
    scores = query.transpose(0, 1).to(wide) @ keys.transpose(1, 2).to(wide) * call.scaling
    if call.softcap:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    scores = scores.masked_fill(~visible, float("-inf"))
    if call.sinks is not None:
        sinks = call.sinks.to(wide)[:, None, None].expand(-1, scores.shape[1], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = scores.softmax(dim=-1)[..., : keys.shape[1]]
    return (weights @ values.to(wide)).transpose(0, 1).to(query.dtype)
