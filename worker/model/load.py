"""From a model's name to a model that is ready to run: weights, dtype, device, geometry.

Owns: the order of loading, the choices in between (dtype, device, max_model_len), and that whatever
a foreign model makes fail becomes a refusal that names it. Does not own: finding or converting the
embedded model (embedded.py), reading files (checkpoint.py), reasons for refusal (model_check.py,
geometry.py), KV memory (memory/, kv/).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import psutil  # type: ignore[import-untyped]  # its stubs are no dependency
import torch
from torch import nn
from transformers import PreTrainedModel

from protos import link_pb2
from worker.attention.interface import ATTENTION_NAME, register
from worker.cpu_layers.deterministic import check_dense
from worker.cpu_layers.fusing import fuse_model
from worker.cpu_layers.packing import pack_model
from worker.kv.geometry import CacheGeometry, UnsupportedModel, check_layer_types, geometry_of
from worker.model.adapters import adapted_classes, place_positions
from worker.model.checkpoint import read_config, read_model
from worker.model.embedded import resolve_model
from worker.model.model_check import check_config
from worker.model.probe import check_step, observe, refusing
from worker.model.rope import pin_longrope
from worker.process import control_group
from worker.process.progress import Progress

_DTYPES: Final = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """A model in eval mode with our attention, and the facts that the scheduler needs."""

    model: PreTrainedModel
    hidden_states: nn.Module  # the module that returns the last hidden states of all tokens
    model_path: str  # the folder or Hub id for tokenizer and configs
    model_type: str
    architecture: str
    vocab_size: int  # columns of the logits
    max_model_len: int
    dtype: torch.dtype  # of weights and arithmetic
    kv_dtype: torch.dtype  # of keys and values in the pool
    device: torch.device
    geometry: (
        CacheGeometry  # one group per attention type; CacheGeometry.fitted adapts it to a pool
    )

    @property
    def num_embeddings(self) -> int:
        """Rows of the input embedding; some tokenizers have tokens beyond it."""
        weight: torch.Tensor = self.model.get_input_embeddings().weight  # type: ignore[assignment]
        return len(weight)


def load_model(configure: link_pb2.Configure, progress: Progress) -> LoadedModel:
    """Loads the model that `configure.model` names: by alias, folder or Hub id.

    Raises UnsupportedModel (a ValueError) for a model that cannot be served, ValueError for an
    invalid setting, OSError if it cannot be found or read.
    """
    with _refusing(configure.model):
        path = resolve_model(configure.model, progress)
    return load_folder(path, configure, progress)


def load_folder(path: str, configure: link_pb2.Configure, progress: Progress) -> LoadedModel:
    """`load_model` for a folder or Hub id that is already resolved."""
    if configure.num_threads > 0:
        torch.set_num_threads(configure.num_threads)
    with _refusing(path):
        return _load_folder(path, configure, progress)


def _load_folder(path: str, configure: link_pb2.Configure, progress: Progress) -> LoadedModel:
    progress("reading the configuration", 0.0)
    config = read_config(path)
    text_config = config.get_text_config()
    check_config(text_config)
    check_layer_types(text_config)
    if configure.deterministic:
        check_dense(text_config)
    device = _device(configure.device)
    dtype = _dtype(configure.dtype, text_config, device)
    kv_dtype = kv_dtype_of(configure.kv_cache_dtype, dtype, device, configure.weight_format)
    max_model_len = _max_model_len(configure.max_model_len, text_config)

    progress("loading weights", 0.1)
    register()
    with adapted_classes(config.model_type):
        model = read_model(path, config, dtype, ATTENTION_NAME)
    if configure.deterministic:
        check_dense(text_config, model)
    model.to(device).eval()  # type: ignore[arg-type]  # the decorator hides nn.Module.to
    place_positions(model)
    observed = observe(model, max_model_len)
    if not max_model_len:
        raise UnsupportedModel(
            f"{text_config.model_type}: its configuration names no max_position_embeddings; set "
            f"max_model_len"
        )
    geometry = geometry_of(
        config.model_type,
        observed.layers,
        configure.page_size,
        kv_dtype.itemsize,
        observed.shared_layers,
    )
    pack_model(
        model,
        configure.weight_format,
        lambda share: progress("packing weights", 0.6 + 0.3 * share),
        kept=observed.read_weights,
    )
    progress("checking the model", 0.9)
    pin_longrope(model, max_model_len)
    with refusing(config.model_type):
        fuse_model(model, geometry, max_model_len)
    check_step(model, observed, max_model_len)
    progress("loaded", 1.0)
    return LoadedModel(
        model=model,
        hidden_states=observed.hidden_states,
        model_path=path,
        model_type=config.model_type,
        architecture=type(model).__name__,
        vocab_size=observed.vocab_size,
        max_model_len=max_model_len,
        dtype=dtype,
        kv_dtype=kv_dtype,
        device=device,
        geometry=geometry,
    )


@contextmanager
def _refusing(path: str) -> Iterator[None]:
    """Turns whatever a model or its files make fail into a refusal, as it would fail again. Lack of
    memory and device errors pass unchanged, for they are not the model's fault."""
    try:
        yield
    except (UnsupportedModel, OSError, ImportError, torch.OutOfMemoryError):
        raise
    except MemoryError as error:
        raise MemoryError(_short_of_memory(path, error)) from error
    except ValueError as error:
        # ours say what is wrong; those of parsers name no file
        if type(error) is ValueError or type(error).__module__.startswith(f"{__package__}."):
            raise
        raise UnsupportedModel(f"{path}: {type(error).__name__}: {error}") from error
    except RuntimeError as error:
        if "allocate memory" in str(error):  # torch's allocator for the CPU
            raise MemoryError(_short_of_memory(path, error)) from error
        if isinstance(error, torch.AcceleratorError):
            raise
        raise UnsupportedModel(f"{path}: {type(error).__name__}: {error}") from error
    except Exception as error:
        raise UnsupportedModel(f"{path}: {type(error).__name__}: {error}") from error


def _short_of_memory(path: str, error: Exception) -> str:
    memory = psutil.virtual_memory()
    free, total = memory.available, memory.total
    allowed = control_group.free_memory()
    if allowed is not None and allowed < free:
        free = allowed
    return (
        f"{path}: not enough memory: {error or 'an allocation failed'}; "
        f"{free / 2**30:,.1f} of {total / 2**30:,.1f} GiB are available"
    )


def _device(wanted: str) -> torch.device:
    """ "" and auto: the first CUDA device if there is one, else the CPU."""
    if wanted in ("", "auto"):
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(wanted)
    except RuntimeError:
        raise ValueError(
            f"device is {wanted!r}; allowed are auto, cpu, cuda, cuda:N and mps"
        ) from None
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            raise ValueError(f"device is {wanted!r}, but this machine has {count} CUDA devices")
        return torch.device("cuda", device.index or 0)
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise ValueError("device is 'mps', but this machine has none")
    if device.type not in ("cpu", "mps"):
        raise ValueError(f"device is {wanted!r}; allowed are auto, cpu, cuda, cuda:N and mps")
    return device


def _dtype(wanted: str, text_config: Any, device: torch.device) -> torch.dtype:
    """ "" and auto: float32 on the CPU, where 16-bit arithmetic is slow; else the checkpoint's."""
    if wanted in ("", "auto"):
        checkpoint = getattr(text_config, "dtype", None)
        if device.type != "cpu" and checkpoint in _DTYPES.values():
            assert isinstance(checkpoint, torch.dtype)
            return checkpoint
        return torch.float32
    if wanted not in _DTYPES:
        raise ValueError(f"dtype is {wanted!r}; allowed are auto, {', '.join(_DTYPES)}")
    return _DTYPES[wanted]


def kv_dtype_of(
    wanted: str, dtype: torch.dtype, device: torch.device, weight_format: str
) -> torch.dtype:
    """The dtype in which keys and values are stored, by the setting kv_cache_dtype.

    "" and auto: the dtype the model computes in; but float16 with packed int8 weights (which exist
    for float32 on the CPU only), where answers are approximate anyway, memory then holds twice as
    many tokens, and reading float32 keys and values would be a large part of a decode step. Raises
    ValueError for any other value.
    """
    if wanted in ("", "auto"):
        is_int8 = weight_format == "int8" and (device.type, dtype) == ("cpu", torch.float32)
        return torch.float16 if is_int8 else dtype
    if wanted not in _DTYPES:
        raise ValueError(f"kv_cache_dtype is {wanted!r}; allowed are auto, {', '.join(_DTYPES)}")
    return _DTYPES[wanted]


def _max_model_len(wanted: int, text_config: Any) -> int:
    """The setting, or the model's length where it is 0; 0 if that is unknown."""
    if wanted < 0:
        raise ValueError(f"max_model_len is {wanted}; it must be at least 1, or 0 for the model's")
    longest = getattr(text_config, "max_position_embeddings", None)
    if not isinstance(longest, int) or longest < 1:  # xlnet has -1: no limit
        return wanted
    if wanted > longest:
        raise ValueError(
            f"max_model_len is {wanted}, but {text_config.model_type} has {longest} positions "
            f"(max_position_embeddings)"
        )
    return wanted or int(longest)
