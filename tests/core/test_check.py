"""The checks notice what they are there for; that they pass otherwise, all simulations show."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from scheduler_svc.core.check import InvariantError, check_idle
from scheduler_svc.core.request import NewRequest
from scheduler_svc.core.state import State
from tests.support.check import check
from tests.support.occupied import occupy
from tests.support.simulation import Setup, Simulation


def idle() -> State:
    """Nobody lives, and the cache remembers a prompt."""
    sim = Simulation(Setup(num_blocks=20, groups=((0, 1), (9, 2)), swap_chunks=5))
    sim.submit(NewRequest("a", list(range(20)), 4))
    sim.run()
    check(sim.state)
    check_idle(sim.state)
    return sim.state


def lose_chunk(state: State) -> None:
    state.memory.device.chunks.clean.pop()


def double_chunk(state: State) -> None:
    clean = state.memory.device.chunks.clean
    clean.append(clean[0])


def own_block(state: State) -> None:
    occupy(state.memory.device, 1, group=1)


def own_swap_block(state: State) -> None:
    occupy(state.memory.swap, 1)


def miscount(state: State) -> None:
    state.memory.groups[0].used[3] += 1


def forget_one_way(state: State) -> None:
    state.memory.groups[0].name_of.popitem()


def take_and_never_draw(state: State) -> None:
    assert state.memory.device.take([1, 0])


def lose_row(state: State) -> None:
    state.rows._free.pop()


@pytest.mark.parametrize("look", [check, check_idle])
@pytest.mark.parametrize(
    "spoil",
    [
        lose_chunk,
        double_chunk,
        own_block,
        own_swap_block,
        miscount,
        forget_one_way,
        take_and_never_draw,
        lose_row,
    ],
)
def test_what_is_wrong_is_noticed(
    spoil: Callable[[State], None], look: Callable[[State], None]
) -> None:
    """Memory leaks request by request, and the first to tell is a server that is full."""
    state = idle()
    spoil(state)
    with pytest.raises(InvariantError):
        look(state)


def test_a_free_block_that_is_lost_is_noticed() -> None:
    """Blocks of chunks that are held are not looked at."""
    sim = Simulation(Setup(num_blocks=20, groups=((0, 4),)))
    sim.submit(NewRequest("a", list(range(20)), 4))
    sim.turn()
    check(sim.state)
    sim.state.memory.groups[0].free.popitem()
    with pytest.raises(InvariantError, match="miscounted"):
        check(sim.state)
    sim.state.memory.counts.free_blocks[0] -= 1
    with pytest.raises(InvariantError, match="free blocks are lost"):
        check(sim.state)


class NotWalked(dict[int, bytes]):
    def __iter__(self) -> Iterator[int]:
        raise AssertionError("walked")

    items = keys = values = __iter__  # type: ignore[assignment]


def test_a_look_at_an_idle_state_walks_no_pool() -> None:
    """The first request after a pause waits until all that is cached has been looked at."""
    state = idle()
    for allocator in state.memory.groups:
        allocator.name_of = NotWalked(allocator.name_of)
    check_idle(state)
    with pytest.raises(AssertionError, match="walked"):
        check(state)
