"""The oracle of greedy answers: transformers' own `generate`, one prompt at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel


def generate(model: PreTrainedModel, prompt: Sequence[int], max_tokens: int) -> list[int]:
    """Exactly `max_tokens` greedy tokens; the model's end-of-sequence tokens are ignored."""
    ids = torch.tensor([list(prompt)])
    model.generation_config.eos_token_id = None
    model.generation_config.forced_eos_token_id = None
    with torch.inference_mode():
        output = model.generate(  # type: ignore[operator]
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=max_tokens,
            min_new_tokens=max_tokens,
            pad_token_id=0,
        )
    tokens: list[int] = output[0, ids.shape[1] :].tolist()
    return tokens
