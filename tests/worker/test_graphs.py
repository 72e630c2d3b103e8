"""Steps replayed from graphs, which are played on a CPU (recorded_graphs.py)."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from scheduler_svc.core.request import NewRequest, Sampling
from tests.support import recorded_graphs, tiny_models
from tests.support.in_process import InProcess
from tests.support.loading import load
from worker.model.load import LoadedModel


@pytest.fixture(params=["llama", "gemma3"])
def loaded(request: pytest.FixtureRequest, tmp_path: Path) -> LoadedModel:
    tiny_models.save(tiny_models.SERVED[request.param](), tmp_path)
    # kernels in C cannot be played back; on a GPU there are none
    return load(tmp_path, weight_format="unpacked")


def requests() -> list[NewRequest]:
    generator = torch.Generator().manual_seed(6)

    def prompt(length: int) -> list[int]:
        return torch.randint(tiny_models.VOCAB_SIZE, (length,), generator=generator).tolist()

    return [
        NewRequest(f"r{i}", prompt(length), 6 + i, Sampling(0) if i % 2 else Sampling(1.0, seed=i))
        for i, length in enumerate((3, 30, 9, 41, 17, 2))
    ]


def test_replays_give_the_tokens_of_eager_steps(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A number of the captured step that is baked in, or an output overwritten by the next replay:
    on a GPU nothing would say so. Two steps are in flight, of decode and of mixed shapes."""
    right = InProcess(loaded, chunks=60).serve(requests())
    backend = recorded_graphs.play(monkeypatch)
    process = InProcess(loaded, chunks=60, depth=2, is_padded=True)
    captured = backend.captures
    assert process.runner.ready().graph_sizes
    assert process.serve(requests()).tokens == right.tokens
    again = backend.captures
    assert again - captured <= 2 * 3, "steps were not replayed"
    assert process.serve(requests()).tokens == right.tokens
    assert backend.captures - again <= 3, "graphs were not found again"


def test_all_graphs_leave_their_logits_in_the_same_memory(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph never gives its outputs back: with logits of their own, those of twenty decode sizes
    and a large vocabulary would take gigabytes that the memory plan does not know of."""
    recorded_graphs.play(monkeypatch)
    static = InProcess(loaded, chunks=60, max_requests=32, is_padded=True).runner._static
    assert static is not None
    places = {graph.forwarded.logits.data_ptr() for graph in static._graphs.values()}
    assert len(static._graphs) > 4
    assert len(places) == 1


def test_what_cannot_be_captured_runs_eagerly(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The lint cannot foresee everything: a refused capture must not cost the model, nor a step."""
    right = InProcess(loaded, chunks=60).serve(requests())
    recorded_graphs.play(monkeypatch)
    made: list[recorded_graphs.RecordedGraph] = []

    class FewGraphs(recorded_graphs.RecordedGraph):
        def __init__(self) -> None:
            super().__init__()
            made.append(self)
            if len(made) == 2:
                self.calls = None  # type: ignore[assignment]

    class Refusing(recorded_graphs._Recorder):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if self._graph.calls is None:
                raise RuntimeError("operation not permitted when stream is capturing")
            return super().__torch_dispatch__(func, types, args, kwargs)

    monkeypatch.setattr(torch.cuda, "CUDAGraph", FewGraphs)
    monkeypatch.setattr(recorded_graphs, "_Recorder", Refusing)
    with caplog.at_level(logging.WARNING):
        process = InProcess(loaded, chunks=60, depth=2, is_padded=True)
    assert len(process.runner.ready().graph_sizes) == 1
    assert "no more CUDA graphs after 1" in caplog.text
    assert "not permitted" in caplog.text
    assert process.serve(requests()).tokens == right.tokens
