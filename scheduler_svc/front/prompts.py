"""Turns a client's prompt into token ids that the model can compute.

Whether the prompt is text, a chat or ids, the ids are checked in one place. No work proportional to
the prompt's length is done before that length has been checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from protos import inference_pb2 as pb
from scheduler_svc.core.limits import longest_request
from scheduler_svc.engine.events import ModelFacts
from scheduler_svc.errors import RequestRejected
from scheduler_svc.front.chats import chat_of
from scheduler_svc.front.served_model import Model
from scheduler_svc.text.prompt_length import TokenLimit

MAX_CONVERTED_TOKENS: Final = 1 << 18  # by Tokenize and Detokenize; more in longer contexts


def prompt_token_ids(
    request: pb.GenerateRequest | pb.TokenizeRequest, model: Model, add_special_tokens: bool = True
) -> list[int]:
    """At least one token, all in the model's vocabulary. Raises RequestRejected.

    A prompt that is far too long is refused before all of it is tokenised or copied.
    """
    limit = _conversion_limit(model.facts)
    if isinstance(request, pb.GenerateRequest):
        asked = request.sampling
        limit = _prompt_limit(model.facts, asked.HasField("max_tokens") and asked.max_tokens == 0)
    kind = request.WhichOneof("prompt")
    match kind:
        case "text":
            if not request.text:
                raise RequestRejected("text", "", "at least one character")
            ids = model.tokenizer.encode(request.text, add_special_tokens, limit)
        case "chat":
            ids = model.tokenizer.encode_chat(chat_of(request.chat, limit), limit)
        case "tokens" if isinstance(request, pb.GenerateRequest):
            _check_length(len(request.tokens.ids), limit, "the prompt in tokens")
            ids = list(request.tokens.ids)
        case _:
            raise RequestRejected("prompt", None, "one of text, tokens, chat")
    if not ids:
        raise RequestRejected("prompt", [], "at least one token")
    _check_length(len(ids), limit, "the prompt in tokens")
    _check_prompt_tokens(kind, ids, model)
    return ids


def _conversion_limit(facts: ModelFacts) -> TokenLimit:
    """The limit of Tokenize and Detokenize, never less than that of a prompt."""
    return TokenLimit(max(MAX_CONVERTED_TOKENS, facts.max_model_len), " in one call")


def detokenize(request: pb.DetokenizeRequest, model: Model) -> str:
    """Raises RequestRejected."""
    _check_length(len(request.token_ids), _conversion_limit(model.facts), "token_ids")
    ids = list(request.token_ids)
    skips_special = request.skip_special_tokens or not request.HasField("skip_special_tokens")
    facts = model.facts
    check_token_ids("token_ids", ids, max(facts.vocab_size, facts.num_embeddings))
    return model.tokenizer.decode(ids, skips_special)


def prompt_bytes(request: pb.GenerateRequest | pb.TokenizeRequest) -> int:
    """Size of the text to tokenise; 0 for token ids."""
    match request.WhichOneof("prompt"):
        case "text":
            return len(request.text)
        case "chat":
            return request.chat.ByteSize()
        case _:
            return 0


def _prompt_limit(facts: ModelFacts, is_scored_only: bool) -> TokenLimit:
    longest, bound = longest_request(facts.max_model_len, facts.pool_tokens)
    if is_scored_only:
        return TokenLimit(longest, f": {bound}")
    return TokenLimit(longest - 1, f": {bound}, and the answer needs one")


def _check_length(length: int, limit: TokenLimit, of: str) -> None:
    if length > limit.tokens:
        raise RequestRejected(f"length of {of}", length, f"at most {limit.tokens}{limit.reason}")


def _check_prompt_tokens(kind: str, token_ids: Sequence[int], model: Model) -> None:
    """An id beyond the embedding would fail the worker's step, with every request in it."""
    size = model.facts.num_embeddings
    if kind == "tokens":
        check_token_ids("tokens.ids", token_ids, size)
    elif max(token_ids) >= size:
        outside = next(token_id for token_id in token_ids if token_id >= size)
        raise RequestRejected(
            f"the id of the token {model.tokenizer.token(outside)!r} in {kind}",
            outside,
            f"0 to {size - 1} (the vocabulary): the model cannot read this token",
        )


def check_token_ids(field: str, token_ids: Sequence[int], size: int) -> None:
    if not token_ids or (min(token_ids) >= 0 and max(token_ids) < size):
        return
    index = next(i for i, token_id in enumerate(token_ids) if not 0 <= token_id < size)
    raise RequestRejected(
        f"{field}[{index}]", token_ids[index], f"0 to {size - 1} (the vocabulary)"
    )
