"""Whether a model's forward can be captured as a CUDA graph, determined without a GPU.

A capture records launches and forbids reading a value from the device. torch's FakeTensorMode has
no values: under it, a forward that reads one (`.item()`, `bool(tensor)`, `nonzero`) raises an error
that names the operation. So one forward over fake tensors tells before anything is captured.

Owns: this check. Does not own: attention, which a stand-in replaces here and which is capturable by
contract (attention/interface.py), the capture itself (graphs.py).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PreTrainedModel

from worker.attention.interface import StandIn, answering

_TOKENS: Final = 5


def why_not_capturable(model: PreTrainedModel) -> str | None:
    """The first operation of the forward that would read a value from the device; None if none."""
    device = next(model.parameters()).device
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        torch.inference_mode(),
        answering(StandIn()),
        _quiet(),
    ):
        tokens = torch.arange(_TOKENS, device=device)
        try:
            model(
                input_ids=tokens[None],
                position_ids=tokens[None],
                use_cache=False,
                logits_to_keep=torch.arange(2, device=device),
            )
        except RuntimeError as error:  # DataDependentOutputException and similar ones
            return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return None


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences torch, which logs a traceback for what is a result here."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)
