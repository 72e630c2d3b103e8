"""CUDA graphs: a step's forward, captured once per padded shape and replayed.

Decode shapes are captured at start, largest first, so that all share the memory of the largest;
mixed ones on first use, and the least recently used of them are dropped. All graphs read the same
static inputs, into which a step's inputs are copied on the device, so that both I/O sets share one
set of graphs, and all write their logits to the same memory. Where nothing can be captured (on a
CPU), the same static path runs eagerly; after a failed capture, so do the shapes not yet captured.

How a graph is captured: two runs before it, because libraries initialise themselves in their first
runs and Triton compiles; no garbage collection during the capture; only this thread is checked for
forbidden calls, because the completion thread waits for events meanwhile.

Owns: the static inputs, the graphs. Does not own: shapes (padding.py), the forward (forward.py),
whether the model can be captured (capture_check.py).
"""

from __future__ import annotations

import gc
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final

import torch

from worker.batch.inputs import StepInputs
from worker.batch.padding import PaddedShape, PaddedShapes
from worker.process.progress import Progress
from worker.step.forward import Forward, Forwarded
from worker.step.io_buffers import InputBuffer

MOST_MIXED: Final = 24  # graphs of mixed shapes that are kept

logger = logging.getLogger(__name__)


class StaticForward:
    """The forward over static inputs."""

    def __init__(
        self,
        forward: Forward,
        static: InputBuffer,
        shapes: PaddedShapes,
        write_padding: Callable[[PaddedShape], None],
        captures: bool,
    ) -> None:
        """`write_padding` fills the static inputs with a step of nothing but padding; `captures`:
        whether graphs can be captured, in whose stream all of this must run."""
        self.static = static
        self.shapes = shapes
        self._forward = forward
        self._write_padding = write_padding
        self._captures = captures
        self._pool = torch.cuda.graph_pool_handle() if captures else None
        self._graphs: OrderedDict[PaddedShape, _Graph] = OrderedDict()
        self._logits: torch.Tensor | None = None  # of all graphs; rows of the largest decode shape
        self.capture_seconds = 0.0

    @property
    def captured_sizes(self) -> list[int]:
        """Rows of the decode graphs."""
        return sorted(shape.num_tokens for shape in self._graphs if shape.is_decode)

    def capture_first_shapes(self, progress: Progress) -> None:
        """Captures all decode shapes, largest first, then the smallest mixed one, so that the
        kernels of mixed shapes are compiled now. Does nothing where graphs cannot be captured."""
        tokens = self.shapes.mixed_sizes[0]
        mixed = self.shapes.shape_of(tokens, 1, 1, tokens)
        shapes = [self.shapes.decode(size) for size in self.shapes.decode_sizes[::-1]]
        if mixed is not None and not mixed.is_decode:
            shapes.append(mixed)
        for done, shape in enumerate(shapes):
            if not self._captures:  # never, or since a capture failed
                return
            progress(f"capturing a graph of {shape.num_tokens} tokens", done / len(shapes))
            self._graph_of(shape)
        logger.info("captured %d graphs in %.1f s", len(self._graphs), self.capture_seconds)

    def __call__(self, source: InputBuffer, inputs: StepInputs, shape: PaddedShape) -> Forwarded:
        """Runs the step whose `inputs` were written to `source`; the result is valid until the
        next call."""
        graph = self._graph_of(shape)  # before the copy: a capture overwrites the static inputs
        self.static.copy_from(source.device, source.num_used)
        if graph is None:
            return self._forward(self.static.read(shape), shape.longest_query, inputs)
        graph.graph.replay()
        return graph.forwarded

    def _graph_of(self, shape: PaddedShape) -> _Graph | None:
        """None if the shape runs eagerly."""
        graph = self._graphs.get(shape)
        if graph is None:
            graph = self._capture(shape) if self._captures else None
            if graph is None:
                return None
            self._graphs[shape] = graph
        self._graphs.move_to_end(shape)
        mixed = [known for known in self._graphs if not known.is_decode]
        if len(mixed) > MOST_MIXED:  # it is idle: the capture has waited for all earlier work
            del self._graphs[mixed[0]]
        return graph

    def _capture(self, shape: PaddedShape) -> _Graph | None:
        """None if the device refuses, and then nothing more is captured; raises what the forward
        itself raises."""
        begin = time.perf_counter()
        self._write_padding(shape)
        inputs = self.static.read(shape)
        for _ in range(2):
            logits = self._forward(inputs, shape.longest_query, None).logits
        if self._logits is None:
            rows = self.shapes.decode_sizes[-1]
            self._logits = logits.new_empty(rows, logits.shape[1])
        del logits
        torch.cuda.current_stream().synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with (
                _no_garbage_collection(),
                torch.cuda.graph(
                    graph,
                    pool=self._pool,
                    stream=torch.cuda.current_stream(),
                    capture_error_mode="thread_local",
                ),
            ):
                forwarded = self._keep(self._forward(inputs, shape.longest_query, None))
        except RuntimeError as error:
            self._captures = False
            logger.warning(
                "no more CUDA graphs after %d: the capture of %s failed: %s",
                len(self._graphs), shape, error,
            )  # fmt: skip
            return None
        seconds = time.perf_counter() - begin
        self.capture_seconds += seconds
        if not shape.is_decode:
            logger.info("captured a graph of %s in %.1f s", shape, seconds)
        return _Graph(graph, forwarded)

    def _keep(self, forwarded: Forwarded) -> Forwarded:
        """Moves the logits into the memory that all graphs share: a graph never frees its outputs,
        so separate ones would take gigabytes."""
        count = len(forwarded.logits)
        if self._logits is None or count > len(self._logits):
            return forwarded
        return replace(forwarded, logits=self._logits[:count].copy_(forwarded.logits))


@dataclass(frozen=True, slots=True, eq=False)
class _Graph:
    graph: torch.cuda.CUDAGraph
    forwarded: Forwarded  # what a replay fills


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """A collection that frees CUDA memory in the middle of a capture would end it."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
