"""Text to tokens and back; without torch.

transformers' `PreTrainedTokenizerFast` is used for loading and for chat templates; encoding and
decoding go to the Rust tokenizer inside it, which may be called from several threads, as the
wrapper may not.

Does not own reading files (tokenizer_files.py), the model's defaults (model_defaults.py),
incremental text (text.py) or what a request may ask (admission.py).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from jinja2 import TemplateError, TemplateSyntaxError
from tokenizers import decoders

from scheduler_svc.errors import RequestRejected
from scheduler_svc.model_defaults import default_sampling, eos_token_ids
from scheduler_svc.text import Decode, Pieces
from scheduler_svc.tokenizer_files import read_json, read_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

log = logging.getLogger(__name__)


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
        self.has_chat_template = _has_chat_template(wrapped)
        self.eos_token_ids = eos_token_ids(
            wrapped.eos_token_id, generation_config or {}, model_config or {}
        )
        self.default_sampling = default_sampling(generation_config or {})

    @classmethod
    def load(cls, path: str) -> Self:
        """From a folder or a Hub id. Raises OSError or ValueError for what cannot be read."""
        return cls(
            read_tokenizer(path),
            read_json(path, "generation_config.json"),
            read_json(path, "config.json"),
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


def _has_chat_template(wrapped: PreTrainedTokenizerFast) -> bool:
    """Whether there is one for plain messages, and it is a template. What it makes of them is a
    matter of each request."""
    if wrapped.chat_template is None:
        return False
    why = None
    try:
        template = wrapped.get_chat_template()
        if not isinstance(template, str):
            why = f"{template!r} is not a text"
    except ValueError as error:  # there are only named ones, for other uses
        why = str(error)
    if why is None:
        try:  # compiles it
            wrapped.apply_chat_template([{"role": "user", "content": "."}], tokenize=False)
        except TemplateSyntaxError as error:
            why = f"line {error.lineno}: {error}"
        except Exception as error:
            log.debug("the chat template refuses a single message of a user: %s", error)
    if why is not None:
        log.warning("the model's chat template cannot be used, so chat is refused: %s", why)
    return why is None
