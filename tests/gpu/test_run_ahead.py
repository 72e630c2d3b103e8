"""Run-ahead under stress: random requests in too little memory, with every optimisation on and off.

float32, where the order of sums hardly ever decides a token.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from scheduler_svc.core.request import NewRequest, Sampling
from tests.gpu.card import DEVICE, IS_CUDA, sized
from tests.gpu.conftest import NewTable
from tests.support import tiny_models
from tests.support.in_process import InProcess, Served
from tests.support.loading import load
from worker.model.load import LoadedModel

REQUESTS = sized(80, 8)
LONGEST_ANSWER = sized(90, 30)
STEPS = sized(500, 20)  # at least
PAGE_SIZE = 16
LONGEST_REQUEST = 40 + 80 + LONGEST_ANSWER  # tokens
# steps in flight, graphs, whether memory is ample: against one eager step at a time in ample memory
WAYS = sized(
    (
        (1, True, True),
        (2, False, True),
        (2, True, True),
        (2, False, False),
        (2, True, False),
    ),
    ((2, True, False),),
)


def requests() -> list[NewRequest]:
    """Half of them greedy; prompts share beginnings, so that the prefix cache has work."""
    draw = random.Random(4)
    shared = [draw.randrange(tiny_models.VOCAB_SIZE) for _ in range(40)]
    made = []
    for i in range(REQUESTS):
        own = [draw.randrange(tiny_models.VOCAB_SIZE) for _ in range(draw.randint(1, 80))]
        sampling = Sampling(0) if i % 2 else Sampling(1.0, draw.choice([0, 20]), 0.9, seed=i)
        prompt = shared[: draw.choice([0, 20, 40])] + own
        made.append(NewRequest(f"r{i}", prompt, draw.randint(10, LONGEST_ANSWER), sampling))
    return made


def serve(loaded: LoadedModel, **settings: object) -> Served:
    process = InProcess(
        loaded,
        max_batch_tokens=64,
        is_padded=bool(settings.get("use_cuda_graph")),
        **settings,  # type: ignore[arg-type]
    )
    if IS_CUDA:
        assert process.runner.backend.name == "triton"
        assert bool(process.runner.ready().graph_sizes) == bool(settings.get("use_cuda_graph"))
    return process.serve(requests())


@pytest.mark.parametrize("name", sized(["llama", "gemma3"], ["llama"]))
def test_tokens_are_those_of_one_step_at_a_time(name: str, tmp_path: Path, table: NewTable) -> None:
    """A buffer written too early, an event that is missing, a block reused while it is copied:
    what only a device that really runs beside the host can show."""
    assert not torch.backends.cuda.matmul.allow_tf32
    tiny_models.save(tiny_models.SERVED[name](), tmp_path)
    loaded = load(tmp_path, device=str(DEVICE), dtype="float32", page_size=PAGE_SIZE)
    right = serve(loaded, depth=1)
    chunks_of_longest = InProcess(loaded).state.geometry.chunks_at_most(LONGEST_REQUEST)
    assert right.steps >= STEPS
    rows = table(
        f"Run-ahead stress, {name}",
        ["steps in flight", "graphs", "memory", "steps", "swapped out", "reset", "same tokens"],
        f"{REQUESTS} requests, float32, against one eager step at a time with ample memory.",
    )
    few = sized(2, 1) * chunks_of_longest
    short = {"chunks": few, "swap_chunks": few, "safety_margin": 0.0}
    wrong = []
    for depth, graphs, is_ample in WAYS:
        memory = {} if is_ample else short
        served = serve(loaded, depth=depth, use_cuda_graph=graphs, **memory)
        label = "ample" if is_ample else "short"
        is_same = served.tokens == right.tokens
        rows.add(
            depth, "on" if graphs else "off", label, served.steps, served.offloads,
            served.soft_resets, is_same,
        )  # fmt: skip
        if not is_same:
            wrong.append((depth, graphs, label))
        if not is_ample:
            assert served.offloads, "nothing was swapped: the test proves nothing"
    assert not wrong
