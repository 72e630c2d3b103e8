"""Text to tokens and back, without torch.

transformers' `PreTrainedTokenizerFast` loads the tokenizer; encoding and decoding use the Rust
tokenizer inside it, which is thread-safe, unlike the wrapper. They are called as batches of one,
because only batch calls release the GIL.

Does not own reading files (tokenizer_files.py), the model's defaults (model_defaults.py),
incremental text (text.py) or limits of requests (front/validation.py).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Self

from tokenizers import decoders

from scheduler_svc.errors import RequestRejected
from scheduler_svc.text.chat_template import Chat, ChatTemplate, NoChatTemplate
from scheduler_svc.text.control_tokens import (
    ControlTokens,
    encode_middles,
    strings_in,
    unmarked,
)
from scheduler_svc.text.model_defaults import eos_token_ids, model_defaults
from scheduler_svc.text.prompt_length import TokenLimit, refuse_if_too_long, token_bytes_of
from scheduler_svc.text.text import Decode, Pieces
from scheduler_svc.text.tokenizer_files import read_json, read_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

logger = logging.getLogger(__name__)

MAX_RENDERED_CHARS: Final = 1 << 26  # of a chat, if the tokenizer gives no bound


class Tokenizer:
    """A model's tokenizer, chat template and sampling defaults. Thread-safe."""

    def __init__(
        self,
        wrapped: PreTrainedTokenizerFast,
        generation_config: Mapping[str, Any] | None = None,
        model_config: Mapping[str, Any] | None = None,
    ) -> None:
        self._rust = wrapped.backend_tokenizer
        # Some tokenizer.json enable truncation or padding: right for training, wrong for serving.
        self._rust.no_truncation()
        self._rust.no_padding()
        self._pieces = {skip: Pieces(self.decoder(skip)) for skip in (False, True)}
        self.special_tokens = {
            token_id: token.content
            for token_id, token in self._rust.get_added_tokens_decoder().items()
            if token.special
        }
        self._token_bytes = token_bytes_of(self._rust)
        self._template: ChatTemplate | None = None
        try:
            self._template = ChatTemplate(wrapped)
        except NoChatTemplate as error:
            self._why_no_template = str(error)
            if wrapped.chat_template is not None:
                logger.warning("chat requests are refused: unusable chat template: %s", error)
        else:
            self._control_tokens = ControlTokens(self._rust, self._template.own_text)
        self.eos_token_ids = eos_token_ids(
            wrapped.eos_token_id, generation_config or {}, model_config or {}
        )
        self.defaults = model_defaults(generation_config or {})

    @classmethod
    def load(cls, path: str) -> Self:
        """From a folder or a Hub id. Raises OSError or ValueError for unreadable files."""
        return cls(
            read_tokenizer(path),
            read_json(path, "generation_config.json"),
            read_json(path, "config.json"),
        )

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def encode(
        self, text: str, add_special_tokens: bool = True, limit: TokenLimit | None = None
    ) -> list[int]:
        """Raises RequestRejected for a text that certainly has more tokens than the limit; one with
        slightly more may pass."""
        if limit is not None:
            self._refuse_if_too_long("text", text, limit)
        return self._encode_all([text], add_special_tokens)[0]

    def encode_chat(self, chat: Chat, limit: TokenLimit | None = None) -> list[int]:
        """Renders and encodes the model's chat template, up to where the answer begins. Special
        tokens are the template's own; those spelled in the chat are ordinary text. `limit` as in
        `encode`. Raises RequestRejected if there is no template, or if it refuses the chat.
        """
        if self._template is None:
            raise RequestRejected("chat", "given", f"text or tokens: {self._why_no_template}")
        max_chars = MAX_RENDERED_CHARS
        if limit is not None:
            num_chars = self._refuse_long_texts(chat, limit)
            if self._token_bytes is not None:
                max_chars = num_chars + limit.tokens * self._token_bytes.longest
        marked = self._control_tokens.mark(chat)
        rendered = self._template.render(marked or chat, max_chars)
        if limit is not None:
            self._refuse_if_too_long("chat", unmarked(rendered), limit)
        if marked is None:
            return self._encode_all([rendered], add_special_tokens=False)[0]
        try:
            return self._control_tokens.encode(rendered, self._encode_all)
        except ValueError as error:
            raise RequestRejected("chat.messages", "given", f"other messages: {error}") from error

    def _refuse_long_texts(self, chat: Chat, limit: TokenLimit) -> int:
        """Checks the chat's texts before the template reads them; returns their characters."""
        said = [message["content"] for message in chat.messages]
        num_chars = 0
        for name, value in (
            ("messages", said), ("tools", chat.tools), ("chat_template_kwargs", chat.variables)
        ):  # fmt: skip
            texts = list(strings_in(value))
            num_chars += sum(map(len, texts))
            if self._token_bytes is not None:
                num_bytes = sum(map(self._token_bytes.count, texts))
                self._token_bytes.check(f"chat.{name}", num_bytes, limit)
        for index, content in enumerate(said):
            for text in strings_in(content):
                self._refuse_if_too_long(f"chat.messages[{index}].content", text, limit)
        return num_chars

    def _refuse_if_too_long(self, field: str, text: str, limit: TokenLimit) -> None:
        refuse_if_too_long(
            field, text, limit, self._token_bytes, lambda piece: self._encode_all([piece])[0]
        )

    def _encode_all(
        self, texts: Sequence[str], add_special_tokens: bool = False
    ) -> list[list[int]]:
        """Encodes each text separately; the fast call computes no offsets."""
        encodings = self._rust.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in encodings]

    def encode_middles(self, texts: Sequence[str]) -> list[list[int]]:
        """Encodes each as a part of a longer text, without what a text begins with."""
        return encode_middles(texts, self._encode_all)

    def to_json(self) -> str:
        """As a tokenizer.json."""
        text: str = self._rust.to_str()
        return text

    def token(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it; None for an unknown id."""
        token: str | None = self._rust.id_to_token(token_id)
        return token

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """All at once and without clean-up of spaces, so that it equals the text of streams."""
        (text,) = self._rust.decode_batch(
            [list(token_ids)], skip_special_tokens=skip_special_tokens
        )
        return str(text)

    def decoder(self, skip_special_tokens: bool) -> Decode:
        """`decode` as a function of the tokens alone, without Python in between."""
        return partial(self._rust.decode, skip_special_tokens=skip_special_tokens)

    def pieces(self, skip_special_tokens: bool) -> Pieces | None:
        """The text of each token, shared by all requests; None unless the decoder joins them."""
        if not isinstance(self._rust.decoder, decoders.ByteLevel):
            return None
        return self._pieces[skip_special_tokens]
