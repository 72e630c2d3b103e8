"""Text to tokens and back, and the model's own defaults; without torch.

`PreTrainedTokenizerFast` is the one class of transformers that loads any tokenizer.json without
importing torch. It is used for loading and for chat templates; encoding and decoding go to the
Rust tokenizer inside it, which may be called from several threads, as the wrapper may not.

Owns reading tokenizer files, generation_config.json and config.json of a model. Does not own
incremental text (text.py) nor what a request may ask (admission.py).
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import sys
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from jinja2 import TemplateError
from tokenizers import decoders

from scheduler_svc.errors import RequestRejected
from scheduler_svc.text import Decode, Pieces

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

log = logging.getLogger(__name__)

# Defaults of generation_config.json that this version can honour, and what the API allows of
# them; and those that it cannot yet, with their neutral value.
DEFAULTS_NOW: Final = {
    "temperature": (0.0, math.inf),
    "top_p": (sys.float_info.min, 1.0),
    "top_k": (0, math.inf),
    "min_p": (0.0, 1.0),
}
DEFAULTS_LATER: Final = {"repetition_penalty": 1.0}


def import_ahead() -> None:
    """Begin to import transformers in a thread: seconds that nobody need wait for, as a tokenizer
    is read when a worker has loaded its model. Errors are left to who reads it."""
    threading.Thread(target=_import_transformers, name="imports").start()


def _import_transformers() -> None:
    with contextlib.suppress(ImportError):
        from transformers import PreTrainedTokenizerFast  # noqa: F401
        from transformers.utils.hub import cached_file  # noqa: F401


class Tokenizer:
    """What the scheduler process knows of a model's files."""

    def __init__(
        self,
        wrapped: PreTrainedTokenizerFast,
        generation_config: Mapping[str, Any] | None = None,
        model_config: Mapping[str, Any] | None = None,
    ) -> None:
        self._wrapped = wrapped
        self._rust = wrapped.backend_tokenizer
        # Some tokenizer.json ask for cutting or padding: good for training, wrong for serving.
        self._rust.no_truncation()
        self._rust.no_padding()
        self._pieces = {skip: Pieces(self.decoder(skip)) for skip in (False, True)}
        self.has_chat_template = wrapped.chat_template is not None
        self.eos_token_ids = _eos_token_ids(
            wrapped.eos_token_id,
            (generation_config if generation_config is not None else model_config) or {},
        )
        self.default_sampling = _default_sampling(generation_config or {})

    @classmethod
    def load(cls, path: str) -> Self:
        """From a folder or a Hub id; raises OSError or ValueError when there is none to load."""
        from transformers import PreTrainedTokenizerFast  # see import_ahead

        try:
            wrapped = PreTrainedTokenizerFast.from_pretrained(path)
        except (OSError, ValueError):
            raise
        except Exception as error:  # what the Rust side raises has no type of its own
            raise ValueError(f"tokenizer.json cannot be read: {error}") from error
        return cls(
            wrapped, _read_json(path, "generation_config.json"), _read_json(path, "config.json")
        )

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = self._rust.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """The model's chat template, up to where the answer begins; its special tokens included.

        Raises RequestRejected when there is no template, or when it refuses the messages.
        """
        if not self.has_chat_template:
            raise RequestRejected("chat", "given", "text or tokens: this model has no template")
        try:
            text = self._wrapped.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
            )
        except TemplateError as error:
            roles = ", ".join(message["role"] for message in messages)
            raise RequestRejected(
                "chat.messages", roles, f"what the model's chat template takes ({error})"
            ) from error
        return self.encode(str(text), add_special_tokens=False)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """All at once, and with nothing tidied up, so that it equals what streams show."""
        text: str = self._rust.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def decoder(self, skip_special_tokens: bool) -> Decode:
        """`decode` as a function of the tokens alone, without any layer that costs time."""
        return partial(self._rust.decode, skip_special_tokens=skip_special_tokens)

    def pieces(self, skip_special_tokens: bool) -> Pieces | None:
        """The texts of single tokens, where joined they are the text; one object for all."""
        if not isinstance(self._rust.decoder, decoders.ByteLevel):
            return None
        return self._pieces[skip_special_tokens]


def _read_json(path: str, name: str) -> dict[str, Any] | None:
    """A JSON object of the model, or None when the model has no such file."""
    from transformers.utils.hub import cached_file

    found = cached_file(path, name, _raise_exceptions_for_missing_entries=False)
    if found is None:
        return None
    content = json.loads(Path(found).read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ValueError(f"{found} holds no JSON object")
    return content


def _eos_token_ids(own: int | None, config: Mapping[str, Any]) -> tuple[int, ...]:
    """The tokenizer's EOS and those of the generation config (of the model's, where it has none).

    transformers' `generate` knows only the latter; a chat model's tokenizer often knows the token
    that ends a turn where its generation config names only the one that ends a text.
    """
    listed = config.get("eos_token_id")
    ids = listed if isinstance(listed, list) else [listed]
    return tuple(sorted({token_id for token_id in [own, *ids] if token_id is not None}))


def _default_sampling(config: Mapping[str, Any]) -> dict[str, float | int]:
    """The values that the file states; transformers' own defaults are none of the model's."""
    for name, neutral in DEFAULTS_LATER.items():
        if config.get(name) not in (None, neutral):
            log.warning(
                "the model's generation config asks for %s %s, which this version does not have: "
                "requests that leave it unset run with %s",
                name,
                config[name],
                neutral,
            )
    return {
        name: config[name]
        for name, (minimum, maximum) in DEFAULTS_NOW.items()
        if isinstance(config.get(name), int | float) and minimum <= config[name] <= maximum
    }
