"""`deterministic`: a row's bits depend on the row alone. How that is ensured, and how it is proved.

Three things in a step could break it. Experts group the rows of a whole batch: models with experts
are refused. torch's matrix products distribute rows to threads in fours, and give a row the same
bits in any share of four or more, but other bits in a smaller one (measured): where linear layers
are not packed, rows come in multiples of four. And torch computes the end of a flat array, and of
each thread's share of it, with scalar code, which for some activations has other bits than the
vector code before it: RowBits passes pieces without such an end to these functions.

The rest is proved when a model is loaded, on its own modules: every shape of linear layer, and
every kind of decoder layer from its input to its output, with few rows and among many. Any
difference is a refusal that names the module.

Owns: all of this. Does not own: padding to multiples (padding.py), attention, whose C kernel is
deterministic by construction (kernels/paged.c).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from worker.attention.interface import StandIn, answering
from worker.cpu_layers.decoder_layer import FusedLayer
from worker.cpu_layers.packed_linear import PackedLinear
from worker.kv.geometry import UnsupportedModel

_TRIED_ROWS: Final = (2, 3, 5, 9, 17)  # in multiples of the deterministic row count
_DIFFERENT_ROWS: Final = 4  # likewise; further rows repeat these
_MEASURED_ROWS: Final = 13  # likewise, to find the dimension that counts rows
_MOST_ROWS: Final = 1024
_SHARE: Final = 32768  # numbers from which on torch distributes elementwise work to threads
_PIECE: Final = 8192  # less than that for any function (GELU: 16384)
_VECTORS: Final = 64  # floats: a multiple of any CPU's vector width, unrolled

# torch's functions with vector code for the bulk and scalar code for the end; the others have one.
_NAMES: Final = (
    "silu",
    "gelu",
    "sigmoid",
    "mish",
    "elu",
    "hardswish",
    "hardsigmoid",
    "tanh",
    "exp",
)
_FUNCTIONS: Final = {getattr(torch.ops.aten, name).default for name in (*_NAMES, "softplus")}
_IN_PLACE: Final = {
    getattr(torch.ops.aten, f"{name}_").default: getattr(torch.ops.aten, name).default
    for name in _NAMES
}


class RowBits(TorchDispatchMode):
    """Inside, activations give a number the same bits wherever it is in a tensor."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _FUNCTIONS:
            return _in_pieces(func, args, kwargs)
        if func in _IN_PLACE:
            return args[0].copy_(_in_pieces(_IN_PLACE[func], args, kwargs))
        return func(*args, **kwargs)


def _in_pieces(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """Each piece consists of whole vectors, and is too short to be distributed to threads."""
    x, *others = args
    flat = x.reshape(-1)
    padded = nn.functional.pad(flat, (0, -len(flat) % _VECTORS))
    pieces = [func(piece, *others, **kwargs) for piece in padded.split(_PIECE)]
    return torch.cat(pieces)[: len(flat)].view(x.shape) if pieces else func(*args, **kwargs)


# ---- experts ----


def check_dense(config: PreTrainedConfig, model: nn.Module | None = None) -> None:
    """Refuses experts, whose kernels group rows of the whole batch. Checks every number of experts
    in the configuration, and the modules of a loaded model. Raises UnsupportedModel."""
    for name, count in _expert_counts(config.to_dict()):
        raise UnsupportedModel(
            f"{config.model_type}: deterministic needs a dense model; {name} is {count}, "
            f"and expert kernels make a row's bits depend on the batch"
        )
    for path, module in model.named_modules() if model is not None else ():
        last = path.rpartition(".")[2].lower()
        if "expert" in last or last.endswith("moe") or "experts" in type(module).__name__.lower():
            raise UnsupportedModel(
                f"{config.model_type}: deterministic needs a dense model; {path} is a "
                f"{type(module).__name__}, and expert kernels make a row's bits depend on the batch"
            )


def _expert_counts(values: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _expert_counts(value)
        elif _counts_experts(str(name)) and isinstance(value, int) and value > 1:
            yield name, value


def _counts_experts(name: str) -> bool:
    """num_experts, n_routed_experts, moe_num_experts, ...; not num_experts_per_tok, which families
    without experts also have."""
    return name.endswith("experts") and ("num" in name or name.startswith("n_"))


def prove_row_bits(
    model: PreTrainedModel, row_multiple: int, max_model_len: int, max_rows: int
) -> None:
    """Both proofs, for steps with rows in multiples of `row_multiple`. Raises UnsupportedModel that
    names the first module whose bits depend on the batch."""
    check_row_bits(model, row_multiple)
    check_layer_bits(model, row_multiple, max_model_len, max_rows)


# ---- linear layers ----


def check_row_bits(model: PreTrainedModel, row_multiple: int) -> None:
    """Checks that the model's matrix products give a row the same bits among any multiple of
    `row_multiple` rows, on this machine and with this number of threads.

    Libraries choose kernels by CPU and row count; deterministic mode requires that the choice makes
    no difference. One layer of every shape is tried. Raises UnsupportedModel.
    """
    layers = {
        (type(module), *_shape(module)): (path, module)
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D | PackedLinear)
    }
    for (_, _, wide), (path, layer) in layers.items():
        rows = torch.linspace(-1, 1, wide * _TRIED_ROWS[-1] * row_multiple).sin()
        rows = rows.view(-1, wide)
        with torch.inference_mode():
            one_by_one = torch.cat(
                [layer(rows[i : i + row_multiple]) for i in range(0, len(rows), row_multiple)]
            )
            for count in _TRIED_ROWS:
                some = count * row_multiple
                if not torch.equal(layer(rows[:some]), one_by_one[:some]):
                    raise _changes(model, f"{path} {list(_shape(layer))}", row_multiple, some)


def _shape(layer: nn.Module) -> tuple[int, int]:
    """(output features, input features)"""
    if isinstance(layer, PackedLinear):
        return layer.out_features, layer.in_features
    rows, columns = layer.weight.shape  # type: ignore[misc]
    return (columns, rows) if isinstance(layer, Conv1D) else (rows, columns)


def _changes(model: PreTrainedModel, what: str, few: int, many: int) -> UnsupportedModel:
    return UnsupportedModel(
        f"{model.config.model_type}: deterministic is impossible here: the bits of {what} change "
        f"when {few} rows are computed among {many}, with {torch.get_num_threads()} threads"
    )


# ---- whole layers ----


class _Enough(Exception):
    """Ends a forward once all that is compared has been computed."""


class _Tried:
    """Forwards of a model, recorded in one decoder layer of every kind."""

    def __init__(self, model: PreTrainedModel, row_multiple: int, max_model_len: int) -> None:
        self.model, self.few = model, row_multiple
        self._different = _DIFFERENT_ROWS * row_multiple
        rows = torch.arange(self._different)
        self._ids = (17 * rows + 3) % model.config.get_text_config().vocab_size
        self._positions = 37 * rows % max_model_len
        layers = _one_of_each_kind(model)
        self.layers = [layer for _, layer in layers]
        self._modules = {
            f"{path}.{name}".rstrip("."): module
            for path, layer in layers
            for name, module in layer.named_modules()
        }
        self._axes = self._measured()
        units = [self._run(rows[i : i + self.few]) for i in range(0, len(rows), self.few)]
        self._alone = [
            None if axis is None else torch.cat([unit[place][1] for unit in units], axis)
            for place, axis in enumerate(self._axes)
        ]

    def widths(self) -> list[int]:
        """The distinct numbers of values per row in the outputs of modules, smallest first."""
        sizes = {rows.numel() // self._different for rows in self._alone if rows is not None}
        return sorted(sizes - {0})

    def check(self, count: int, *, to_the_end: bool) -> None:
        """Runs `count` rows together. Raises UnsupportedModel if bits differ from rows alone."""
        rows = torch.arange(count) % self._different
        events = self._run(rows, to_the_end=to_the_end)
        for (what, found), alone, axis in zip(events, self._alone, self._axes, strict=False):
            if alone is not None and not torch.equal(found, alone.index_select(axis or 0, rows)):
                raise _changes(self.model, what, self.few, count)

    def _measured(self) -> list[int | None]:
        """The dimension of each event that counts rows; None where it is ambiguous."""
        count = _MEASURED_ROWS * self.few
        events = self._run(torch.arange(count) % self._different)
        return [
            shape.index(count) if shape.count(count) == 1 else None
            for shape in (tuple(tensor.shape) for _, tensor in events)
        ]

    def _run(
        self, rows: torch.Tensor, *, to_the_end: bool = True
    ) -> list[tuple[str, torch.Tensor]]:
        events: list[tuple[str, torch.Tensor]] = []
        with self._watching(events, to_the_end), torch.inference_mode(), answering(StandIn()):
            try:
                with RowBits():
                    logits = self.model(
                        input_ids=self._ids[rows][None],
                        position_ids=self._positions[rows][None],
                        use_cache=False,
                        logits_to_keep=torch.arange(len(rows)),
                    ).logits
                events.append(("the logits", logits))
            except _Enough:
                pass
        return events

    @contextmanager
    def _watching(self, events: list[tuple[str, torch.Tensor]], to_the_end: bool) -> Iterator[None]:
        handles = []
        for path, module in self._modules.items():

            def before(_module: nn.Module, args: Any, path: str = path) -> None:
                if args and isinstance(args[0], torch.Tensor):
                    events.append((f"the input of {path}", args[0].clone()))

            def after(module: nn.Module, _args: Any, output: Any, path: str = path) -> None:
                output = output[0] if isinstance(output, tuple) and output else output
                if isinstance(output, torch.Tensor):
                    events.append((path, output.clone()))
                if not to_the_end and module is self.layers[-1]:
                    raise _Enough

            handles += [
                module.register_forward_pre_hook(before),
                module.register_forward_hook(after),
            ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def check_layer_bits(
    model: PreTrainedModel, row_multiple: int, max_model_len: int, max_rows: int
) -> None:
    """Checks that every kind of decoder layer, and the logits, give a row the same bits among any
    multiple of `row_multiple` rows up to about `max_rows`: activations, norms, rotary embeddings
    and everything else in the model. Raises UnsupportedModel that names the first module that does
    not.
    """
    tried = _Tried(model, row_multiple, max_model_len)
    most = min(max_rows, _MOST_ROWS)
    for multiple in _TRIED_ROWS:
        if multiple * row_multiple <= max(most, row_multiple):
            tried.check(multiple * row_multiple, to_the_end=multiple <= _TRIED_ROWS[2])
    if all(isinstance(vars(layer).get("forward"), FusedLayer) for layer in tried.layers):
        return  # all elementwise work is in C, which gives a whole row to one thread
    for count in _where_threads_join(tried.widths(), row_multiple, most):
        tried.check(count, to_the_end=False)


def _where_threads_join(widths: list[int], row_multiple: int, most: int) -> list[int]:
    """The row counts just above those at which the second, and the last, thread get a share of the
    work, for each width of a row."""
    counts = set()
    threads = torch.get_num_threads()
    for width, share in itertools.product(widths, {1, threads - 1} - {0}):
        first = share * _SHARE // (width * row_multiple)
        counts |= {row_multiple * (first + by) for by in range(1, 4)}
    return sorted(count for count in counts if 0 < count <= most)


def _one_of_each_kind(model: PreTrainedModel) -> list[tuple[str, nn.Module]]:
    """Path and module of the first decoder layer of each kind, in order."""
    lists = [
        (path, module)
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
    ]
    if not lists:
        return []
    path, layers = max(lists, key=lambda found: len(found[1]))
    kinds: dict[Any, tuple[str, nn.Module]] = {}
    for number, layer in enumerate(layers):
        kinds.setdefault(_kind(layer), (f"{path}.{number}", layer))
    return list(kinds.values())


def _kind(layer: nn.Module) -> tuple[Any, ...]:
    """Equal for layers that run the same code over tensors of the same shapes."""
    return tuple(
        (
            path,
            type(module),
            tuple((name, tuple(p.shape)) for name, p in module.named_parameters(recurse=False)),
            tuple(
                (name, value)
                for name, value in sorted(vars(module).items())
                if isinstance(value, bool | int | float | str) and name != "layer_idx"
            ),
        )
        for path, module in layer.named_modules()
    )
