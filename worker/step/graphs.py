"""CUDA graphs: a step's forward, captured once per padded shape and replayed.

Decode shapes are captured at start, largest first, so that all share the memory of the largest;
mixed ones on first use, the least recently used dropped beyond a bound. All read the same static
inputs, into which a step's inputs are copied on the device, so that both I/O sets share one set of
graphs, and all leave their logits in the same memory. Where nothing can be captured (a CPU), the
same static path runs eagerly; after a capture that fails, so do all shapes not captured by then.

Recipe of a capture: two runs before it, because libraries set themselves up on their first ones
and Triton compiles; no garbage collection within it; only this thread is watched for forbidden
calls, because the completion thread waits for events meanwhile.

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
        """`write_padding` fills the static inputs with a step that is padding alone; `captures`
        is whether there is a device to capture on, in whose stream all of this runs."""
        self.static = static
        self.shapes = shapes
        self._forward = forward
        self._write_padding = write_padding
        self._captures = captures
        self._pool = torch.cuda.graph_pool_handle() if captures else None
        self._graphs: OrderedDict[PaddedShape, _Graph] = OrderedDict()
        self._logits: torch.Tensor | None = None  # of all graphs, as many rows as decode at most
        self.capture_seconds = 0.0

    @property
    def captured_sizes(self) -> list[int]:
        """Rows of the decode graphs."""
        return sorted(shape.num_tokens for shape in self._graphs if shape.is_decode)

    def capture_first_shapes(self, progress: Progress) -> None:
        """All decode shapes, largest first; then the smallest mixed one, so that what all mixed
        ones need is compiled now. Nothing where graphs cannot be captured."""
        tokens = self.shapes.mixed_sizes[0]
        mixed = self.shapes.shape_of(tokens, 1, 1, tokens)
        shapes = [self.shapes.decode(size) for size in self.shapes.decode_sizes[::-1]]
        if mixed is not None and not mixed.is_decode:
            shapes.append(mixed)
        for done, shape in enumerate(shapes):
            if not self._captures:  # from the start, or since one failed
                return
            progress(f"capturing a graph of {shape.num_tokens} tokens", done / len(shapes))
            self._graph_of(shape)
        logger.info("captured %d graphs in %.1f s", len(self._graphs), self.capture_seconds)

    def __call__(self, source: InputBuffer, inputs: StepInputs, shape: PaddedShape) -> Forwarded:
        """Run the step that `inputs` were written to `source` for; what it gives lives until the
        next call."""
        graph = self._graph_of(shape)  # before the copy: a capture overwrites the static inputs
        self.static.copy_from(source.device, source.num_used)
        if graph is None:
            return self._forward(self.static.read(shape), shape.longest_query, inputs)
        graph.graph.replay()
        return graph.forwarded

    def _graph_of(self, shape: PaddedShape) -> _Graph | None:
        """None where the shape runs eagerly."""
        graph = self._graphs.get(shape)
        if graph is None:
            graph = self._capture(shape) if self._captures else None
            if graph is None:
                return None
            self._graphs[shape] = graph
        self._graphs.move_to_end(shape)
        mixed = [known for known in self._graphs if not known.is_decode]
        if len(mixed) > MOST_MIXED:  # idle: a capture waits for what came before it
            del self._graphs[mixed[0]]
        return graph

    def _capture(self, shape: PaddedShape) -> _Graph | None:
        """None, and no captures any more, where the device refuses; a forward that fails of
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
        """With the logits in the memory that all graphs share: of their own they would be
        gigabytes, for a graph never gives its outputs back."""
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
