"""The engine when memory is shared or short: prefix hits, flushes, policies, Admin's views."""

from __future__ import annotations

import pytest

from scheduler_svc.core.limits import (
    FULL_ATTENTION,
    SLIDING_ATTENTION,
    Geometry,
    GroupGeometry,
)
from scheduler_svc.core.policies import FIFO, PREFILL_FIRST, PRIORITY, Policy
from scheduler_svc.engine import views
from scheduler_svc.engine.events import Finished
from tests.support.engine_harness import GEOMETRY, Bench, assert_nothing_is_held, right
from tests.support.expected_answers import expected_tokens

PROMPT = [7, 3, 9, 1, 4, 2, 8, 6, 5]  # two pages and a token
HYBRID = Geometry(
    4,
    24 + 2,
    64,
    (GroupGeometry(FULL_ATTENTION, 2, 1), GroupGeometry(SLIDING_ATTENTION, 4, 2, 6)),
    max_model_len=32,
)
SWAPPING = Geometry(
    4, 7 + 2, 64, (GroupGeometry(FULL_ATTENTION, 1, 1),), max_model_len=24, num_swap_chunks=20
)


def cached_tokens(bench: Bench, request_id: str, prompt: list[int], **fields: object) -> int:
    """Serves a request alone, checks its tokens, and says what was found of its prompt."""
    bench.submit(request_id, prompt, **fields)  # type: ignore[arg-type]
    bench.serve()
    assert bench.tokens(request_id) == right(prompt, 4, bench.link.geometry)
    return bench.end(request_id).cached_tokens


def test_a_second_identical_prompt_is_found() -> None:
    """Usage tells clients what the prefix cache saved; only the same salt may share."""
    bench = Bench()
    bench.connect()
    assert cached_tokens(bench, "first", PROMPT) == 0
    assert cached_tokens(bench, "second", PROMPT) == 8
    assert cached_tokens(bench, "longer", [*PROMPT, 1, 2]) == 8
    assert cached_tokens(bench, "exact", PROMPT[:8]) == 4  # one token is always computed
    assert cached_tokens(bench, "other", [0, *PROMPT]) == 0
    assert cached_tokens(bench, "salted", PROMPT, cache_salt="tenant") == 0
    assert cached_tokens(bench, "again", PROMPT, cache_salt="tenant") == 8
    assert_nothing_is_held(bench)


def test_nothing_is_shared_when_it_is_switched_off() -> None:
    """allow_block_sharing = false promises that no request can tell what others asked."""
    bench = Bench(allow_block_sharing=False)
    bench.connect()
    assert [cached_tokens(bench, request_id, PROMPT) for request_id in "ab"] == [0, 0]
    assert bench.ask(views.get_cache).prefix_queries == 0


def test_siblings_report_what_their_prompt_found() -> None:
    """Siblings share one look-up: each reports it, and it counts once."""
    bench = Bench()
    bench.connect()
    assert cached_tokens(bench, "first", PROMPT) == 0
    bench.submit("family", PROMPT, n=3)
    bench.serve()
    assert [bench.end("family", index).cached_tokens for index in range(3)] == [8, 8, 8]
    cache = bench.ask(views.get_cache)
    assert (cache.prefix_queries, cache.prefix_hits) == (18, 8)


def test_preempted_siblings_do_not_raise_the_hit_rate() -> None:
    """What a sibling finds of its own tokens after a reset is no hit of a new prompt."""
    bench = Bench(geometry=Geometry(4, 7 + 2, 64, GEOMETRY.groups, max_model_len=24))
    bench.connect()
    bench.submit("a", PROMPT, 14, temperature=1.0, n=3)
    bench.serve()
    assert sum(bench.end("a", index).preemptions for index in range(3)) > 0
    cache = bench.ask(views.get_cache)
    assert (cache.prefix_queries, cache.prefix_hits) == (9, 0)


@pytest.mark.parametrize("geometry", [GEOMETRY, HYBRID], ids=["full", "hybrid"])
def test_a_flush_forgets_everything(geometry: Geometry) -> None:
    """Flushed prompts are still found, or a flush harms who runs."""
    bench = Bench(geometry=geometry)
    bench.connect()
    assert cached_tokens(bench, "first", PROMPT) == 0
    assert cached_tokens(bench, "second", PROMPT) == 8
    bench.submit("running", [*PROMPT, 3], 12)
    bench.step(3)
    named = sum(len(a.name_of) for a in bench.engine._state.memory.groups)
    flushed = bench.engine.flush_cache()
    bench.turn()
    assert flushed.result(0) == named > 0
    assert sum(group.blocks_cached for group in bench.ask(views.get_cache).groups) == 0
    bench.submit("meanwhile", PROMPT, 4)
    bench.serve()
    for request_id, prompt, count in (("running", [*PROMPT, 3], 12), ("meanwhile", PROMPT, 4)):
        assert bench.tokens(request_id) == right(prompt, count, geometry)
    assert bench.end("meanwhile").cached_tokens == 0
    assert cached_tokens(bench, "after", PROMPT) == 8
    assert_nothing_is_held(bench)


def ends(bench: Bench) -> list[str]:
    return [event.request_id for event in bench.events if isinstance(event, Finished)]


@pytest.mark.parametrize(
    ("policy", "order"),
    [(FIFO, ["a", "b", "c", "d"]), (PRIORITY, ["a", "d", "c", "b"])],
    ids=["fifo", "priority"],
)
def test_the_most_urgent_go_first(policy: Policy, order: list[str]) -> None:
    """A priority that is accepted and ignored, or obeyed where nobody asked for it."""
    bench = Bench(policy=policy, num_rows=1)
    bench.connect()
    bench.submit("a", [1, 2, 3], priority=-9)
    bench.step()
    for request_id, priority in (("b", 5), ("c", 0), ("d", -1)):
        bench.submit(request_id, [1, 2, 3], priority=priority)
    bench.serve()
    assert ends(bench) == order


def test_a_more_urgent_request_preempts_when_all_is_taken() -> None:
    """With every row taken by slow answers, urgency would mean nothing."""
    bench = Bench(policy=PRIORITY, num_rows=2)
    bench.connect()
    for request_id in ("slow", "slower"):
        bench.submit(request_id, PROMPT, 16, priority=3)
    bench.step(3)
    bench.submit("urgent", [1, 2], priority=0)
    bench.serve()
    assert ends(bench)[0] == "urgent"
    assert sum(bench.end(request_id).preemptions for request_id in ("slow", "slower")) >= 1
    for request_id in ("slow", "slower"):
        assert bench.tokens(request_id) == right(PROMPT, 16)
    assert_nothing_is_held(bench)


@pytest.mark.parametrize("policy", [FIFO, PREFILL_FIRST, PRIORITY], ids=lambda policy: policy.name)
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_swap_chunks", [0, 20])
def test_every_policy_gives_the_same_tokens(
    policy: Policy, depth: int, num_swap_chunks: int
) -> None:
    """The order of work must not show in an answer."""
    geometry = Geometry(4, 9 + 2, 64, GEOMETRY.groups, 32, num_swap_chunks)
    bench = Bench(depth, geometry=geometry, policy=policy)
    bench.connect()
    prompts = {f"r{number}": [number, *PROMPT[: number + 2]] for number in range(6)}
    for number, (request_id, prompt) in enumerate(prompts.items()):
        bench.submit(request_id, prompt, 12, priority=number % 3)
    bench.serve()
    for request_id, prompt in prompts.items():
        assert bench.tokens(request_id) == right(prompt, 12)
    assert_nothing_is_held(bench)


# What Admin sees


def test_requests_show_siblings_and_who_is_offloaded() -> None:
    """At 3 a.m. one wants to see which of them hold memory, and which wait in the swap pool."""
    bench = Bench(geometry=SWAPPING)
    bench.connect()
    bench.submit("a", PROMPT, 14, temperature=1.0, n=3)
    for _ in range(40):
        bench.step()
        listed = bench.ask(views.list_requests)
        if any(view.offloaded for view in listed):
            break
    else:
        raise AssertionError("nobody was offloaded")
    assert [(view.request_id, view.index) for view in listed] == [("a", 0), ("a", 1), ("a", 2)]
    assert {view.state for view in listed if view.offloaded} == {"PENDING"}
    cache = bench.ask(views.get_cache)
    assert cache.swap_chunks_total - cache.swap_chunks_free > 0
    assert cache.offloads == sum(view.preemptions for view in listed) > 0
    bench.serve()
    cache = bench.ask(views.get_cache)
    assert cache.restores == cache.offloads
    assert cache.swap_chunks_free == cache.swap_chunks_total == 20


def test_the_first_sibling_that_lives_is_shown() -> None:
    """GetRequest of a request whose first answer has ended already."""
    want = expected_tokens([PROMPT] * 2, [8] * 2, 50, [1.0] * 2, [0] * 2, siblings=[0, 1])
    stop = next(token for token in want[0] if token not in want[1])
    bench = Bench()
    bench.connect()
    bench.submit("a", PROMPT, 8, stop_token_ids=frozenset({stop}), temperature=1.0, n=2)
    while len(bench.ask(lambda state: state.requests["a"])) == 2:
        bench.step()
    detail = bench.ask(lambda state: views.get_request(state, "a"))
    assert detail is not None
    assert detail.summary.index == 1
    assert detail.token_ids[len(PROMPT) :] == want[1][: len(detail.token_ids) - len(PROMPT)]


def test_the_cache_of_a_hybrid_model() -> None:
    """Blocks per group, cached ones, window, and how full the pages are."""
    bench = Bench(geometry=HYBRID)
    bench.connect()
    cached = [PROMPT, [0, *PROMPT]]
    for number, prompt in enumerate(cached):
        bench.submit(f"r{number}", prompt, 4)
        bench.serve()
    bench.submit("running", PROMPT, 12)
    bench.step(2)
    cache = bench.ask(views.get_cache)
    full, sliding = cache.groups
    assert (full.group, full.num_layers, full.sliding_window) == (FULL_ATTENTION, 2, 0)
    assert (sliding.group, sliding.num_layers, sliding.sliding_window) == (SLIDING_ATTENTION, 4, 6)
    for group, blocks_per_chunk in ((full, 1), (sliding, 2)):
        assert group.blocks_total == 24 * blocks_per_chunk
        assert group.blocks_free == group.blocks_total - group.blocks_owned
        assert 0 < group.blocks_cached <= group.blocks_free
    assert (cache.prefix_queries, cache.prefix_hits) == (28, 8)
    # 11 tokens: three pages of full attention, and the two that the window of 6 still reads
    assert (full.blocks_owned, sliding.blocks_owned) == (3, 2)
    assert cache.tokens_stored == 11 + 7
    sliding_chunks = cache.chunks_total - cache.chunks_free - 3
    assert cache.utilisation == 18 / (3 * 4 + sliding_chunks * 2 * 4)


def test_a_worker_with_another_page_size_names_blocks_anew() -> None:
    """A prompt finds, under a name of its first four tokens, the KV of five that are another's."""
    bench = Bench(num_rows=2)
    bench.connect()
    prompts = {"a": [1, 2, 3, 4, 5, 6], "b": [1, 2, 3, 4, 9, 9]}
    for request_id, prompt in prompts.items():
        bench.submit(request_id, prompt, 8)
    bench.step(2)
    bench.link.geometry = Geometry(5, 12 + 2, 64, GEOMETRY.groups, max_model_len=32)
    bench.connect()
    bench.serve()
    for request_id, prompt in prompts.items():
        assert bench.tokens(request_id) == right(prompt, 8), request_id
