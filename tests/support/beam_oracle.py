"""The oracle of beam search: transformers' own `generate(num_beams=...)`, one prompt at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from scheduler_svc.core.request import BeamSearch

Scored = list[tuple[list[int], float]]  # output tokens, and the score of the hypothesis


def generate_beams(
    model: PreTrainedModel,
    prompt: Sequence[int],
    max_tokens: int,
    beams: BeamSearch,
    stop_token_ids: Sequence[int] = (),
    **settings: Any,
) -> Scored:
    """The best hypotheses, best first."""
    ids = torch.tensor([list(prompt)])
    model.generation_config.eos_token_id = None
    with torch.inference_mode():
        output = model.generate(  # type: ignore[operator]
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=max_tokens,
            eos_token_id=sorted(stop_token_ids) or None,
            pad_token_id=0,
            num_beams=beams.width,
            num_return_sequences=beams.num_answers,
            length_penalty=beams.length_penalty,
            early_stopping=beams.early_stopping,
            return_dict_in_generate=True,
            output_scores=True,
            **settings,
        )
    rows = output.sequences[:, ids.shape[1] :].tolist()
    answers = [_until_stop(row[:max_tokens], stop_token_ids) for row in rows]
    return list(zip(answers, output.sequences_scores.tolist(), strict=True))


def _until_stop(token_ids: list[int], stop_token_ids: Sequence[int]) -> list[int]:
    ends = [place + 1 for place, token in enumerate(token_ids) if token in stop_token_ids]
    return token_ids[: min(ends, default=len(token_ids))]
