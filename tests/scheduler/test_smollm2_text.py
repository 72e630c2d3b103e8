"""The embedded model's own tokenizer: real merges, a real template, no weights."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from scheduler_svc.text.chat_template import Chat
from scheduler_svc.text.text import OutputText
from scheduler_svc.text.tokenizer import Tokenizer

pytestmark = pytest.mark.smollm2


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    shared = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "chairlift"
    cache = Path(os.environ.get("CHAIRLIFT_CACHE_DIR") or shared)
    found = sorted(cache.glob("smollm2-135m-instruct*/tokenizer.json"))
    if not found:
        pytest.skip("the embedded model has not been converted on this machine")
    return Tokenizer.load(str(found[0].parent))


def test_chat_and_end(tokenizer: Tokenizer) -> None:
    """A wrong template or EOS gives answers that never end, or nonsense."""
    ids = tokenizer.encode_chat(Chat([{"role": "user", "content": "Hi"}]))
    text = tokenizer.decode(ids, skip_special_tokens=False)
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    ends = [tokenizer.decode([end], skip_special_tokens=False) for end in tokenizer.eos_token_ids]
    assert "<|im_end|>" in ends


@pytest.mark.parametrize("stop", [[], ["END"], ["\n\n", "ď"], ["👩‍👧"]])
def test_streams_equal_the_full_decode(tokenizer: Tokenizer, stop: list[str]) -> None:
    """Merges of a real vocabulary cut words, spaces and characters where toy ones do not."""
    text = "Once, naïve  ďábel\n\tสวัสดี 👩‍👩‍👧 don 't , END\n\n𐍈 x"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    for cut in range(len(ids) + 1):
        before = tokenizer.decode(ids[:cut])
        if before.endswith("\ufffd"):
            continue  # a prompt made of text ends in a whole character
        output = OutputText(tokenizer.decoder(True), ids[:cut], stop=stop)
        deltas = [*map(output.push, ids[cut:]), output.finish()]
        rest = text[len(before) :]
        ends = [rest.find(one) for one in stop if one in rest]
        assert "".join(deltas) == rest[: min(ends, default=len(rest))]
        assert not any("\ufffd" in delta for delta in deltas)
