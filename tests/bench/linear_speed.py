"""Linear layers on this machine: packed formats beside what torch offers, in turns.

    python -m tests.bench.linear_speed [--threads 2] [--rows 1,20,512] [--shapes 576x1536,...]

GFLOP/s (for int8: as many multiplications and additions), the best of several turns. The columns:
F.linear, oneDNN with packed weights, our three formats, and fbgemm's float16 weights and torch's
dynamic int8 where this build has them; behind them, a large sgemm in the same turns. Each turn goes
through copies of a layer that together exceed the caches, as a model's layers do.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F

from worker.cpu_layers.packed_linear import WEIGHT_FORMATS, PackedLinear

SHAPES = "576x960,576x3072,1536x576,576x49152,2048x2048"  # SmolLM2-135M's, fused, and a larger one
ROWS = "1,6,16,20,32,64,128,512"
COPIES_BYTES = 100 * 2**20
TURN_SECONDS = 0.03
TURNS = 7

Layer = Callable[[torch.Tensor], torch.Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rows", default=ROWS)
    parser.add_argument("--shapes", default=SHAPES)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    warnings.simplefilter("ignore")  # of torch: some candidates are deprecated
    print(f"torch {torch.__version__}, {asked.threads} threads; GFLOP/s, best of {TURNS} turns")
    for shape in asked.shapes.split(","):
        wide, out = (int(number) for number in shape.split("x"))
        table(wide, out, [int(number) for number in asked.rows.split(",")])


def table(wide: int, out: int, row_counts: list[int]) -> None:
    copies = max(1, COPIES_BYTES // (4 * wide * out))
    weights = [torch.randn(out, wide) for _ in range(copies)]
    found = {name: made for name, made in candidates(weights).items() if made}
    print(f"\n{wide} -> {out}")
    print("rows".rjust(6) + "".join(name.rjust(12) for name in (*found, "sgemm 2048")))
    square = torch.randn(2048, 2048)
    with torch.inference_mode():
        for rows in row_counts:
            x = torch.randn(rows, wide)
            work = 2 * rows * wide * out
            best = dict.fromkeys((*found, "sgemm"), 0.0)
            for _ in range(TURNS):
                for name, layers in found.items():
                    best[name] = max(best[name], work / seconds_of_one(layers, x) / 1e9)
                sgemm = 2 * 2048**3 / seconds_of_one([square.mm], square)
                best["sgemm"] = max(best["sgemm"], sgemm / 1e9)
            print(f"{rows:6}" + "".join(f"{speed:12.1f}" for speed in best.values()))


def seconds_of_one(layers: list[Layer], x: torch.Tensor) -> float:
    begin = now = time.perf_counter()
    count = 0
    while now - begin < TURN_SECONDS and count < len(layers):
        layers[count](x)
        count += 1
        now = time.perf_counter()
    return (now - begin) / count


def candidates(weights: list[torch.Tensor]) -> dict[str, list[Layer]]:
    """Layers by column; an empty list where this build of torch lacks the operation."""
    found: dict[str, list[Layer]] = {"F.linear": [lambda x, w=w: F.linear(x, w) for w in weights]}
    found["oneDNN"] = [] if not torch.backends.mkldnn.is_available() else one_dnn(weights)
    for weight_format in WEIGHT_FORMATS:
        found[f"our {weight_format}"] = [PackedLinear([w], [None], weight_format) for w in weights]
    found["fbgemm f16"], found["torch int8"] = [], []
    if "fbgemm" in torch.backends.quantized.supported_engines:
        torch.backends.quantized.engine = "fbgemm"
        found["fbgemm f16"] = [fbgemm_float16(w) for w in weights]
        found["torch int8"] = [torch_int8(w) for w in weights]
    return found


def one_dnn(weights: list[torch.Tensor]) -> list[Layer]:
    made: list[Layer] = []
    for weight in weights:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, 20)
        made.append(
            lambda x, w=packed: torch.ops.mkldnn._linear_pointwise(x, w, None, "none", [], "")
        )
    return made


def fbgemm_float16(weight: torch.Tensor) -> Layer:
    packed = torch.fbgemm_pack_gemm_matrix_fp16(weight)
    return lambda x: torch.fbgemm_linear_fp16_weight_fp32_activation(x, packed, None)


def torch_int8(weight: torch.Tensor) -> Layer:
    scales = weight.abs().amax(dim=1).double() / 127
    zeros = torch.zeros(len(weight), dtype=torch.int64)
    rounded = torch.quantize_per_channel(weight, scales, zeros, 0, torch.qint8)
    packed = torch.ops.quantized.linear_prepack(rounded, None)
    return lambda x: torch.ops.quantized.linear_dynamic(x, packed, reduce_range=True)


if __name__ == "__main__":
    main()
