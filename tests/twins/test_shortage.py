"""64 requests in a pool that holds an eighth of what they need at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from scheduler_svc.core.request import NewRequest, Sampling
from tests.support import tiny_models
from tests.support.in_process import InProcess
from tests.support.loading import load


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_all_finish_with_the_tokens_of_an_ample_pool(
    name: str, tmp_path: Path, show: Callable[[str], None]
) -> None:
    """Shortage wedges, fails or changes an answer; offload, restore and soft reset all happen."""
    tiny_models.save(tiny_models.SERVED[name](), tmp_path)
    loaded = load(tmp_path)
    generator = torch.Generator().manual_seed(3)
    requests = []
    for i in range(64):
        length = int(torch.randint(4, 60, (1,), generator=generator))
        prompt = torch.randint(tiny_models.VOCAB_SIZE, (length,), generator=generator).tolist()
        requests.append(NewRequest(f"r{i}", prompt, 8 + i % 40, Sampling(0)))
    ample = InProcess(loaded, chunks=4000, max_requests=64, max_batch_tokens=256)
    need = sum(
        ample.state.geometry.chunks_at_most(len(new.prompt_token_ids) + new.max_tokens)
        for new in requests
    )
    right = ample.serve(requests)
    assert right.offloads == right.soft_resets == 0
    # few requests are reset when blocks run out if they are admitted carefully: here they are not
    short = InProcess(
        loaded, chunks=need // 8, swap_chunks=need // 120, max_requests=64, max_batch_tokens=256,
        safety_margin=0.0,
    )  # fmt: skip
    served = short.serve(requests)
    assert served.tokens == right.tokens
    show(
        f"64 requests, {name}, {need // 8} of {need} chunks: {served.offloads} offloads, "
        f"{served.restores} restores, {served.soft_resets} soft resets"
    )
    assert served.offloads
    assert served.restores
    assert served.soft_resets
