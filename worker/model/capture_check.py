"""Whether a model's forward can be captured as a CUDA graph, found out without a GPU.

A capture records launches and forbids asking the device for a value. torch's FakeTensorMode has
no values to give: under it, a forward that asks (`.item()`, `bool(tensor)`, `nonzero`) raises, and
names the operation. So one forward over fake tensors tells before anything is captured.

Owns: this look. Does not own: attention, which a stand-in replaces here and which is capturable by
contract (attention/interface.py), or the capture (graphs.py).
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
    """The first operation of the forward that would ask the device for a value; None if none."""
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
        except RuntimeError as error:  # DataDependentOutput, DynamicOutputShape and their kin
            return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return None


@contextmanager
def _quiet() -> Iterator[None]:
    """torch logs a traceback for what is an answer here."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)
