"""A stand-in for a worker and its model, in numpy: it decodes real plans, and every token it
emits depends on the request's whole history *as read back through the block table*.

KV is one int64 per slot, filled with garbage. A token at position p stores

    h_p = mix(h_{p-1}, token_p)          h_{p-1} read through the table

and the token sampled there is mix(sum over j <= p of (2j + 1) h_j, u) mod vocab, each h_j again
read through the table; a sliding group sums over its window only. A wrong table, slot, length,
chunk edge, early reuse or swapped row thus changes a token, now or a few steps later.
`expected_tokens` computes the same from the request's tokens alone.

Where the geometry says that swap overlaps the forward, swap-out copies are made as late as is
legal: when the step's result is handed out (`finish`), which may be after the next step has
computed. A block that is reused too early is then swapped out with its new content.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from protos.plan import (
    PADDING_READ_CHUNK,
    UNKNOWN_TOKEN,
    StepPlan,
    StepResult,
    decode_plan,
    decode_result,
    encode_plan,
    encode_result,
)
from scheduler_svc.core.limits import Geometry
from scheduler_svc.core.seeds import streams, uniforms

_UInt64 = npt.NDArray[np.uint64]
_START = np.uint64(0x243F6A8885A308D3)


def _mix(a: _UInt64, b: _UInt64) -> _UInt64:
    with np.errstate(over="ignore"):
        x = (a ^ (b + np.uint64(0x9E3779B97F4A7C15))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(29))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(32))


class ShadowWorker:
    """Executes plans over `geometry`'s memory; vocabulary [0, vocab_size)."""

    def __init__(
        self, geometry: Geometry, num_rows: int, vocab_size: int, garbage_seed: int = 0
    ) -> None:
        self.vocab_size = vocab_size
        self.page_size = geometry.page_size
        garbage = np.random.default_rng(garbage_seed)
        self.kv = [
            garbage.integers(
                1,
                2**63,
                geometry.num_chunks * group.blocks_per_chunk * geometry.page_size,
                dtype=np.uint64,
            )
            for group in geometry.groups
        ]
        self.swap = [
            garbage.integers(
                1,
                2**63,
                (geometry.num_swap_chunks * group.blocks_per_chunk, geometry.page_size),
                dtype=np.uint64,
            )
            for group in geometry.groups
        ]
        self.windows = [group.sliding_window for group in geometry.groups]
        self.reserved = [2 * group.blocks_per_chunk for group in geometry.groups]
        self.most_tokens = 1 << 30  # of a request in the plans in flight: bounds sliding tables
        self.last_token = np.full(num_rows, UNKNOWN_TOKEN, np.int32)
        self.last_step = -1
        self.overlaps_swap = geometry.overlaps_swap
        # (step_id, group, block, swap block) of copies that are still to be made
        self.late_copies: list[tuple[int, int, int, int]] = []

    def step(self, plan: StepPlan) -> StepResult:
        """Runs a plan, after taking it over the wire and before sending the result back."""
        plan = decode_plan(plan.step_id, plan.awaits_mask, *encode_plan(plan))
        result = self._step(plan)
        return decode_result(
            result.step_id,
            result.device_microseconds,
            result.queue_microseconds,
            *encode_result(result),
        )

    def finish(self, step_id: int) -> None:
        """The step's result is on its way: the copies of this step and those before are made."""
        self._copy_late([copy for copy in self.late_copies if copy[0] <= step_id])

    def _copy_late(self, copies: list[tuple[int, int, int, int]]) -> None:
        for copy in copies:
            _, group, block, swap_block = copy
            page = self.kv[group].reshape(-1, self.page_size)[block]
            self.swap[group][swap_block] = page
            self.late_copies.remove(copy)

    def _step(self, plan: StepPlan) -> StepResult:
        assert plan.step_id == self.last_step + 1, (plan.step_id, self.last_step)
        self.last_step = plan.step_id
        self._move(plan)
        counts = np.diff(plan.query_start_loc)
        assert (counts > 0).all()
        assert len(set(plan.rows.tolist())) == len(plan.rows), "a row twice in one step"
        self.last_token[plan.init_rows] = UNKNOWN_TOKEN
        tokens = plan.token_ids.copy()
        row_of_token = np.repeat(plan.rows, counts)
        unknown = tokens == UNKNOWN_TOKEN
        tokens[unknown] = self.last_token[row_of_token[unknown]]
        assert ((tokens >= 0) & (tokens < self.vocab_size)).all(), "a token that nobody sampled"

        place = np.searchsorted(plan.query_start_loc, plan.logits_indices, side="right") - 1
        # [L] tokens of the request up to the one whose logits are wanted
        ends = plan.seq_lens[place] - plan.query_start_loc[1:][place] + plan.logits_indices + 1
        assert len(set(plan.logits_indices.tolist())) == len(plan.logits_indices)
        sums = None
        for group, kv in enumerate(self.kv):
            seen = self._attend(plan, group, kv, tokens, counts, place, ends)
            sums = seen if sums is None else _mix(sums, seen)
        assert sums is not None
        sampled_place = place[plan.sample_logits]
        forked = plan.rows[sampled_place] != plan.sample_rows
        assert set(plan.sample_rows[forked].tolist()) <= set(plan.init_rows.tolist())
        assert not set(plan.sample_rows[forked].tolist()) & set(plan.rows.tolist())
        token_ids = choose(
            sums[plan.sample_logits], plan.u, plan.sampling["temperature"], self.vocab_size
        )
        self.last_token[plan.sample_rows] = token_ids
        return StepResult(
            step_id=plan.step_id,
            device_microseconds=0,
            queue_microseconds=0,
            token_ids=token_ids,
            is_finite=np.ones(len(plan.rows), np.int32),
        )

    def _move(self, plan: StepPlan) -> None:
        """Swap and copy pairs, in the plan's order."""
        pages = [kv.reshape(-1, self.page_size) for kv in self.kv]
        targets = [(group, swap_block) for group, _, swap_block in plan.swap_out.tolist()]
        assert len(set(targets)) == len(targets), "one swap block is written twice"
        self.late_copies += [(plan.step_id, *triple) for triple in plan.swap_out.tolist()]
        if not self.overlaps_swap:
            self.finish(plan.step_id)
        # what is swapped in must have come out before
        wanted = {(group, swap_block) for group, swap_block, _ in plan.swap_in.tolist()}
        self._copy_late([copy for copy in self.late_copies if (copy[1], copy[3]) in wanted])
        for group, swap_block, block in plan.swap_in.tolist():
            assert block >= self.reserved[group]
            pages[group][block] = self.swap[group][swap_block]
        for group, source, target in plan.copy.tolist():
            assert min(source, target) >= self.reserved[group]
            pages[group][target] = pages[group][source]

    def _attend(
        self,
        plan: StepPlan,
        group: int,
        kv: _UInt64,
        tokens: npt.NDArray[np.int32],
        counts: npt.NDArray[np.int32],
        place: npt.NDArray[np.intp],
        ends: npt.NDArray[np.int32],
    ) -> _UInt64:
        """Writes the step's history, and reads that of the rows `place` back up to `ends`: a sum
        for each of them. place, ends and result [L]"""
        start = plan.table_start[group]
        assert (plan.blocks[start[0] : start[-1]] >= self.reserved[group]).all(), "reserved block"
        first_position = plan.first_positions[group]
        assert (first_position % self.page_size == 0).all()
        assert (np.diff(start) * self.page_size + first_position >= plan.seq_lens).all(), "short"
        window = self.windows[group]
        if window:
            # never more pages than the window and the tokens in flight need
            most = -(-(window - 1 + self.most_tokens) // self.page_size) + 1
            assert (np.diff(start) <= most).all(), "a sliding table keeps what nobody reads"
        else:
            assert (first_position == 0).all()
        # slots of every position of every row, in order of position: [sum of table lengths, page]
        slots = (
            plan.blocks[start[0] : start[-1], None].astype(np.int64) * self.page_size
            + np.arange(self.page_size)
        ).reshape(-1)
        # [R] into slots, of the request's position 0 (which may be cut off)
        base = (start[:-1] - start[0]).astype(np.int64) * self.page_size - first_position
        first = plan.seq_lens - counts
        for turn in range(int(counts.max(initial=0))):
            active = np.flatnonzero(counts > turn)
            position = first[active] + turn
            assert (position - 1 >= first_position[active] - (position == 0)).all()
            before = kv[
                slots[base[active] + np.where(position == 0, first_position[active], position - 1)]
            ]
            before = np.where(position == 0, _START, before)
            token = tokens[plan.query_start_loc[active] + turn].astype(np.uint64)
            kv[slots[base[active] + position]] = _mix(before, token)
        assert (first_position <= np.maximum(first - window + 1, 0)).all() or not window
        if not len(ends):
            return np.zeros(0, np.uint64)
        read_from = np.maximum(ends - window, 0) if window else np.zeros_like(ends)
        lengths = (ends - read_from).astype(np.int64)
        row = np.repeat(place, lengths)
        position = np.arange(len(row)) - np.repeat(
            np.cumsum(lengths) - lengths - read_from, lengths
        )
        with np.errstate(over="ignore"):
            terms = kv[slots[base[row] + position]] * (2 * position + 1).astype(np.uint64)
            return np.add.reduceat(terms, np.cumsum(lengths) - lengths)

    def check_reserved(self, pristine: list[_UInt64]) -> None:
        """Nothing may have written to what padding reads."""
        for kv, before in zip(self.kv, pristine, strict=True):
            size = len(before) * (PADDING_READ_CHUNK + 1)
            assert (kv[:size] == before).all()


def choose(
    sums: _UInt64, u: npt.NDArray[np.float32], temperature: npt.NDArray[np.float32], vocab: int
) -> npt.NDArray[np.int32]:
    """The sampled tokens; greedy rows do not look at u. [n]"""
    grain = np.where(temperature > 0, u.astype(np.float64) * 2.0**24, 0).astype(np.uint64)
    return (_mix(sums, grain) % np.uint64(vocab)).astype(np.int32)


def expected_tokens(
    prompts: Sequence[Sequence[int]],
    max_tokens: Sequence[int],
    vocab_size: int,
    temperature: Sequence[float] | None = None,
    seeds: Sequence[int] | None = None,
    stop_token_ids: Sequence[frozenset[int]] | None = None,
    windows: Sequence[int] = (0,),
    siblings: Sequence[int] | None = None,
) -> list[list[int]]:
    """What each request must produce, from its own tokens alone; all of them side by side."""
    n = len(prompts)
    longest = max(len(p) + m for p, m in zip(prompts, max_tokens, strict=True))
    tokens = np.zeros((n, longest), np.uint64)
    prompt_len = np.array([len(prompt) for prompt in prompts])
    for i, prompt in enumerate(prompts):
        tokens[i, : len(prompt)] = prompt
    limit = prompt_len + np.array(max_tokens)
    heat = np.array(temperature if temperature is not None else [0.0] * n, np.float32)
    seed = np.array(seeds if seeds is not None else [0] * n, np.uint64)
    sibling = np.array(siblings if siblings is not None else [0] * n, np.uint64)
    stream = streams(seed, sibling)
    history = np.full(n, _START, np.uint64)
    totals = [np.zeros(n, np.uint64) for _ in windows]
    terms: list[_UInt64] = []
    for position in range(longest - 1):
        active = position < limit - 1
        history = np.where(active, _mix(history, tokens[:, position]), history)
        with np.errstate(over="ignore"):
            terms.append(history * np.uint64(2 * position + 1))
            for group, window in enumerate(windows):
                totals[group] = totals[group] + terms[-1]
                if window and position >= window:
                    totals[group] = totals[group] - terms[position - window]
        sums = totals[0]
        for total in totals[1:]:
            sums = _mix(sums, total)
        samples = active & (position >= prompt_len - 1)
        u = uniforms(stream, np.full(n, position + 1))
        tokens[samples, position + 1] = choose(sums, u, heat, vocab_size)[samples]
    outputs = []
    for i in range(n):
        output = tokens[i, prompt_len[i] : limit[i]].astype(np.int64).tolist()
        stops = stop_token_ids[i] if stop_token_ids is not None else frozenset()
        for end, token in enumerate(output):
            if token in stops:
                output = output[: end + 1]
                break
        outputs.append(output)
    return outputs
