"""All decoder layers of a model in one call to C, attention included.

Every layer's own two calls and its attention wake threads and pass through Python; over a decode
step that costs as much as its arithmetic. The last layer of a model computes all of them instead,
when the others have told it their embeddings and handed on what they got.

Owns: when that can be done in a step, handing layers, pages and tables to C. Does not own:
arithmetic (kernels/stack.c), whether a model's layers follow each other so (fusing.py).
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence

import numpy as np
import torch

from protos.plan import Int32
from worker.attention.cpu import CCall, CPages, CpuBackend, CTables, c_call, c_pages, c_tables
from worker.attention.interface import StepContext, layer_index, running_step, with_window_of
from worker.cpu_layers.decoder_layer import CRotary, Embeddings, FusedLayer, Workspace, c_rotary
from worker.kernels.build import kernel_library
from worker.kv.kv_pool import KvPool


class DecoderStack:
    """Answers for each of `layers`: all of a model, in their order, where the input of each is the
    output of the one before."""

    def __init__(self, layers: Sequence[FusedLayer], workspace: Workspace) -> None:
        self._run = kernel_library().run_stack
        self._run.restype = ctypes.c_int
        self._run.argtypes = [
            *(ctypes.c_void_p, ctypes.c_int64) * 3,
            *(ctypes.c_void_p,) * 4,
            ctypes.c_int,
        ]
        self._layers, self._workspace = layers, workspace
        self._pool: Callable[[], KvPool | None] = lambda: None  # whose pages _c_layers name
        # of the forward that runs
        self._step: StepContext | None = None
        self._input: torch.Tensor | None = None
        self._embeddings: list[Embeddings | None] = []  # of the layers so far
        for layer in layers:
            layer.stack = self

    def __call__(
        self, layer: FusedLayer, hidden_states: torch.Tensor, embeddings: Embeddings | None
    ) -> torch.Tensor | None:
        """What the layer is to give for its input; None where it must compute that itself.

        Raises RuntimeError where a model does something between its layers after all.
        """
        if layer is self._layers[0]:
            step = running_step()
            is_served = step is not None and isinstance(step.backend, CpuBackend)
            self._step = step if is_served else None
            self._input, self._embeddings = hidden_states, []
        if self._step is None:
            return None
        if hidden_states is not self._input or layer is not self._layers[len(self._embeddings)]:
            raise RuntimeError(
                f"layer {layer_index(layer.parts.attention)} does not get what the one before it "
                f"gave, as it did when the model was loaded"
            )
        self._embeddings.append(embeddings if layer.parts.rotates else None)
        if layer is not self._layers[-1]:
            return hidden_states
        step, self._step, self._input = self._step, None, None
        return self._compute(hidden_states.contiguous(), step)

    def _compute(self, hidden_states: torch.Tensor, step: StepContext) -> torch.Tensor:
        if self._pool() is not step.pool:
            self._place_in(step.pool)
        rows = hidden_states.shape[1]
        self._workspace.reserve(rows)
        tables = [c_tables(step, group) for group in step.groups]
        rotaries = self._rotaries()
        out = torch.empty_like(hidden_states)
        wanted = _wanted_rows(step)
        if self._run(
            self._c_layers,
            len(self._layers),
            hidden_states.data_ptr(),
            rows,
            None if wanted is None else wanted.ctypes.data,
            0 if wanted is None else len(wanted),
            (CRotary * len(rotaries))(*rotaries),
            (CTables * len(tables))(*tables),
            out.data_ptr(),
            ctypes.addressof(self._workspace.c_struct),
            torch.get_num_threads(),
        ):
            raise MemoryError("no memory for the attention kernel's tiles")
        return out

    def _rotaries(self) -> list[CRotary]:
        """The different embeddings of this forward, mostly one or two; layers are told theirs."""
        different = {id(embeddings): embeddings for embeddings in self._embeddings}
        places = {key: place for place, key in enumerate(different)}
        for c_layer, embeddings in zip(self._c_layers, self._embeddings, strict=True):
            c_layer.rotary = places[id(embeddings)]
        return [c_rotary(embeddings) for embeddings in different.values()]

    def _place_in(self, pool: KvPool) -> None:
        """Pages stay where they are for as long as their pool lives."""
        self._c_layers = (_Stacked * len(self._layers))()
        self._calls = []  # keep what C reads of them alive
        for place, layer in enumerate(self._layers):
            group, pages = pool.layer_views(layer_index(layer.parts.attention))
            assert layer.call is not None
            call = c_call(with_window_of(pool, group, layer.call))
            self._calls.append(call)
            self._c_layers[place] = _Stacked(layer.c_pointer, c_pages(pages), call, group)
        self._pool = weakref.ref(pool)


def _wanted_rows(step: StepContext) -> Int32 | None:
    """Those that become logits: of the last layer nothing else is read. None: not known."""
    if step.on_host is None:
        return None
    return np.ascontiguousarray(step.on_host.logits_indices[: step.on_host.num_logits], np.int32)


class _Stacked(ctypes.Structure):  # struct stacked
    _fields_ = [
        ("layer", ctypes.c_void_p),
        ("pages", CPages),
        ("call", CCall),
        ("group", ctypes.c_int64),
        ("rotary", ctypes.c_int64),
    ]
