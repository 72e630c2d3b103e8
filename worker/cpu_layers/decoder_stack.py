"""All decoder layers of a model in one call to C, attention included.

Layer by layer, two calls and the attention of every layer wake the threads and pass through Python;
over a decode step that costs as much as the arithmetic. But the loop over the layers is the
model's own code. So the layers of a stack defer their work: each of them returns its input
unchanged, only its rotary embeddings are recorded, and the last one computes all layers from the
input of the first. Between the layers of a stack, then, the hidden states are not what the model
would have there. Nothing else may look at them: fusing.py builds a stack only where every layer
receives the very tensor that the layer before it returned, and each step checks that again.

Owns: when layers defer in a step, passing layers, pages and tables to C. Does not own: arithmetic
(kernels/stack.c), whether layers may form a stack (fusing.py).
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence

import numpy as np
import torch

from protos.plan import Int32
from worker.attention.cpu import CCall, CPages, CpuBackend, CTables, c_call, c_pages, c_tables
from worker.attention.interface import StepContext, running_step, with_window_of
from worker.cpu_layers.decoder_layer import CRotary, Embeddings, FusedLayer, Workspace, c_rotary
from worker.kernels.build import kernel_library
from worker.kv.kv_pool import KvPool


class DecoderStack:
    """`layers` are all layers of a model, in order; the output of each is the input of the next."""

    def __init__(self, layers: Sequence[FusedLayer], workspace: Workspace) -> None:
        self._run = kernel_library().run_stack
        self._run.restype = ctypes.c_int
        self._run.argtypes = [
            *(ctypes.c_void_p, ctypes.c_int64) * 3,
            *(ctypes.c_void_p,) * 4,
            ctypes.c_int,
        ]
        self._layers, self._workspace = layers, workspace
        self._pool: Callable[[], KvPool | None] = lambda: None  # whose pages _c_layers point to
        # of the current forward
        self._step: StepContext | None = None
        self._input: torch.Tensor | None = None
        self._embeddings: list[Embeddings | None] = []  # of the layers so far
        for layer in layers:
            layer.stack = self

    def __call__(
        self, layer: FusedLayer, hidden_states: torch.Tensor, embeddings: Embeddings | None
    ) -> torch.Tensor | None:
        """The last layer's output, computed through all layers; for the others their input. None
        where layers do not defer, outside of a step or with another backend.

        Raises RuntimeError where the model does something between its layers after all.
        """
        if layer is self._layers[0]:
            running = running_step()
            defers = running is not None and isinstance(running.backend, CpuBackend)
            self._step = running.step if running is not None and defers else None
            self._input, self._embeddings = hidden_states, []
        if self._step is None:
            return None
        if hidden_states is not self._input or layer is not self._layers[len(self._embeddings)]:
            raise RuntimeError(
                f"layer {layer.call.layer} does not receive what the layer before it returned, as "
                f"it did when the model was loaded"
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
            raise MemoryError("cannot allocate memory for the attention kernel's tiles")
        return out

    def _rotaries(self) -> list[CRotary]:
        """The distinct embeddings of this forward, mostly one or two; sets each layer's index."""
        different = {id(embeddings): embeddings for embeddings in self._embeddings}
        places = {key: place for place, key in enumerate(different)}
        for c_layer, embeddings in zip(self._c_layers, self._embeddings, strict=True):
            c_layer.rotary = places[id(embeddings)]
        return [c_rotary(embeddings) for embeddings in different.values()]

    def _place_in(self, pool: KvPool) -> None:
        """Points the layers at the pages of `pool`, which do not move while the pool lives."""
        self._c_layers = (_Stacked * len(self._layers))()
        self._calls = []  # keeps alive what C reads of them
        for place, layer in enumerate(self._layers):
            group, pages = pool.layer_views(layer.call.layer)
            call = c_call(with_window_of(pool, layer.call))
            self._calls.append(call)
            self._c_layers[place] = _Stacked(layer.c_pointer, c_pages(pages), call, group)
        self._pool = weakref.ref(pool)


def _wanted_rows(step: StepContext) -> Int32 | None:
    """The rows that become logits, all that is read of the last layer; None where not known."""
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
