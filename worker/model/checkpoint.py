"""Reads a checkpoint exactly as its files define it, or refuses it.

transformers only warns about tensors that are missing, unexpected or of another shape, fills gaps
with random numbers, and treats the codes of quantised weights as weights. Here each of these is a
refusal that names the tensors. Code in a checkpoint is never run, and nobody is prompted about it.

Owns: reading config.json, the headers of weight files, the call of from_pretrained. Does not own:
which differences between file and model are harmless (weight_report.py), whether the model can be
served (model_check.py, geometry.py).
"""

from __future__ import annotations

import json
import traceback
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from safetensors import SafetensorError, safe_open
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING
from transformers.utils import cached_file

from worker.kv.geometry import UnsupportedModel
from worker.model.weight_report import Report, check_report, count, is_mask

_POINTER: Final = b"version https://git-lfs"
_ADAPTER: Final = "adapter_config.json"
_WEIGHTS: Final = ("model.safetensors", "pytorch_model.bin")  # in transformers' order
_FLOATS: Final = ("F64", "F32", "F16", "BF16")
_INTEGERS: Final = ("BOOL", "I64", "I32", "I16", "U64", "U32", "U16")  # never packed codes
_TORCH_NAMES: Final = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.bool: "BOOL",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
}


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor as described by its file."""

    dtype: str  # in safetensors' notation: F32, BF16, F8_E4M3, I8, ...
    shape: tuple[int, ...]


def read_config(path: str) -> PreTrainedConfig:
    """config.json of a folder or Hub id. Raises UnsupportedModel if transformers has no causal
    language model for it, OSError if it cannot be found or read."""
    file = Path(path, "config.json")
    if file.is_file():
        _refuse_pointer(file)
    values, _ = PreTrainedConfig.get_config_dict(path)
    if not isinstance(values, dict):
        raise UnsupportedModel(f"{file} holds a {type(values).__name__}; allowed: a JSON object")
    model_type = values.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise UnsupportedModel(
            f"config.json of {path} names no model_type; it must be a transformers checkpoint"
        )
    if model_type not in CONFIG_MAPPING:
        raise UnsupportedModel(
            f"model_type is {model_type!r}, which transformers {transformers.__version__} does not "
            f"have" + _own_code(values)
        )
    config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise UnsupportedModel(
            f"{model_type}: transformers {transformers.__version__} has no causal language model "
            f"of this type" + _own_code(values)
        )
    for part in (config, config.get_text_config()):
        _check_method(model_type, getattr(part, "quantization_config", None))
    return config


def read_model(
    path: str, config: PreTrainedConfig, dtype: torch.dtype, attention: str
) -> PreTrainedModel:
    """The model with the weights from its files, in `dtype`, in host memory.

    Raises UnsupportedModel if files and configuration do not match, or if weights are not finite or
    quantised without a matching configuration; OSError if files cannot be found or read.
    """
    if Path(path, _ADAPTER).is_file():
        raise UnsupportedModel(
            f"{path} holds an adapter ({_ADAPTER}); Chairlift serves whole models: merge it first "
            f"(peft's merge_and_unload), and save the result elsewhere"
        )
    stored = stored_tensors(path, getattr(config, "transformers_weights", None))
    model: PreTrainedModel
    found: dict[str, Any]
    with _naming_conversions(config.model_type):
        model, found = AutoModelForCausalLM.from_pretrained(  # type: ignore[misc]
            path,
            config=config,
            dtype=dtype,
            attn_implementation=attention,
            # the scheduler reads that file
            generation_config=GenerationConfig(),
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # so that they are listed, and refused below by name
        )
    report = Report(
        missing=frozenset(found["missing_keys"]),
        unexpected=frozenset(found["unexpected_keys"]),
        misshapen=tuple((name, tuple(a), tuple(b)) for name, a, b in found["mismatched_keys"]),
    )
    check_report(model, report, {name: tensor.shape for name, tensor in stored.items()})
    if getattr(model, "hf_quantizer", None) is None:
        _refuse_codes(model, stored, report)
    _refuse_non_finite(model)
    return model


@contextmanager
def _naming_conversions(model_type: str) -> Iterator[None]:
    """Names the tensors of a failed conversion: experts that are stored one by one are stacked
    during loading, and transformers' error names none of them, only a local variable of its last
    frame does."""
    try:
        yield
    except RuntimeError as error:
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        found = getattr(frames[-1].f_locals.get("loading_info"), "conversion_errors", None)
        if not found:
            raise
        raise UnsupportedModel(
            f"{model_type}: {count(list(found))} not to be made of what the weight files hold "
            f"({min(found)}): parts of it are missing there, or of another shape or format"
        ) from error


def stored_tensors(path: str, file_name: str | None = None) -> dict[str, Stored]:
    """The tensors in the weight files of a folder or Hub id, from their headers alone; none for
    files that only transformers can find or read. Raises UnsupportedModel for damaged files."""
    for name in (file_name,) if file_name else _WEIGHTS:
        found = _cached(path, name)
        if found is not None:
            return dict(_headers(found))
        index = _cached(path, f"{name}.index.json")
        if index is not None:
            _refuse_pointer(index)
            shards = [_cached(path, shard) for shard in _shards(index)]
            return {
                tensor: stored
                for shard in shards
                if shard is not None  # transformers says which one is missing
                for tensor, stored in _headers(shard)
            }
    return {}


def _cached(path: str, name: str) -> Path | None:
    found = cached_file(
        path,
        name,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return None if found is None else Path(found)


def _shards(index: Path) -> list[str]:
    try:
        entries = json.loads(index.read_text())
        weight_map, _ = entries["weight_map"], entries["metadata"]  # transformers needs both
        return sorted({str(shard) for shard in weight_map.values()})
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise UnsupportedModel(
            f"{index} is no index of weight files: {type(error).__name__}: {error}"
        ) from error


def _headers(file: Path) -> Iterator[tuple[str, Stored]]:
    _refuse_pointer(file)
    if file.suffix != ".safetensors":
        yield from _pickled(file)
        return
    try:
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118  # it is no mapping
                tensor = opened.get_slice(name)
                yield name, Stored(tensor.get_dtype(), tuple(tensor.get_shape()))
    except (SafetensorError, ValueError) as error:
        raise UnsupportedModel(
            f"{file} ({file.stat().st_size:,} bytes) is damaged or not whole: {error}; get it again"
        ) from error


def _pickled(file: Path) -> Iterator[tuple[str, Stored]]:
    is_archive = zipfile.is_zipfile(file)  # files from torch before 1.6 are none; no mmap for them
    try:
        held = torch.load(file, map_location="meta", weights_only=True, mmap=is_archive)
    except Exception as error:
        reason = (str(error).strip() or "it ends too early").splitlines()[0]
        raise UnsupportedModel(
            f"{file} ({file.stat().st_size:,} bytes) is damaged or no file of tensors: "
            f"{type(error).__name__}: {reason}"
        ) from error
    if isinstance(held, Mapping):
        for name, tensor in held.items():
            if isinstance(tensor, torch.Tensor):
                dtype = _TORCH_NAMES.get(tensor.dtype, str(tensor.dtype).removeprefix("torch."))
                yield name, Stored(dtype, tuple(tensor.shape))


def _refuse_pointer(file: Path) -> None:
    with file.open("rb") as opened:
        if opened.read(len(_POINTER)) == _POINTER:
            raise UnsupportedModel(
                f"{file} is a Git LFS pointer, not the file itself: run git lfs pull there"
            )


def _own_code(values: Mapping[str, Any]) -> str:
    if values.get("auto_map"):
        return "; the checkpoint brings code of its own (auto_map), which Chairlift never runs"
    return "; a newer transformers may"


def _check_method(model_type: str, quantization: Any) -> None:
    """Refuses unknown quantisation methods: transformers skips them, and treats codes as
    weights."""
    if quantization is None:
        return
    if not isinstance(quantization, Mapping):
        quantization = quantization.to_dict()
    method = quantization.get("quant_method")
    if quantization.get("load_in_8bit") or quantization.get("load_in_4bit"):
        return  # bitsandbytes, whose methods have other names
    if method not in AUTO_QUANTIZATION_CONFIG_MAPPING:
        raise UnsupportedModel(
            f"{model_type}: quant_method is {method!r} in quantization_config, which transformers "
            f"{transformers.__version__} does not have; its methods are "
            f"{', '.join(sorted(map(str, AUTO_QUANTIZATION_CONFIG_MAPPING)))}"
        )


def _refuse_codes(model: PreTrainedModel, stored: Mapping[str, Stored], report: Report) -> None:
    """Refuses weights of 8 bits or less, or integers, that nothing dequantises."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    codes = [
        name
        for name, tensor in stored.items()
        if tensor.dtype not in _FLOATS
        and (tensor.dtype not in _INTEGERS or name in parameters)
        and name not in report.unexpected
        and not is_mask(name, tensor.shape)
    ]
    if codes:
        raise UnsupportedModel(
            f"{model.config.model_type}: {count(codes)} stored as quantised codes ({codes[0]} as "
            f"{stored[codes[0]].dtype}), but config.json has no "
            f"quantization_config that says what they stand for"
        )


def _refuse_non_finite(model: PreTrainedModel) -> None:
    for name, parameter in model.named_parameters():
        if parameter.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            continue
        if parameter.numel() and not all(torch.isfinite(bound) for bound in parameter.aminmax()):
            raise UnsupportedModel(
                f"{model.config.model_type}: {name} holds numbers that are not finite in "
                f"{str(parameter.dtype).removeprefix('torch.')}"
            )
