"""Whatever a model's template does, the client learns of it, and nobody else notices."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from scheduler_svc.errors import RequestRejected
from scheduler_svc.text import chat_template
from scheduler_svc.text.chat_template import Chat
from scheduler_svc.text.tokenizer import Tokenizer
from tests.support.small_tokenizers import byte_level

HELLO = [{"role": "user", "content": "hello"}]


def tokenizer(template: Any, **special: str) -> Tokenizer:
    return Tokenizer(
        PreTrainedTokenizerFast(tokenizer_object=byte_level(), chat_template=template, **special)
    )


@pytest.mark.parametrize(
    ("template", "told"),
    [
        ("{{ raise_exception('no such role') }}", "(no such role)"),
        ("{% for m in messages %}{{ 'x' + loop.index }}{% endfor %}", "TypeError: can only concat"),
        ("{{ messages[0].nothing.at_all }}", "has no attribute 'nothing'"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ messages[7]['role'] }}", "has no element 7"),
        ("{{ messages[0]['content'] | int(none) + 'a' }}", "TypeError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{% for i in range(10 ** 9) %}x{% endfor %}", "Range too big"),
        ("{{ messages.__class__.__mro__ }}{{ messages.append(1) }}", "unsafe"),
        ("{{ messages[0]['content'].encode('ascii').decode('utf-16') }}", "UnicodeDecodeError"),
    ],
)
def test_a_template_that_fails_is_told(template: str, told: str) -> None:
    """It is the model's fault or the client's; "internal error" would help neither."""
    with pytest.raises(RequestRejected) as error:
        tokenizer(template).encode_chat(Chat(HELLO))
    assert "chat.messages is 'user'; allowed: what the model's chat template" in str(error.value)
    assert told in str(error.value)


def test_output_without_end_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a template would fill the memory, and never give its thread back."""
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}words {% endfor %}{% endfor %}"
    monkeypatch.setattr("scheduler_svc.text.tokenizer.MAX_RENDERED_CHARS", 10_000)
    with pytest.raises(RequestRejected, match="renders to at most 10000 characters"):
        tokenizer(endless).encode_chat(Chat(HELLO))
    monkeypatch.setattr("scheduler_svc.text.tokenizer.MAX_RENDERED_CHARS", 10**15)
    monkeypatch.setattr(chat_template, "MAX_RENDER_SECONDS", 0.0)
    with pytest.raises(RequestRejected, match="within 0 s"):
        tokenizer(endless).encode_chat(Chat(HELLO))


def test_the_template_knows_which_roles_there_are() -> None:
    """gpt-oss has a developer, others an observation: a list of ours would refuse them."""
    knows = tokenizer("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}")
    for role in ("developer", "observation", "tool_response", "критик"):
        ids = knows.encode_chat(Chat([{"role": role, "content": "x"}]))
        assert knows.decode(ids) == f"[{role}]x"


@pytest.mark.parametrize(
    ("template", "why"),
    [
        (None, "this model has no template"),
        ({"rag": "x", "tool_use": "y"}, "this model has templates, but no default one: rag"),
        ("{% for m in messages %}", "this model's template cannot be read: line 1: Unexpected end"),
        ("{% nonsense %}", "this model's template cannot be read"),
    ],
)
def test_models_without_a_template_that_could_be_used(template: Any, why: str) -> None:
    """Clients choose between chat and text by has_chat_template."""
    without = tokenizer(template)
    assert not without.has_chat_template
    with pytest.raises(RequestRejected, match=f"chat is 'given'; allowed: text or tokens: {why}"):
        without.encode_chat(Chat(HELLO))


def test_the_default_of_several_templates() -> None:
    named = tokenizer({"rag": "x", "default": "{{ messages[0].content }}"})
    assert named.has_chat_template
    assert named.decode(named.encode_chat(Chat(HELLO))) == "hello"


def test_a_template_is_rendered_as_transformers_does() -> None:
    """Templates are written for its environment: white space, filters, globals, special tokens."""
    template = (
        "{{ bos_token }}\n  {% if tools %}no{% endif %}\n{%- for m in messages -%}\n"
        "    {% if loop.last %}{% continue %}{% endif %}{{ m | tojson(indent=1) }}\n"
        "{% endfor %}{% set ns = namespace(a=1) %}{{ ns.a }}{{ documents is none }}"
        "{% generation %}{{ messages[-1].content }}{% endgeneration %}"
        "{% if add_generation_prompt %}{{ eos_token }}{% endif %}"
    )
    special = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=byte_level(), chat_template=template, **special
    )
    messages = [*HELLO, {"role": "assistant", "content": "é <&>"}]
    want = wrapped.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = Tokenizer(wrapped).encode_chat(Chat(messages))
    assert Tokenizer(wrapped).decode(ids, skip_special_tokens=False) == want
