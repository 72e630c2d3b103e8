"""protos/sampling.py against the API, the docs, and everything that follows from it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from protos import inference_pb2 as pb
from protos.api_fields import GENERATE_FIELDS, OTHER_SAMPLING_FIELDS
from protos.field_tables import PAGES, updated
from protos.plan import decode_plan, encode_plan
from protos.sampling import (
    REQUEST_FIELDS,
    SAMPLER_FIELDS,
    SAMPLING_FIELDS,
    SamplingField,
)
from scheduler_svc.core.limits import Limits
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.front.served_model import Model
from scheduler_svc.front.validation import validate
from scheduler_svc.text.tokenizer import Tokenizer
from tests.support.fake_engine import FACTS
from tests.support.simulation import Setup
from tests.support.small_tokenizers import chat
from worker.batch.inputs import prepare_inputs
from worker.batch.padding import row_shape
from worker.kv.geometry import FULL_ATTENTION, CacheGroup
from worker.step.io_buffers import Capacity, InputBuffer

ROOT = Path(__file__).resolve().parent.parent
TYPES = {"float32": "TYPE_FLOAT", "int32": "TYPE_INT32", "int64": "TYPE_INT64"}


def test_the_table_is_the_api() -> None:
    """A number that a client may send and that no entry describes would be ignored in silence."""
    fields = pb.SamplingParams.DESCRIPTOR.fields
    numbers = {getattr(fields[0], kind): dtype for dtype, kind in TYPES.items()}
    found = {
        field.name: numbers[field.type]
        for field in fields
        if field.type in numbers and not field.is_repeated
    }
    assert found == {name: entry.dtype for name, entry in SAMPLING_FIELDS.items()}
    assert len(SAMPLING_FIELDS) == len(SAMPLER_FIELDS) + len(REQUEST_FIELDS)


def test_every_field_is_described() -> None:
    """A field that is in no table is in no page either."""
    sampling = {field.name for field in pb.SamplingParams.DESCRIPTOR.fields}
    assert sampling == SAMPLING_FIELDS.keys() | OTHER_SAMPLING_FIELDS.keys()
    assert {field.name for field in pb.GenerateRequest.DESCRIPTOR.fields} == GENERATE_FIELDS.keys()


@pytest.mark.parametrize("name", PAGES)
def test_the_pages_have_the_tables_as_they_are(name: str) -> None:
    """Limits that the docs get wrong are found out by errors: run python -m protos.field_tables."""
    page = (ROOT / name).read_text()
    assert updated(page) == page


@pytest.mark.parametrize(
    ("page", "tables"),
    [
        ("README.md", ["defaults"]),
        ("docs/sampling.md", ["sampler", "scheduler", "others", "generate"]),
    ],
)
def test_each_page_has_its_tables(page: str, tables: list[str]) -> None:
    """A comment that no longer matches leaves the table behind as it was."""
    text = (ROOT / page).read_text()
    assert re.findall(r"<!-- table (\w+)", text) == tables
    emptied = re.sub(r"(<!-- table .*?-->).*?(<!-- end)", r"\1\n\2", text, flags=re.DOTALL)
    assert len(emptied) < len(text) - 500
    assert updated(emptied) == text


@pytest.mark.parametrize("name", [n for n, e in SAMPLING_FIELDS.items() if e.neutral is not None])
def test_neutral_values_are_allowed(name: str) -> None:
    """Client libraries fill them in."""
    entry = SAMPLING_FIELDS[name]
    assert entry.allows(entry.neutral)
    assert not entry.allows(float("nan"))


def unlike_neutral(entry: SamplingField) -> float | int:
    """A value that a request may have, exact in float32."""
    return 3 if entry.dtype == "int32" else 0.375


def on_device(sampling: dict[str, float], stated: dict[str, float]) -> dict[str, list[float]]:
    """Each parameter in the worker's buffer, for a request and a model's generation_config."""
    model = Model.of("tiny", FACTS, Tokenizer(chat(), stated))
    asked = pb.GenerateRequest(text="hello", sampling=pb.SamplingParams(**sampling))
    scheduler = Scheduler(Limits(64, 8), Setup().geometry())
    scheduler.submit(validate(asked, "r", 0, model, 8).new)
    planned = scheduler.plan()
    assert planned is not None
    counts, buffer = encode_plan(planned)
    plan = decode_plan(planned.step_id, False, counts, buffer)
    group = CacheGroup(FULL_ATTENTION, (0,), 0, 1)
    inputs = prepare_inputs(plan, [group], 16, row_shape(5, 1, 1, 5, 1))
    device = InputBuffer(Capacity(8, 8, 8, 8, 8, 1, 8), torch.device("cpu"))
    device.write(plan, inputs, FACTS.vocab_size)
    (samples,) = device.samples().slices
    return {name: tensor.tolist() for name, tensor in samples.samples.parameters.items()}


def test_every_parameter_reaches_the_device() -> None:
    """From the request, from the model's defaults, or neutral: through validation, rows, plan."""
    wanted = {name: unlike_neutral(entry) for name, entry in SAMPLER_FIELDS.items()}
    as_lists = {name: [value] for name, value in wanted.items()}
    assert on_device(wanted, {}) == as_lists
    neutral = {name: [entry.neutral] for name, entry in SAMPLER_FIELDS.items()}
    keys = {name: entry.config_key for name, entry in SAMPLER_FIELDS.items() if entry.config_key}
    stated = {key: wanted[name] for name, key in keys.items()}
    assert on_device({}, stated) == neutral | {name: as_lists[name] for name in keys}
    assert on_device({}, {}) == neutral


EXTENDED = """
from dataclasses import dataclass
from protos import sampling

entry = sampling.REQUEST_FIELDS.pop("length_penalty")  # a field of the API, as must be

@dataclass(frozen=True, slots=True)
class Extended(sampling.SamplerParameters):
    length_penalty: float = sampling._parameter(entry)

sampling.SamplerParameters = Extended
sampling.SAMPLER_FIELDS["length_penalty"] = entry

from tests.test_sampling_table import on_device, test_every_parameter_reaches_the_device

test_every_parameter_reaches_the_device()
assert on_device({"length_penalty": 1.5}, {})["length_penalty"] == [1.5]
"""


def test_a_new_parameter_is_registered_by_its_entry_alone() -> None:
    """Before any other module is imported, a table with one more entry takes the place of ours."""
    done = subprocess.run(
        [sys.executable, "-c", EXTENDED], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
