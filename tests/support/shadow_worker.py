"""A stand-in for a worker and its model, in numpy: it decodes real plans, and every token it
emits depends on the request's whole history *as read back through the block table*.

KV is one int64 per slot, filled with garbage. A token at position p stores

    h_p = mix(h_{p-1}, token_p)          h_{p-1} read through the table

and the token sampled there is mix(sum over j <= p of (2j + 1) h_j, u) mod vocab, each h_j again
read through the table; a sliding group sums over its window only. A wrong table, slot, length,
chunk edge, early reuse or swapped row thus changes a token, now or a few steps later.
expected_answers.py computes the same from the request's tokens alone.

Where the geometry says that swap overlaps the forward, swap-out copies are made as late as is
legal: when the step's result is handed out (`finish`), which may be after the next step has
computed. A block that is reused too early is then swapped out with its new content.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from protos.plan import (
    ANY_TOKEN,
    NO_CANDIDATES,
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
from tests.support.shadow_model import (
    START,
    Context,
    Mask,
    UInt64,
    beam_candidates,
    choose,
    choose_in,
    mix,
    scores_of,
)


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

    def step(self, plan: StepPlan, masks: Mapping[int, Mask] | None = None) -> StepResult:
        """Runs a plan, after taking it over the wire and before sending the result back. `masks`:
        of samples, by index, if the plan awaits them."""
        assert plan.awaits_mask == (masks is not None)
        plan = decode_plan(plan.step_id, plan.awaits_mask, *encode_plan(plan))
        result = self._step(plan, masks or {})
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

    def _step(self, plan: StepPlan, masks: Mapping[int, Mask]) -> StepResult:
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
            sums = seen if sums is None else mix(sums, seen)
        assert sums is not None
        sampled_place = place[plan.sample_logits]
        forked = plan.rows[sampled_place] != plan.sample_rows
        assert set(plan.sample_rows[forked].tolist()) <= set(plan.init_rows.tolist())
        assert not set(plan.sample_rows[forked].tolist()) & set(plan.rows.tolist())
        token_ids = self._sample(plan, sums[plan.sample_logits], masks)
        self.last_token[plan.sample_rows] = token_ids
        reported = np.flatnonzero(plan.num_candidates != NO_CANDIDATES)
        scores = scores_of(
            np.concatenate([sums[plan.sample_logits[reported]], sums[plan.score_logits]]),
            np.concatenate([token_ids[reported], plan.score_tokens]).tolist(),
            np.concatenate([plan.num_candidates[reported], plan.score_candidates]).tolist(),
            self.vocab_size,
        )
        for report, sample in enumerate(reported.tolist()):
            if plan.is_beam[sample]:
                total, k = sums[plan.sample_logits[sample]], int(plan.num_candidates[sample])
                context = self._context(plan, sample, masks.get(sample))
                scores[report] = beam_candidates(context, int(total), k, self.vocab_size)
                token_ids[sample] = scores[report].token_id
        entries = [e for score in scores for e in ((score.token_id, score.logprob), *score.top)]
        return StepResult(
            step_id=plan.step_id,
            device_microseconds=0,
            queue_microseconds=0,
            token_ids=token_ids,
            is_finite=np.ones(len(plan.rows), np.int32),
            ranks=np.array([score.rank for score in scores], np.int32),
            candidate_ids=np.array([token_id for token_id, _ in entries], np.int32),
            logprobs=np.array([logprob for _, logprob in entries], np.float32),
        )

    def _sample(
        self, plan: StepPlan, sums: UInt64, masks: Mapping[int, Mask]
    ) -> npt.NDArray[np.int32]:
        temperature = plan.sampling["temperature"]
        token_ids = choose(sums, plan.u, temperature, self.vocab_size)
        has_context = (np.diff(plan.history_start) > 0) | (np.diff(plan.bias_start) > 0)
        has_context[list(masks)] = True
        for sample in has_context.nonzero()[0].tolist():
            context = self._context(plan, sample, masks.get(sample))
            token_ids[sample] = choose_in(
                context, int(sums[sample]), float(plan.u[sample]), float(temperature[sample]),
                self.vocab_size,
            )  # fmt: skip
        return token_ids

    def _context(self, plan: StepPlan, sample: int, mask: Mask | None) -> Context:
        """What the plan's entries mean once the row's last token is known."""
        context = Context(mask=mask)
        last_token = int(self.last_token[plan.sample_rows[sample]])
        begin, end = plan.history_start[sample : sample + 2].tolist()
        if begin < end:
            names = "repetition_penalty", "frequency_penalty", "presence_penalty"
            context.penalties = tuple(float(plan.sampling[name][sample]) for name in names)
            tokens = plan.history_tokens[begin:end].tolist()
            assert len(set(tokens)) == len(tokens), "a token twice in a history"
            context.history = dict(
                zip(tokens, plan.history_counts[begin:end].tolist(), strict=True)
            )
            if UNKNOWN_TOKEN in context.history:
                assert last_token != UNKNOWN_TOKEN, "a token that nobody sampled"
                times = context.history.pop(UNKNOWN_TOKEN)
                context.history[last_token] = context.history.get(last_token, 0) + times
        for place in range(*plan.bias_start[sample : sample + 2].tolist()):
            if plan.bias_after[place] in (ANY_TOKEN, last_token):
                context.add_bias(int(plan.bias_tokens[place]), float(plan.bias[place]))
        return context

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
        kv: UInt64,
        tokens: npt.NDArray[np.int32],
        counts: npt.NDArray[np.int32],
        place: npt.NDArray[np.intp],
        ends: npt.NDArray[np.int32],
    ) -> UInt64:
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
            before = np.where(position == 0, START, before)
            token = tokens[plan.query_start_loc[active] + turn].astype(np.uint64)
            kv[slots[base[active] + position]] = mix(before, token)
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

    def check_reserved(self, pristine: list[UInt64]) -> None:
        """Nothing may have written to what padding reads."""
        for kv, before in zip(self.kv, pristine, strict=True):
            size = len(before) * (PADDING_READ_CHUNK + 1)
            assert (kv[:size] == before).all()
