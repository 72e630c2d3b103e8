"""Where a step's time goes on this CPU: SmolLM2, packed linear layers, fused decoder layers.

`python -m tests.bench.step_speed` prints it. A decode step is timed as the worker runs it, greedy
sampling included, in turns with its linear layers alone on as many rows, where each wakes its own
threads, and, if its layers are fused, with the same step layer by layer, where attention is timed.
Keys and values are random, so no prompts need to be computed first.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch

from protos import link_pb2
from tests.bench.attention_speed import in_turns
from tests.support.core_driver import CoreDriver
from tests.support.runners import unfuse_model
from worker.cpu_layers.decoder_layer import FusedLayer
from worker.cpu_layers.packed_linear import PackedLinear
from worker.model.load import LoadedModel, load_model
from worker.runner import Runner
from worker.step.sampler import argmax

MODEL = "smollm2-135m-instruct"
_PAGE_SIZE = 16


@dataclass(frozen=True, slots=True)
class StepFigures:
    """Milliseconds of a decode step of `num_rows` requests of `num_tokens` tokens."""

    num_rows: int
    num_tokens: int
    total: float
    linears: float  # timed alone, lm_head included
    # where a stack serves the layers: the step without it, and what attention took of that
    layer_by_layer: float | None
    attention: float | None

    def __str__(self) -> str:
        line = (
            f"decode step {self.num_rows:2d} x {self.num_tokens}: {self.total:.1f} ms; linear "
            f"layers alone {self.linears:.1f} ms (ratio {self.total / self.linears:.2f})"
        )
        if self.layer_by_layer is None:
            return line
        ratio = self.layer_by_layer / self.total
        return (
            f"{line}; layer by layer {self.layer_by_layer:.1f} ms ({ratio:.2f} times), "
            f"attention {self.attention:.1f} ms of it"
        )


def load(weight_format: str = "") -> LoadedModel:
    settings = link_pb2.Configure(model=MODEL, page_size=_PAGE_SIZE, weight_format=weight_format)
    return load_model(settings, lambda _what, _share: None)


def greedy(logits: torch.Tensor, *_: object) -> torch.Tensor:
    return argmax(logits)


def step_of(
    loaded: LoadedModel, num_rows: int, num_tokens: int, query_length: int = 1
) -> tuple[Runner, Callable[[], Any]]:
    """A runner, and the step that brings all requests to `num_tokens` computed tokens: a decode
    step, or with as long a query their whole prompts."""
    num_chunks = 2 + num_rows * (-(-num_tokens // _PAGE_SIZE) + 1)
    configure = link_pb2.Configure(
        page_size=_PAGE_SIZE,
        max_batch_tokens=num_rows * query_length,
        max_requests_per_batch=num_rows,
    )
    runner = Runner(loaded, configure, num_chunks)
    runner.sample = greedy
    runner.pool.memory.uniform_(-1, 1)
    prompt_length = num_tokens if query_length == num_tokens else num_tokens - query_length
    core = CoreDriver(
        runner.ready(),
        max_batch_tokens=num_rows * num_tokens,
        max_requests=num_rows,
        safety_margin=0.0,
    )
    prompts = torch.randint(loaded.vocab_size, (num_rows, prompt_length)).tolist()
    core.submit_prompts(*prompts, max_tokens=2)
    plan = next(plan for plan in core.plans_without_model() if plan.seq_lens[0] == num_tokens)
    assert len(plan.rows) == num_rows
    return runner, lambda: runner.launch(plan).wait()


def linears_of(loaded: LoadedModel, num_rows: int) -> Callable[[], None]:
    """Every linear layer of the model, once, on so many rows."""
    pairs = [
        (layer, torch.randn(num_rows, layer.in_features))
        for layer in loaded.model.modules()
        if isinstance(layer, PackedLinear)
    ]

    def run() -> None:
        for layer, rows in pairs:
            layer(rows)

    return run


def decode(
    loaded: LoadedModel, num_rows: int, num_tokens: int = 160, turns: int = 7
) -> StepFigures:
    runner, step = step_of(loaded, num_rows, num_tokens)
    in_attention: list[float] = []
    attend = runner.backend.attend

    def timed(*args: Any) -> torch.Tensor:
        begin = time.perf_counter()
        out = attend(*args)
        in_attention[-1] += time.perf_counter() - begin
        return out

    def layer_by_layer() -> None:
        in_attention.append(0.0)
        with without_stack(loaded), patch.object(runner.backend, "attend", timed):
            step()

    variants = {"step": step, "linears": linears_of(loaded, num_rows)}
    if stacked_layers(loaded):
        variants["layer by layer"] = layer_by_layer
    medians = {
        name: statistics.median(seconds) * 1000
        for name, seconds in in_turns(variants, turns).items()
    }
    return StepFigures(
        num_rows,
        num_tokens,
        medians["step"],
        medians["linears"],
        medians.get("layer by layer"),
        statistics.median(in_attention[1:]) * 1000 if in_attention else None,
    )


def stacked_layers(loaded: LoadedModel) -> list[FusedLayer]:
    forwards = (vars(module).get("forward") for module in loaded.model.modules())
    return [layer for layer in forwards if isinstance(layer, FusedLayer) and layer.stack]


@contextmanager
def without_stack(loaded: LoadedModel) -> Iterator[None]:
    layers = stacked_layers(loaded)
    stacks = [layer.stack for layer in layers]
    for layer in layers:
        layer.stack = None
    try:
        yield
    finally:
        for layer, stack in zip(layers, stacks, strict=True):
            layer.stack = stack


def prefill(loaded: LoadedModel, num_tokens: int = 512, turns: int = 5) -> str:
    """Arithmetic per second of a chunk's step, beside torch's large sgemm."""
    _, step = step_of(loaded, 1, num_tokens, query_length=num_tokens)
    flop = _flop_of_prefill(loaded, num_tokens)
    a, b = torch.randn(2, 2048, 2048)
    seconds = in_turns({"step": step, "sgemm": lambda: a @ b}, turns)
    chunk, sgemm = (statistics.median(of) for of in seconds.values())
    ratio = statistics.median(
        flop / one / (2 * 2048**3 / other)
        for one, other in zip(seconds["step"], seconds["sgemm"], strict=True)
    )
    return (
        f"prefill of {num_tokens}: {chunk * 1000:.0f} ms, {flop / chunk / 1e9:.0f} GFLOP/s; "
        f"torch sgemm 2048^3: {2 * 2048**3 / sgemm / 1e9:.0f} GFLOP/s; turn by turn {ratio:.2f}"
    )


def _flop_of_prefill(loaded: LoadedModel, num_tokens: int) -> float:
    """Of what must be computed: every linear layer for every token, but those behind the last
    layer's keys and values for the last token alone, and attention over what a token may see."""
    layers, geometry = loaded.model.base_model.layers, loaded.geometry
    flop = 0.0
    for layer in layers:
        for name, linear in layer.named_modules():
            if isinstance(linear, PackedLinear):
                is_for_all = layer is not layers[-1] or name.endswith(
                    ("q_proj", "k_proj", "v_proj")
                )
                weights = linear.in_features * linear.out_features
                flop += 2 * weights * (num_tokens if is_for_all else 1)
    pairs = num_tokens * (num_tokens + 1) / 2
    return flop + 4 * geometry.head_dim * geometry.num_heads * pairs * len(layers)


def main() -> None:
    loaded = load()
    print(f"{torch.get_num_threads()} threads")
    for num_rows in (1, 16, 20, 64):
        print(decode(loaded, num_rows))
    print(decode(loaded, 20, 512))
    print(prefill(loaded))
    unfuse_model(loaded.model)
    print("not fused:", decode(loaded, 20))


if __name__ == "__main__":
    main()
