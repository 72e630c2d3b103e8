"""From prompts to answers: this scheduler and worker against transformers' continuous batching."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import pytest
import torch

from scheduler_svc.core.request import NewRequest, Sampling
from tests.gpu.card import IS_CUDA, has_room, sized
from tests.gpu.conftest import NewTable
from tests.gpu.models import NAMES, config_of, random_loaded, random_model, weight_bytes
from tests.support.in_process import InProcess

NAME = NAMES[0]
REQUESTS = sized(256, 6)
SHORTEST, LONGEST = sized((32, 512), (4, 30))  # tokens of a prompt
OUTPUT = sized(128, 5)  # tokens of every answer
MAX_REQUESTS = sized(256, 8)
MAX_BATCH_TOKENS = sized(4096, 64)


def prompts() -> list[list[int]]:
    draw = random.Random(8)
    vocab_size = config_of(NAME).vocab_size
    return [
        [draw.randrange(vocab_size) for _ in range(draw.randint(SHORTEST, LONGEST))]
        for _ in range(REQUESTS)
    ]


def test_throughput_beside_transformers(table: NewTable) -> None:
    """The reason to exist: faster than what it was written after, on the same work."""
    if not has_room(4 * weight_bytes(NAME)):
        pytest.skip(f"{NAME} does not fit")
    rows = table(
        f"{REQUESTS} requests on {NAME}",
        ["who", "output tokens per second", "seconds"],
        f"Prompts of {SHORTEST} to {LONGEST} tokens, {OUTPUT} tokens of output each, greedy, all "
        f"there at once; loading and capturing not counted. Chairlift's scheduler core runs in "
        f"the worker's process, without services and sockets; transformers' times are from the "
        f"first request's begin to the last one's end, as it reports them.",
    )
    seconds = of_chairlift(prompts())
    rows.add("Chairlift", f"{REQUESTS * OUTPUT / seconds:,.0f}", f"{seconds:.2f}")
    if IS_CUDA:
        torch.cuda.empty_cache()
    try:
        seconds = of_transformers(prompts())
    except Exception as error:  # whatever another version does, the figures above are kept
        rows.add("transformers", "unknown", f"{type(error).__name__}: {error}".partition("\n")[0])
        pytest.skip(f"transformers' continuous batching does not run here: {error}")
    rows.add("transformers", f"{REQUESTS * OUTPUT / seconds:,.0f}", f"{seconds:.2f}")


def of_chairlift(given: Sequence[list[int]]) -> float:
    loaded = random_loaded(NAME)
    tokens = MAX_REQUESTS * (LONGEST + OUTPUT + loaded.geometry.page_size)
    process = InProcess(
        loaded,
        chunks=loaded.geometry.chunks_for_tokens(tokens),
        max_batch_tokens=MAX_BATCH_TOKENS,
        max_requests=MAX_REQUESTS,
        depth=2,
        use_cuda_graph=True,
        is_padded=True,
        allow_block_sharing=False,  # the second run must find nothing of the first
    )
    requests = [
        NewRequest(f"r{i}", prompt, OUTPUT, Sampling(temperature=0))
        for i, prompt in enumerate(given)
    ]
    process.serve(requests)  # graphs of mixed shapes are captured on first use
    begin = time.perf_counter()
    served = process.serve(requests)
    seconds = time.perf_counter() - begin
    assert all(len(tokens) == OUTPUT for tokens in served.tokens.values())
    return seconds


def of_transformers(given: Sequence[list[int]]) -> float:
    from transformers import ContinuousBatchingConfig, GenerationConfig

    settings: dict[str, Any] = {
        "max_requests_per_batch": MAX_REQUESTS,
        "max_batch_tokens": MAX_BATCH_TOKENS,
        "auto_switch_to_flash": False,  # it would look for a package in the network
    }
    if not IS_CUDA:
        settings |= {"num_blocks": 64, "page_size": 16, "use_cuda_graph": False}
    known = {field.name for field in fields(ContinuousBatchingConfig)}
    batching = ContinuousBatchingConfig(**{k: v for k, v in settings.items() if k in known})
    # no token ends an answer: -1 is none
    generation = GenerationConfig(
        max_new_tokens=OUTPUT, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    model = random_model(NAME, "sdpa")
    with torch.inference_mode():
        outputs = model.generate_batch(
            [*given], generation_config=generation, continuous_batching_config=batching
        )
    done = list(outputs.values())
    lengths = [len(output.generated_tokens) for output in done]
    if lengths != [OUTPUT] * len(given):
        raise RuntimeError(f"answers have {sorted(set(lengths))} tokens instead of {OUTPUT}")
    return max(o.lifespan[1] for o in done) - min(o.lifespan[0] for o in done)
