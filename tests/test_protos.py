"""The contracts: generated code is current and importable, and a plan survives the wire."""

from __future__ import annotations

import dataclasses
import math
import re
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protos import plan as layout
from protos.generate import SOURCES, WITHOUT_SERVICE, stale_files

ROOT = Path(__file__).resolve().parent.parent


def test_generated_code_is_current() -> None:
    """A .proto edited without `make protos` would change the API on paper only."""
    assert stale_files() == []


def declared(name: str) -> tuple[int, ...]:
    """The lowest version of `name` that pyproject.toml allows."""
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (floor,) = (
        found[1] for line in wanted if (found := re.match(rf"{name}>=([\d.]+)", line)) is not None
    )
    return tuple(int(part) for part in floor.split("."))


def test_runtime_floors_are_those_of_the_generated_code() -> None:
    """Generated code refuses older runtimes at import: pip must not install such ones."""
    for source in SOURCES:
        stem = source.removesuffix(".proto")
        code = (ROOT / f"{stem}_pb2.py").read_text()
        stamp = re.search(r"# Protobuf Python Version: ([\d.]+)", code)
        assert stamp, f"{stem}_pb2.py carries no version stamp"
        assert declared("protobuf") >= tuple(int(part) for part in stamp[1].split("."))
        if source in WITHOUT_SERVICE:
            continue
        code = (ROOT / f"{stem}_pb2_grpc.py").read_text()
        stamp = re.search(r"GRPC_GENERATED_VERSION = '([\d.]+)'", code)
        assert stamp, f"{stem}_pb2_grpc.py carries no version stamp"
        assert declared("grpcio") >= tuple(int(part) for part in stamp[1].split("."))


@st.composite
def arrays(draw: st.DrawFn, rows: Any, dimensions: tuple[str, ...]) -> dict[str, Any]:
    """One array for each entry of a layout, with lengths that agree and any bits inside."""
    bits = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))  # much faster than item by item
    sizes = {name: draw(st.integers(0, 4)) for name in dimensions}

    def length(wanted: str | int) -> int:
        if isinstance(wanted, int):
            return wanted
        name, _, extra = wanted.partition("+")
        return sizes[name] + int(extra or 0)

    filled = {}
    for name, dtype, shape in rows:
        lengths = [length(wanted) for wanted in shape]
        filled[name] = np.frombuffer(bits.bytes(4 * math.prod(lengths)), dtype).reshape(lengths)
    return filled


plans = st.builds(
    lambda values, step_id, awaits_mask: layout.StepPlan.from_arrays(step_id, awaits_mask, values),
    arrays(layout.PLAN_LAYOUT, layout.PLAN_DIMENSIONS),
    st.integers(0, 2**62),
    st.booleans(),
)
results = st.builds(
    lambda values: layout.StepResult(
        step_id=7, device_microseconds=8, queue_microseconds=9, **values
    ),
    arrays(layout.RESULT_LAYOUT, layout.RESULT_DIMENSIONS),
)


def values(message: Any) -> list[Any]:
    """The message's fields; those of its mappings last."""
    found: list[Any] = []
    for field in dataclasses.fields(message):
        value = getattr(message, field.name)
        found += [value[name] for name in sorted(value)] if isinstance(value, dict) else [value]
    return found


def same(left: Any, right: Any) -> bool:
    """Bitwise, so that NaN equals itself and -0.0 differs from 0.0."""
    for mine, other in zip(values(left), values(right), strict=True):
        if isinstance(mine, np.ndarray):
            if mine.dtype != other.dtype or mine.shape != other.shape:
                return False
            if mine.tobytes() != other.tobytes():
                return False
        elif mine != other:
            return False
    return True


@given(plans)
def test_a_plan_survives_the_wire(plan: layout.StepPlan) -> None:
    """If an array moved by one item, every later one would be garbage without an error."""
    counts, buffer = layout.encode_plan(plan)
    assert same(layout.decode_plan(plan.step_id, plan.awaits_mask, counts, buffer), plan)


@given(results)
def test_a_result_survives_the_wire(result: layout.StepResult) -> None:
    """As for plans: sampled tokens would go to the wrong requests."""
    counts, buffer = layout.encode_result(result)
    assert same(layout.decode_result(7, 8, 9, counts, buffer), result)


@given(plans, st.data())
def test_a_buffer_of_another_length_is_refused(plan: layout.StepPlan, data: st.DataObject) -> None:
    """A peer of another version must be told so, not be fed shifted numbers."""
    counts, buffer = layout.encode_plan(plan)
    cut = data.draw(st.integers(0, len(buffer) - 1))
    for wrong in (buffer[:cut], buffer + b"\0"):
        with pytest.raises(layout.LayoutError):
            layout.decode_plan(plan.step_id, plan.awaits_mask, counts, wrong)


@given(plans)
def test_counts_that_do_not_fit_are_refused(plan: layout.StepPlan) -> None:
    """Counts come from the network: a missing or a negative one must not reach numpy."""
    counts, buffer = layout.encode_plan(plan)
    for wrong in (counts[:-1], [*counts, 0], [-1, *counts[1:]]):
        with pytest.raises(layout.LayoutError):
            layout.decode_plan(plan.step_id, plan.awaits_mask, wrong, buffer)


@given(plans)
def test_an_array_of_another_type_is_refused(plan: layout.StepPlan) -> None:
    """8-byte items would be sent as twice as many 4-byte ones."""
    wide = dataclasses.replace(plan, rows=plan.rows.astype(np.int64))
    with pytest.raises(layout.LayoutError, match="rows is int64"):
        layout.encode_plan(wide)


@given(plans)
def test_arrays_that_disagree_are_refused(plan: layout.StepPlan) -> None:
    """Every reader trusts that R means the same in all arrays of a plan."""
    longer = dataclasses.replace(plan, seq_lens=np.append(plan.seq_lens, np.int32(1)))
    with pytest.raises(layout.LayoutError):
        layout.encode_plan(longer)
