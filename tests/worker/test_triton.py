"""The Triton backend where there is no GPU: compiled ahead of time, interpreted, launched at
nothing. tests/gpu compares it with float64 on a card."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.support.attention_cases import attend, make_case

triton = pytest.importorskip("triton", reason="triton is not to be had on this platform")

from triton.backends.compiler import GPUTarget  # noqa: E402  # not before the line above
from triton.compiler import ASTSource  # noqa: E402

from worker.attention import cuda as launches  # noqa: E402
from worker.attention import triton_kernel as kernels  # noqa: E402

SHARED_MEMORY = {
    80: 163 * 1024,
    89: 99 * 1024,
    90: 227 * 1024,
}  # bytes that one program may take, by capability
NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
INTERPRETED = Path(__file__).parents[1] / "support" / "triton_interpreted.py"


def interpret(*options: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options]
    done = subprocess.run(
        [*command, str(INTERPRETED)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-2_000:]


def test_interpreted_kernels_are_right():
    """All of triton_interpreted.py: the arithmetic of every kernel, without a GPU."""
    interpret("-m", "not slow")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_interpreted_kernels_are_right_in_every_combination():
    """The same over types x head sizes x groups x masks, and within whole models."""
    interpret("-m", "slow", "--timeout", "1500")


def compile_kernel(
    kernel: object,
    capability: int,
    dtype: torch.dtype,
    constants: Mapping[str, object],
    kv_dtype: torch.dtype | None = None,
    **options,
):
    """As a launch would compile it: tensors of the pool and strides are multiples of 16, plan
    arrays are not known to be. The pool holds kv_dtype, by default dtype."""
    pointers = {
        "slot_mapping": "*i64", "partials": "*fp32", "part_scales": "*fp32",
        **dict.fromkeys(("query", "out", "sinks", "key", "value"), f"*{NAMES[dtype]}"),
        "pages": f"*{NAMES[kv_dtype or dtype]}",
        **dict.fromkeys((*kernels._TABLES, "starts"), "*i32"),
    }  # fmt: skip
    floats = dict.fromkeys(("scaling", "softcap"), "fp32")
    names = kernel.arg_names
    types = {name: {**pointers, **floats}.get(name, "i32") for name in names}
    known = [
        (index,)
        for index, name in enumerate(names)
        if name not in constants and name not in kernels._VARYING and name not in floats
    ]
    source = ASTSource(
        kernel,
        {**types, **dict.fromkeys(constants, "constexpr")},
        {(names.index(name),): value for name, value in constants.items()},
        {index: [["tt.divisibility", 16]] for index in known},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    assert compiled.asm["cubin"][:4] == b"\x7fELF"
    assert compiled.metadata.shared <= SHARED_MEMORY[capability], options
    return compiled


def compile_attend(
    capability, dtype, head_dim, grouped, rows, *, capped=False, sinks=False, kv_dtype=None
):
    """`rows` as choose_tiles takes them: 1 is a decode."""
    itemsize = max(dtype.itemsize, (kv_dtype or dtype).itemsize)
    shared_memory = SHARED_MEMORY[capability]
    tiles = launches.choose_tiles(rows, grouped, head_dim, itemsize, shared_memory)
    constants = {
        "NUM_KV_HEADS": 8, "GROUPED": grouped, "HEAD_DIM": head_dim, "PAGE_SIZE": 16,
        "SPLIT": 512 if rows == 1 else 0, "CAPPED": capped, "BLOCK_M": tiles.block_m,
        "BLOCK_N": tiles.block_n, "BLOCK_D": launches.padded(head_dim),
    }  # fmt: skip
    if not sinks:
        constants["sinks"] = None
    options = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
    compiled = compile_kernel(kernels.attend, capability, dtype, constants, kv_dtype, **options)
    ptx = compiled.asm["ptx"]
    assert ".tf32" not in ptx
    if dtype != torch.float32:
        on_tensor_cores = "wgmma" if capability == 90 and rows > 16 else "mma.sync"
        assert on_tensor_cores in ptx


@pytest.mark.parametrize(
    ("capability", "dtype", "head_dim", "grouped", "rows", "extras"),
    [
        (90, torch.bfloat16, 128, 4, 1, {}),
        (90, torch.bfloat16, 128, 4, 4096, {}),
        (80, torch.float16, 80, 3, 64, {"capped": True, "sinks": True}),
        (80, torch.float32, 64, 1, 1, {"sinks": True}),
        (80, torch.float32, 128, 4, 1, {"kv_dtype": torch.float16}),
        (90, torch.bfloat16, 128, 4, 4096, {"kv_dtype": torch.float16}),
        (89, torch.float32, 256, 4, 4096, {}),
    ],
)
def test_attend_compiles(capability, dtype, head_dim, grouped, rows, extras):
    """Most errors of a kernel show when it is compiled, and a tile that is too big when its shared
    memory is counted; a card would only tell while serving. float32 must not become TF32."""
    compile_attend(capability, dtype, head_dim, grouped, rows, **extras)


@pytest.mark.parametrize("capability", [80, 90])
def test_the_other_kernels_compile(capability):
    """Likewise: planning, writing and merging."""
    plan = {"SHORT": 4, "TILE": 32, "SPLIT": 512, "BLOCK": launches._REQUESTS_AT_ONCE}
    compile_kernel(kernels.plan_work, capability, torch.float16, plan)
    write = {"NUM_KV_HEADS": 8, "GROUPED": 4, "HEAD_DIM": 80, "PAGE_SIZE": 16, "BLOCK_H": 8}
    compile_kernel(kernels.write_kv, capability, torch.bfloat16, {**write, "BLOCK_D": 128})
    merge = {"NUM_HEADS": 32, "HEAD_DIM": 80, "BLOCK_D": 128}
    compile_kernel(kernels.merge, capability, torch.bfloat16, merge, num_warps=1)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("capability", [80, 89, 90])
@pytest.mark.parametrize("dtype", NAMES)
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("grouped", [3, 20])
def test_every_variant_of_attend_compiles(capability, dtype, head_dim, grouped):
    """Shared memory depends on all of these; the largest must fit as well."""
    for rows in (1, 64, 4096):
        compile_attend(capability, dtype, head_dim, grouped, rows, capped=True, sinks=True)


class Recorded:
    """In the place of a kernel: notes its launches."""

    def __init__(self, name: str, launched: list[tuple[str, tuple[int, ...]]]) -> None:
        self._name, self._launched = name, launched

    def __getitem__(self, grid: tuple[int, ...]):
        return lambda *_args, **_constants: self._launched.append((self._name, grid))


def test_nothing_is_read_from_the_device(monkeypatch):
    """What a graph captures must not depend on a value: tensors without memory have none to give,
    and launching must work all the same, without the step's copy on the host."""
    launched: list[tuple[str, tuple[int, ...]]] = []
    for name in ("plan_work", "write_kv", "attend", "merge"):
        monkeypatch.setattr(kernels, name, Recorded(name, launched))
    case = make_case([(1, 70), (40, 50), (0, 0)], 4, 64, torch.float16, 16)
    nowhere = torch.device("meta")
    it = launches.TritonBackend(nowhere, num_programs=6)
    attend(it, case.to(nowhere))
    # 41 tokens in tiles of 32, and 3 requests, of which each can have one tile more: 4, by 2 heads
    assert launched == [
        ("write_kv", (41, 1)), ("plan_work", (1,)),
        ("attend", (6,)), ("merge", (3, 8)), ("attend", (8,)),
    ]  # fmt: skip
    launched.clear()
    attend(it, replace(case, context=replace(case.context, longest_query=1)))
    assert [name for name, _ in launched] == ["write_kv", "plan_work", "attend", "merge"]
