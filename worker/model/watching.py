"""Ways to watch a model during one small forward: its masks, its modules, its weights.

Each is a context manager that leaves the model unchanged. Owns: hooks and replacements for
watching. Does not own: conclusions (probe.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import nn
from transformers import AttentionMaskInterface
from transformers.pytorch_utils import Conv1D

from worker.attention.interface import ATTENTION_NAME
from worker.step.forward import first_tensor

_LONGEST_MASK: Final = 2**20  # positions at which a mask's rule is evaluated


class Masks:
    """The masks that a model made, and the window that each implements."""

    def __init__(self, are_made: bool = True) -> None:
        self.are_made = are_made  # False in a step, which has no masks
        # kept alive, because the address of a freed tensor may be reused
        self._made: list[tuple[torch.Tensor, int | str | None]] = []

    def add(self, mask: torch.Tensor, window: int | str | None) -> None:
        self._made.append((mask, window))

    def window_of(self, mask: torch.Tensor) -> int | str | None:
        """The window of a mask or of a view of one: 0 for none, None where its rule does not tell;
        or what is wrong with it."""
        address = mask.untyped_storage().data_ptr()
        for made, window in self._made:
            if made.untyped_storage().data_ptr() == address:
                return window
        return "was not made by transformers' mask functions: what it hides is not known"


@contextmanager
def masks_made(max_model_len: int) -> Iterator[Masks]:
    """Inside, models make masks for our attention, and the window of each is recorded."""
    made = Masks()
    reach = max(8, min(max_model_len or 4096, _LONGEST_MASK))

    def make(
        q_length: int,
        kv_length: int,
        mask_function: Callable[..., Any],
        device: torch.device | str = "cpu",
        **_: Any,
    ) -> torch.Tensor:
        rows = torch.arange(q_length, device=device)  # rules may use tensors of the model's device
        mask = _visible(mask_function, rows, kv_length)[None, None].clone()
        made.add(mask, _window_of(mask_function, reach, kv_length, device))
        return mask

    AttentionMaskInterface.register(ATTENTION_NAME, make)
    try:
        yield made
    finally:
        del AttentionMaskInterface._global_mapping[ATTENTION_NAME]


def _window_of(
    mask_function: Callable[..., Any],
    reach: int,
    kv_length: int,
    device: torch.device | str = "cpu",
) -> int | str | None:
    """The window of a mask's rule among `reach` positions, 0 for none; or what is wrong with it.
    None for a rule that looks up the forward's own kv_length tokens (which belong to an image, for
    example) and shows them all earlier ones: it implies nothing about windows."""
    try:
        return _window_among(mask_function, reach, device)
    except (IndexError, RuntimeError):
        window = _window_among(mask_function, kv_length, device)
        return window or None


def _window_among(
    mask_function: Callable[..., Any], reach: int, device: torch.device | str
) -> int | str:
    places = sorted({0, min(1, reach - 1), reach // 3, reach // 2, max(0, reach - 2), reach - 1})
    rows = torch.tensor(places, device=device)
    visible = _visible(mask_function, rows, reach)
    columns = torch.arange(reach, device=device)[None]
    if (visible & (columns > rows[:, None])).any():
        return "shows tokens that come later: it is not causal"
    window = int(visible[-1].sum())
    expected = (columns <= rows[:, None]) & (columns > rows[:, None] - window)
    if not torch.equal(visible, expected):
        return "is neither causal nor a window: which tokens it hides follows another rule"
    return 0 if window == reach else window


def _visible(mask_function: Callable[..., Any], rows: torch.Tensor, columns: int) -> torch.Tensor:
    """bool [rows, columns]: whether a query at each of `rows` sees each column, by the rule."""
    zero = rows.new_zeros(1, 1, 1, 1)
    every = torch.arange(columns, device=rows.device)[None, None, None]
    visible = mask_function(zero, zero, rows[None, None, :, None], every)
    return torch.as_tensor(visible).expand(1, 1, len(rows), columns)[0, 0]


@contextmanager
def last_module_found(model: nn.Module, num_tokens: int) -> Iterator[list[nn.Module]]:
    """Yields a list that contains, after a forward of num_tokens tokens, the module that ended last
    with an output for every token: the source of hidden states, whatever a family calls it, and
    whichever modules its forward skips. Empty if there is none."""
    found: list[nn.Module] = []

    def after(module: nn.Module, _inputs: Any, output: Any) -> None:
        try:
            first = first_tensor(output)
        except (KeyError, IndexError, TypeError):
            return
        if isinstance(first, torch.Tensor) and first.shape[:2] == (1, num_tokens):
            found[:] = [module]

    hooks = [part.register_forward_hook(after) for part in model.modules() if part is not model]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def weights_watched(model: nn.Module) -> Iterator[set[nn.Module]]:
    """Yields the set of linear layers whose weight is read from outside, by a router that looks up
    its dtype or multiplies by hand, for example. Packed, they would have none."""
    read: set[nn.Module] = set()
    kinds: dict[type[nn.Module], type[nn.Module]] = {
        kind: _watching(kind, read) for kind in (nn.Linear, Conv1D)
    }
    layers = [module for module in model.modules() if type(module) in kinds]
    for layer in layers:
        layer.__class__ = kinds[type(layer)]
    try:
        yield read
    finally:
        for layer in layers:
            layer.__class__ = type(layer).__mro__[1]


def _watching(kind: type[nn.Module], read: set[nn.Module]) -> type[nn.Module]:
    class Watched(kind):  # type: ignore[misc, valid-type]
        def __getattr__(self, name: str) -> Any:
            if name == "weight" and not vars(self).get("computes"):
                read.add(self)
            return super().__getattr__(name)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.computes = True
            try:
                return super().forward(x)
            finally:
                del self.computes

    return Watched
