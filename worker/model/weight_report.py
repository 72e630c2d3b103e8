"""Which differences between a checkpoint's tensors and a model's are harmless. Pure but for the
model's names.

A tensor that is missing in the file is refused, and so is one of another shape: the model would
compute with random numbers. A tensor that only the file has is refused too, because something that
the weights were trained with would be ignored: a scale, a bias, a norm, a layer. Exceptions,
besides those that transformers itself makes for a family (_keys_to_ignore_on_load_*, tied weights):

- buffers that are computed and were saved by older versions: rotary frequencies, position ids,
  causal masks;
- whole parts outside the decoder, recognised by name: towers and projectors of other modalities,
  heads of other tasks (score, v_head, ...), layers that predict further tokens (mtp, eagle, ...);
  inside a decoder layer there are no exceptions;
- layers of such a predictor after the last one, num_nextn_predict_layers of them.

Owns: this rule, the wording of the refusal. Does not own: reading files (checkpoint.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from torch import nn
from transformers import PreTrainedModel

from worker.kv.geometry import UnsupportedModel

Shape = tuple[int, ...]

_COMPUTED: Final = re.compile(
    r"(^|\.)((\w*_)?inv_freq|position_ids|masked_bias|causal_mask|num_batches_tracked)$"
)
_MASK: Final = re.compile(r"(^|\.)(attn|attention|self_attn)\.bias$")  # GPT-2's and its like
_BESIDE: Final = re.compile(
    r"vision|visual|image|audio|speech|video|multi_?modal|^mm_|projector|connector|resampler"
    r"|^mtp|_mtp|nextn|eagle|medusa"
    r"|^score$|classifier|^v_head|value_head|reward|rm_head|qa_outputs|pooler|multiple_choice_head"
)
_SCALES: Final = re.compile(r"scale|zero|qweight|absmax|g_idx|amax", re.IGNORECASE)
_NAMED: Final = 4  # tensors of each kind


@dataclass(frozen=True, slots=True)
class Report:
    """What transformers reports about a load; by the model's names, where it has them."""

    missing: frozenset[str]
    unexpected: frozenset[str]
    misshapen: tuple[tuple[str, Shape, Shape], ...]  # (name, in the file, in the model)


def check_report(model: PreTrainedModel, report: Report, shapes: Mapping[str, Shape]) -> None:
    """Raises UnsupportedModel that names the tensors of every harmful difference. `shapes` are
    those of the file's tensors."""
    missing = sorted(name for name in report.missing if not _COMPUTED.search(name))
    unexpected = sorted(
        name
        for name in report.unexpected
        if not (_COMPUTED.search(name) or is_mask(name, shapes.get(name, ())))
        and not _is_beside(name, model)
    )
    misshapen = sorted(report.misshapen)
    if not (missing or unexpected or misshapen):
        return
    faults = []
    if missing:
        faults.append(f"{count(missing)} missing ({_first(missing)})")
    if misshapen:
        different = [f"{name} {list(a)}, not {list(b)}" for name, a, b in misshapen]
        faults.append(f"{count(different)} of another shape ({_first(different)})")
    if unexpected:
        faults.append(f"{count(unexpected)} without a place in the model ({_first(unexpected)})")
    raise UnsupportedModel(
        f"{model.config.model_type}: the weights do not fit config.json: {'; '.join(faults)}. "
        f"{_advice(missing, unexpected, shapes)}"
    )


def is_mask(name: str, shape: Shape) -> bool:
    """A causal mask [1, 1, T, T] that was saved as a buffer of its attention."""
    return _MASK.search(name) is not None and len(shape) == 4 and shape[:2] == (1, 1)


def _is_beside(name: str, model: PreTrainedModel) -> bool:
    """Whether the tensor belongs to a part that this model entirely lacks, and does not need."""
    module: nn.Module = model
    parts = name.split(".")
    for place, part in enumerate(parts):
        child = dict(module.named_children()).get(part)
        if child is None:
            parents = parts[:place]
            if isinstance(module, nn.ModuleList):
                return _is_further_layer(part, module, model)
            is_whole = place < len(parts) - 1 and not any(p.isdecimal() for p in parents)
            return is_whole and _BESIDE.search(part) is not None
        module = child
    return False


def _is_further_layer(number: str, layers: nn.ModuleList, model: PreTrainedModel) -> bool:
    further = getattr(model.config.get_text_config(), "num_nextn_predict_layers", None) or 0
    return number.isdecimal() and len(layers) <= int(number) < len(layers) + further


def _advice(missing: list[str], unexpected: list[str], shapes: Mapping[str, Shape]) -> str:
    prefix = _other_prefix(missing, unexpected or sorted(shapes))
    if any("lora_" in name or ".base_layer." in name for name in unexpected):
        return "They are a fine-tuning adapter's: merge it into the model and save that."
    if prefix:
        return f"The file's names begin with {prefix!r}: save the model without that wrapper."
    if any(_SCALES.search(name.rpartition(".")[2]) for name in unexpected):
        return (
            "They look like scales of quantised weights, which config.json must describe "
            "(quantization_config) in a way that transformers applies."
        )
    if [name for name in missing if "lm_head" in name] == missing and not unexpected and missing:
        return "If it shares its weights with the embedding, set tie_word_embeddings to true."
    return "See that config.json belongs to these weights and that they were saved whole."


def _other_prefix(missing: list[str], others: list[str]) -> str:
    """The prefix of the missing names in the file, if there is one."""
    wanted = set(missing)
    for name in others:
        for place, letter in enumerate(name):
            if letter == "." and name[place + 1 :] in wanted:
                return name[: place + 1]
    return ""


def count(names: list[str]) -> str:
    """The subject of a sentence, its verb included."""
    return f"{len(names)} tensor{' is' if len(names) == 1 else 's are'}"


def _first(names: list[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f", and {more} more" if more > 0 else "")
