"""What is shared, when, and with whom."""

from __future__ import annotations

import pytest

from scheduler_svc.core.request import NewRequest, RequestState
from tests.support.simulation import Setup, Simulation, verify

PREFIX = list(range(1, 33))
HYBRID = ((0, 1), (6, 1))


def simulation(**changes: object) -> Simulation:
    defaults: dict[str, object] = {
        "num_blocks": 200,
        "max_batch_tokens": 16,
        "max_requests": 16,
        "max_model_len": 64,
        "vocab_size": 100,
    }
    return Simulation(Setup(**{**defaults, **changes}))  # type: ignore[arg-type]


def computed_by(sim: Simulation) -> int:
    """Runs to the end; the number of tokens that all steps computed."""
    total = 0
    original = sim.worker.step

    def step(plan):  # type: ignore[no-untyped-def]
        nonlocal total
        total += int(plan.query_start_loc[-1])
        return original(plan)

    sim.worker.step = step  # type: ignore[method-assign]
    sim.run()
    return total


@pytest.mark.parametrize("groups", [((0, 1),), ((0, 2), (6, 3)), ((6, 1),)])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_burst_computes_a_shared_prefix_once(
    groups: tuple[tuple[int, int], ...], depth: int
) -> None:
    """64 users with one system prompt pay for it 64 times."""
    requests = [NewRequest(f"r{i}", [*PREFIX, 50 + i, 60, 61], 4) for i in range(12)]
    sim = simulation(groups=groups, max_plans_in_flight=depth)
    for new in requests:
        sim.submit(new)
    # everybody's own 3 prompt tokens, and 3 of its 4 output tokens
    assert computed_by(sim) == len(PREFIX) + 12 * (3 + 3)
    verify(requests, sim.outcome, sim.setup)
    assert [sim.outcome.cached_tokens[f"r{i}", 0] for i in range(12)] == [0] + 11 * [32]


def test_without_sharing_everybody_computes_it() -> None:
    """The twin: the switch switches."""
    requests = [NewRequest(f"r{i}", [*PREFIX, 50 + i], 1) for i in range(4)]
    sim = simulation(allow_block_sharing=False)
    for new in requests:
        sim.submit(new)
    assert computed_by(sim) == 4 * 33
    assert not any(sim.outcome.cached_tokens.values())


def test_waiting_for_a_filler_ends_when_it_goes_away() -> None:
    """The filler is aborted and everybody behind it waits for ever."""
    sim = simulation(max_batch_tokens=4, max_requests=4)
    requests = [NewRequest(f"r{i}", [*PREFIX, 50 + i], 2) for i in range(3)]
    for new in requests:
        sim.submit(new)
    sim.turn()
    assert [r.request_id for r in sim.state.rows.running.values()] == ["r0"]
    sim.abort("r0")
    sim.turn()
    assert [r.request_id for r in sim.state.rows.running.values()] == ["r1"]
    # r1 found what r0 had published before it left
    assert sim.state.requests["r1"][0].num_cached_tokens == 4
    verify(requests, sim.run(), sim.setup)


def test_others_overtake_those_that_wait_for_a_filler() -> None:
    """A burst on one prefix holds up everybody who has another."""
    sim = simulation(max_batch_tokens=40)
    for i in range(4):
        sim.submit(NewRequest(f"r{i}", [*PREFIX, 50 + i], 2))
    sim.submit(NewRequest("other", [90, 91], 2))
    sim.plan()
    assert [r.request_id for r in sim.state.rows.running.values()] == ["r0", "other"]
    sim.run()


def test_nothing_is_shared_before_its_result_has_come_back() -> None:
    """A block is read that the worker has not written, or never will."""
    sim = simulation(max_plans_in_flight=2, max_batch_tokens=64)
    sim.submit(NewRequest("a", [*PREFIX, 50], 4))
    assert sim.plan()
    assert not sim.state.memory.groups[0].block_of
    sim.submit(NewRequest("b", [*PREFIX, 51], 4))
    sim.plan()
    assert [r.request_id for r in sim.state.rows.running.values()] == ["a"]
    sim.absorb()
    assert len(sim.state.memory.groups[0].block_of) == len(PREFIX) // 4
    sim.run()
    assert sim.outcome.cached_tokens["b", 0] == 32


def test_the_last_prompt_token_is_always_computed() -> None:
    """A full hit leaves nothing to compute, and no logits to sample from."""
    sim = simulation()
    for name in ("a", "b"):
        sim.submit(NewRequest(name, PREFIX, 2))
        sim.run()
    assert sim.outcome.cached_tokens["b", 0] == len(PREFIX) - 4


def test_salts_do_not_share() -> None:
    """One tenant learns from response times what another one asked."""
    sim = simulation()
    for name, salt in (("a", ""), ("b", "x"), ("c", "x"), ("d", "")):
        sim.submit(NewRequest(name, [*PREFIX, 9], 2, cache_salt=salt))
        sim.run()
    assert [sim.outcome.cached_tokens[name, 0] for name in "abcd"] == [0, 0, 32, 32]


def test_a_hybrid_hit_needs_the_window_too() -> None:
    """A hit without the sliding layers' blocks reads what is not there."""
    sim = simulation(groups=HYBRID)
    sim.submit(NewRequest("a", [*PREFIX, 9], 20))
    sim.run()
    full, sliding = sim.state.memory.groups
    # blocks that the window left behind keep their content, so the whole prefix is found …
    sim.submit(NewRequest("b", [*PREFIX, 10], 2))
    sim.run()
    assert sim.outcome.cached_tokens["b", 0] == 32
    # … until one that the window needs is reclaimed; a shorter hit has its own window
    name = list(full.block_of)[7]  # of the eighth page
    sliding.forget(sliding.block_of[name])
    sim.submit(NewRequest("c", [*PREFIX, 11], 2))
    sim.run()
    assert sim.outcome.cached_tokens["c", 0] == 28


def test_own_preemptions_do_not_count_as_hits() -> None:
    """The hit rate rises when memory is short, and users are told of cached tokens they pay for."""
    sim = simulation()
    sim.submit(NewRequest("a", [*PREFIX, 9], 8))
    for _ in range(4):
        sim.turn()
    request = sim.state.requests["a"][0]
    assert request.state is RequestState.DECODING
    while sim.results:
        sim.absorb()
    sim.state.preempt([request])
    sim.turn()
    assert sim.state.rows.computed[request.row] > 16, "it found its own blocks again"
    sim.run()
    assert sim.outcome.cached_tokens["a", 0] == 0
    assert sim.state.memory.prefix_cache.num_hit == 0


def test_reclaiming_takes_the_least_recently_used_one_at_a_time() -> None:
    """A full pool empties the whole cache, or forgets what is in use all the time."""
    sim = simulation(num_blocks=24, max_requests=2)
    prompts = {name: [30 * i + j for j in range(17)] for i, name in enumerate("abc")}
    for name in "abc":
        sim.submit(NewRequest(name, prompts[name], 1))
        sim.run()
    sim.submit(NewRequest("a again", prompts["a"], 1))
    sim.run()
    assert sim.outcome.cached_tokens["a again", 0] == 16
    # 12 named blocks and 12 clean ones; 16 are needed now: four of b are reclaimed, none of a
    sim.submit(NewRequest("big", [7] * 63, 1))
    sim.run()
    for name, cached in (("a", 16), ("c", 16), ("b", 0)):
        sim.submit(NewRequest(f"{name} at last", prompts[name], 1))
        sim.run()
        assert sim.outcome.cached_tokens[f"{name} at last", 0] == cached, name
