"""Three real tokenizers, small enough to build in a test, that cut text in different ways."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{% for m in messages %}"
    "{% if m['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_level(merges: Sequence[tuple[str, str]] = ()) -> Tokenizer:
    """GPT-2's kind: every byte is a token; ids 0-255 in the order of ByteLevel's alphabet."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*alphabet, *(left + right for left, right in merges)]
    tokenizer = Tokenizer(
        models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=list(merges))
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(word, special=True) for word in ("<|im_start|>", "<|im_end|>")]
    )
    return tokenizer


def metaspace() -> Tokenizer:
    """sentencepiece's kind: ▁ for a space, the first one stripped, bytes for rare characters."""
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0)]
    pieces += [(f"<0x{byte:02X}>", -20.0) for byte in range(256)]
    pieces += [(piece, -2.0) for piece in ("▁", "▁the", "▁a", "▁END", "EN", "D", "\n")]
    pieces += [(letter, -5.0) for letter in "abcdefghijklmnopqrstuvwxyzENDT.,!"]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in ("<s>", "</s>")])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return tokenizer


def chat() -> PreTrainedTokenizerFast:
    """The byte-level one with a chat template and an EOS, as transformers wraps it."""
    return PreTrainedTokenizerFast(
        tokenizer_object=byte_level(), eos_token="<|im_end|>", chat_template=CHAT_TEMPLATE
    )
