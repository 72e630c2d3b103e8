"""All decoder layers in one call to C, against the same layers one by one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.bench.step_speed import load as load_smollm2
from tests.bench.step_speed import step_of
from tests.support.in_process import Answer, InProcess
from tests.support.loading import load
from tests.support.plan_builder import with_samples
from tests.support.runners import unfuse_model
from tests.support.tiny_models import gemma2, gemma3, llama, olmo2, phi3, smollm3
from worker.batch.plan_values import InvalidPlan
from worker.cpu_layers.decoder_layer import FusedLayer, Workspace
from worker.cpu_layers.decoder_stack import DecoderStack
from worker.cpu_layers.fusing import fuse_model
from worker.cpu_layers.packed_linear import PackedLinear

MAX_TOKENS = [4, 2, 4, 3, 2, 3]
CHUNKED = {"max_batch_tokens": 29, "max_requests": 8}


def fused_layers(model: nn.Module) -> list[FusedLayer]:
    forwards = (vars(module).get("forward") for module in model.modules())
    return [forward for forward in forwards if isinstance(forward, FusedLayer)]


def one_by_one(it: InProcess) -> InProcess:
    for layer in fused_layers(it.loaded.model):
        layer.stack = None
    return it


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of every step that a stack computed."""
    rows: list[int] = []
    compute = DecoderStack._compute

    def counting(self: DecoderStack, hidden: torch.Tensor, *others: object) -> torch.Tensor:
        rows.append(hidden.shape[1])
        return compute(self, hidden, *others)

    monkeypatch.setattr(DecoderStack, "_compute", counting)
    return rows


def answers(it: InProcess, prompts: list[list[int]]) -> list[Answer]:
    return it.answers(prompts, MAX_TOKENS, stagger=1)


@pytest.mark.parametrize(
    ("make", "num_threads", "weight_format"),
    [
        (llama, 1, "float32"),  # one group
        (llama, 5, "int8"),  # more threads than cores: they give each other way
        (gemma2, 2, "float32"),  # sliding and full layers, capped scores, heads of 12
        (gemma3, 2, "float16"),  # two kinds of embeddings
        (smollm3, 2, "float32"),  # a layer that does not rotate
        (olmo2, 1, "float32"),  # no norm before attention
        (phi3, 2, "float32"),  # q, k and v in one matrix, half of a head rotated
    ],
)
def test_bits_are_those_of_layer_by_layer(
    served: Callable[..., InProcess],
    prompts: list[list[int]],
    computed: list[int],
    make: Callable[[], object],
    num_threads: int,
    weight_format: str,
) -> None:
    """Chunked, mixed and decode steps: a stage that reads before all threads have written, or
    another layer's window, tables, pages or embeddings, changes logits or keys and values."""
    settings = {
        "num_threads": num_threads,
        "weight_format": weight_format,
        **CHUNKED,
    }
    one, other = served(make, **settings), one_by_one(served(make, **settings))
    found = answers(one, prompts)
    num_steps = len(computed)
    assert {1, 29} < set(computed)
    for got, wanted in zip(found, answers(other, prompts), strict=True):
        assert got.tokens == wanted.tokens
        assert torch.equal(got.logits, wanted.logits)
    assert torch.equal(one.runner.pool.memory, other.runner.pool.memory)
    assert len(computed) == num_steps


@pytest.mark.parametrize(("make", "weight_format"), [(llama, "int8"), (gemma3, "float32")])
def test_long_steps_go_through_a_layer_in_parts(
    served: Callable[..., InProcess],
    make: Callable[[], object],
    weight_format: str,
) -> None:
    """More rows than are gone through at once: each part must take its own angles, queries and
    places, and leave alone what the other threads still read of the part before."""
    prompts = [[(5 * i + 7 * j) % 60 + 1 for i in range(90)] for j in range(4)]
    settings = {"num_threads": 2, "weight_format": weight_format, "max_batch_tokens": 360}
    one, other = served(make, **settings), one_by_one(served(make, **settings))
    for it in (one, other):
        it.step(it.first_plan(*prompts))
    assert torch.equal(one.runner.pool.memory, other.runner.pool.memory)


def test_the_last_layer_ends_with_the_rows_that_become_logits(
    served: Callable[..., InProcess],
) -> None:
    """Its MLP for all others is thrown away: a prompt's rows are most of what is computed."""
    settings = {"max_batch_tokens": 34}
    one, other = served(llama, **settings), one_by_one(served(llama, **settings))
    hidden: list[torch.Tensor] = []
    for it in (one, other):
        norm = it.loaded.model.base_model.norm
        norm.register_forward_pre_hook(lambda _, args: hidden.append(args[0][0].clone()))
        prompts = [[3 * j + 2 for j in range(20)], [7, 8, 9], [5 * j + 1 for j in range(12)]]
        plan = it.first_plan(*prompts)
        assert plan.logits_indices.tolist() == [19, 22]  # the third prompt goes on
        it.step(plan)
    same = (hidden[0] == hidden[1]).all(dim=1).nonzero().flatten().tolist()
    assert same == [19, 22]


def test_other_backends_get_layer_by_layer(
    served: Callable[..., InProcess], prompts: list[list[int]], computed: list[int]
) -> None:
    """The reference is the oracle: a stack that answered in its place would hide its own errors."""
    found = answers(served(llama, attention="reference", **CHUNKED), prompts)
    assert not computed
    for one, other in zip(found, answers(served(llama, **CHUNKED), prompts), strict=True):
        assert one.tokens == other.tokens


def test_each_pool_has_its_own_pages(
    served: Callable[..., InProcess], prompts: list[list[int]]
) -> None:
    """Addresses of pages are kept from step to step: those of another runner's pool, or of one that
    is gone, would be written to."""
    it = served(llama, **CHUNKED)
    expected = answers(it, prompts)
    for _ in range(2):
        again = InProcess(it.loaded, chunks=198, allow_block_sharing=False, **CHUNKED)
        for one, other in zip(answers(again, prompts), expected, strict=True):
            assert one.tokens == other.tokens
        assert torch.equal(again.runner.pool.memory, it.runner.pool.memory)


def scaled(_: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return (args[0] * 1.5, *args[1:])


def test_a_model_that_computes_between_layers_has_no_stack(saved: Callable[..., tuple]) -> None:
    """What a model does between its layers (a scale, another input mixed in) would be left out."""
    loaded = load(saved(llama)[0])
    assert all(layer.stack is not None for layer in fused_layers(loaded.model))
    unfuse_model(loaded.model)
    loaded.model.base_model.layers[1].register_forward_pre_hook(scaled)
    assert fuse_model(loaded.model, loaded.geometry, loaded.max_model_len) == 3
    assert all(layer.stack is None for layer in fused_layers(loaded.model))


def test_a_model_that_begins_to_compute_between_layers_is_stopped(
    served: Callable[..., InProcess],
) -> None:
    """A branch that was not taken when the model was loaded must not be left out silently."""
    it = served(llama)
    hook = it.loaded.model.base_model.layers[2].register_forward_pre_hook(scaled)
    plan = it.first_plan([5, 6, 7])
    with pytest.raises(RuntimeError, match="layer 2 does not receive what the layer before"):
        it.step(plan)
    hook.remove()
    assert it.step(plan).is_finite.tolist() == [1]


@pytest.mark.smollm2
@pytest.mark.parametrize("weight_format", ["float32", "int8"])
def test_the_embedded_model_is_served_by_a_stack_over_narrow_weights(
    computed: list[int], weight_format: str
) -> None:
    """Each of these may go without changing an answer; a step then takes several times as long."""
    loaded = load_smollm2(weight_format)
    linears = [module for module in loaded.model.modules() if isinstance(module, PackedLinear)]
    assert {linear.storage for linear in linears} == {"blocks4", "blocks8"}
    assert len(fused_layers(loaded.model)) == loaded.geometry.num_layers == 30
    _, step = step_of(loaded, num_rows=3, num_tokens=20)
    step()
    assert computed == [3]


def test_a_token_that_is_named_often_stays_within_the_workspace(
    served: Callable[..., InProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token may be named as often as the step has tokens; more of them than tokens once wrote
    behind the arrays, and are refused."""
    guarded: dict[str, torch.Tensor] = {}
    reserve = Workspace.reserve

    def reserve_and_guard(self: Workspace, rows: int) -> None:
        reserve(self, rows)
        for name in ("normed", "summand", "qkv", "attended", "gate_up"):
            size = getattr(self, name).numel()
            guarded[name] = torch.full((2 * size,), 7.0)
            setattr(self.c_struct, name, guarded[name].data_ptr())

    it = served(olmo2, num_threads=1)  # as many heads for keys as for queries
    monkeypatch.setattr(Workspace, "reserve", reserve_and_guard)
    plan = it.first_plan(range(3, 11))
    with pytest.raises(InvalidPlan, match="logits_indices has 12 entries; allowed: 8"):
        it.step(with_samples(plan, logits_indices=[7] * 12, sample_logits=[0], sample_rows=[0]))
    it.step(with_samples(plan, logits_indices=[7] * 8, sample_logits=[0], sample_rows=[0]))
    assert guarded
    for name, memory in guarded.items():
        assert (memory[len(memory) // 2 :] == 7.0).all(), f"{name} was written beyond its end"
