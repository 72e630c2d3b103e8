"""One family through the worker: its greedy tokens against transformers' `generate`.

Alone, batched with prompts in chunks, and with the reference attention. Each trial ends as one of
EQUAL, REFUSED (by name, with the reason) or IMPOSSIBLE (no tiny model can be built, and why);
anything else is WRONG: other tokens, a crash, a refusal without a reason.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from scheduler_svc.core.request import NewRequest, Sampling
from tests.support.family_configs import MAX_LEN, VOCAB_SIZE, tiny_config
from tests.support.in_process import InProcess
from tests.support.loading import load
from tests.support.oracle import generate
from worker.kv.geometry import UnsupportedModel

EQUAL, REFUSED, IMPOSSIBLE, WRONG = "equal", "refused", "impossible to build", "WRONG"
_LENGTHS: Final = (3, 33, 9, 70, 20, 41, 1, 14)
_MAX_TOKENS: Final = (14, 9, 20, 12, 16, 12, 10, 18)


@dataclass(frozen=True)
class Outcome:
    """The outcome of a family's trial; `reason` is empty where tokens are equal."""

    result: str
    reason: str = ""


def try_family(name: str, folder: Path, built: Callable[[], None]) -> Outcome:
    """Build, save into `folder`, say `built`, load, compare."""
    try:
        model = _build(tiny_config(name))
        model.save_pretrained(folder)
        AutoModelForCausalLM.from_pretrained(folder)  # can it be read back at all?
    except Exception as error:
        return Outcome(IMPOSSIBLE, _describe(error))
    built()
    requests = _requests()
    try:
        right = [generate(model, new.prompt_token_ids, new.max_tokens) for new in requests]
    except Exception as error:
        return _refusal(folder) or Outcome(IMPOSSIBLE, f"generate fails: {_describe(error)}")
    refusal = _refusal(folder)
    if refusal is not None:
        return refusal
    try:
        return _compared(folder, requests, right)
    except Exception as error:
        return Outcome(WRONG, f"it is ready, and then fails: {_describe(error)}")


def _build(config: PreTrainedConfig) -> PreTrainedModel:
    """A model with random weights, wide enough for its answers to vary."""
    model = AutoModelForCausalLM.from_config(
        copy.deepcopy(config), attn_implementation="eager", dtype=torch.float32
    )
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name.lower() or ".ln_" in name:
                parameter.copy_(1 + 0.1 * noise if name.endswith("weight") else 0.1 * noise)
            elif parameter.ndim >= 2:
                parameter.copy_(noise * (2.5 * parameter.shape[-1] ** -0.5))
            else:
                parameter.copy_(0.1 * noise)
    return model.float().eval()


def _requests() -> list[NewRequest]:
    generator = torch.Generator().manual_seed(11)
    return [
        NewRequest(
            f"r{i}",
            torch.randint(2, VOCAB_SIZE - 2, (length,), generator=generator).tolist(),
            count,
            Sampling(temperature=0),
        )
        for i, (length, count) in enumerate(zip(_LENGTHS, _MAX_TOKENS, strict=True))
    ]


def _load(folder: Path) -> Any:
    try:
        return load(folder, page_size=4)
    except UnsupportedModel as error:
        if "set max_model_len" not in str(error):
            raise
        return load(folder, page_size=4, max_model_len=MAX_LEN)


def _refusal(folder: Path) -> Outcome | None:
    try:
        _load(folder)
    except UnsupportedModel as error:
        return Outcome(REFUSED, " ".join(str(error).split()))
    except Exception as error:
        return Outcome(WRONG, f"loading it crashes: {_describe(error)}")
    return None


def _compared(folder: Path, requests: list[NewRequest], right: list[list[int]]) -> Outcome:
    loaded = _load(folder)
    found = {}
    alone = InProcess(loaded, allow_block_sharing=False, max_batch_tokens=128)
    found["alone"] = {}
    for new in requests:
        found["alone"] |= alone.serve([new]).tokens
    found["batched"] = InProcess(loaded, max_batch_tokens=29).serve(requests).tokens
    reference = InProcess(loaded, max_batch_tokens=29, attention="reference")
    found["reference"] = reference.serve(requests).tokens
    for way, tokens in found.items():
        wrong = [
            len(new.prompt_token_ids)
            for new, expected in zip(requests, right, strict=True)
            if tokens[new.request_id, 0] != expected
        ]
        if wrong:
            return Outcome(WRONG, f"other tokens {way}, for prompts of {wrong} tokens")
    return Outcome(EQUAL)


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
