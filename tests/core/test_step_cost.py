"""The core's cost per step stays small, linear in the rows, and blind to who waits."""

from __future__ import annotations

from collections.abc import Callable

from tests.core.step_cost import Cost, cost, decoding

MAX_LOOPS = {256: 80, 1024: 40}  # about twice what they take; see step_cost.py for the unit
TURNS = 6  # of which the cheapest counts: others may use the machine too


def test_a_step_is_cheap_and_linear(show: Callable[[str], None]) -> None:
    """A Python loop over all rows, or something quadratic, slips into a step."""
    states = {rows: decoding(rows) for rows in MAX_LOOPS}
    best: dict[int, Cost] = {}
    for _ in range(TURNS):
        for rows, state in states.items():
            found = cost(state, 32)
            if rows not in best or found.total < best[rows].total:
                best[rows] = found
        if best[1024].total < 4 * best[256].total and all(
            best[rows].total < best[rows].loop * most for rows, most in MAX_LOOPS.items()
        ):
            break
    for rows, found in best.items():
        show(
            f"core, {rows} decoding rows: {found.total:.0f} µs a step, "
            f"{found.total / found.loop:.0f} plain loops over the rows"
        )
        assert found.total < found.loop * MAX_LOOPS[rows]
    assert best[1024].total < 4 * best[256].total


def test_who_waits_costs_nothing(show: Callable[[str], None]) -> None:
    """With a long queue every step of those that run takes longer, and the queue grows."""
    alone, crowded = decoding(256), decoding(256, num_waiting=100_000)
    costs: list[tuple[float, float]] = []
    ratio = 2.0
    while len(costs) < TURNS and ratio > 1.2:
        costs.append((cost(alone, 32).total, cost(crowded, 32).total))
        without, with_many = (min(turn[side] for turn in costs) for side in (0, 1))
        ratio = with_many / without
    show(f"core, 256 decoding rows: 100,000 waiting requests make a step {ratio:.2f} times as long")
    assert ratio <= 1.2
