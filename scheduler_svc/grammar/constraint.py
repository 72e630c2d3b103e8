"""Reads the field of SamplingParams that constrains an answer, and writes llguidance's grammar.

    json_schema   a JSON Schema; what llguidance does not implement is refused, never ignored
    json_object   any JSON object
    regex         the whole answer matches; Rust's syntax, without look-around
    grammar       Lark, in llguidance's dialect
    choice        one of the options

White space between JSON tokens is a space, or one or two line breaks and an indentation, as
llama.cpp's JSON grammars have it: models that may write any amount of it sometimes write nothing
else. A schema's own "x-guidance" may say otherwise.

llguidance's `no_forcing` is on: otherwise a text that has only one continuation is tokenised to its
end as soon as it is reached, which takes seconds for `(a{1000}){1000}`, and the model could not cut
it into the tokens that it finds most probable.

Owns the limits of size and form that need no compilation. Does not own compiling (grammars.py).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from protos import inference_pb2 as pb
from scheduler_svc.errors import RequestRejected
from scheduler_svc.grammar.limits import MAX_SOURCE_BYTES

JSON_OPTIONS: Final = {"whitespace_pattern": r"( |\n{1,2}[ \t]{0,20})"}
_START: Final = '%llguidance {"no_forcing": true}\nstart: @main'


@dataclass(frozen=True, slots=True)
class Constraint:
    field: str  # as messages name it: sampling.regex
    shown: object  # the client's value, for messages
    source: str  # the grammar as llguidance reads it; equal sources are equal grammars


def read_constraint(asked: pb.SamplingParams) -> Constraint | None:
    """None if the answer is free. Raises RequestRejected."""
    name = asked.WhichOneof("constraint")
    match name:
        case "json_schema":
            main = _schema(asked.json_schema)
        case "regex":
            _check_size("sampling.regex", [asked.regex])
            main = {"lark_grammar": _lark_of_regex(asked.regex)}
        case "grammar":
            _check_size("sampling.grammar", [asked.grammar])
            main = {"lark_grammar": asked.grammar}
        case "choice":
            main = {"lark_grammar": _lark_of_options(asked.choice.options)}
        case "json_object" if asked.json_object:
            main = {"json_schema": {"type": "object", "x-guidance": JSON_OPTIONS}}
        case _:
            return None
    value = list(asked.choice.options) if name == "choice" else getattr(asked, name)
    start = {"name": "start", "lark_grammar": _START}
    source = json.dumps({"grammars": [start, {"name": "main", **main}]})
    return Constraint(f"sampling.{name}", value, source)


def _schema(text: str) -> dict[str, Any]:
    field = "sampling.json_schema"
    _check_size(field, [text])
    try:
        schema = json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise RequestRejected(field, text, "JSON that is nested less deeply") from None
    except ValueError as error:
        raise RequestRejected(field, text, f"a JSON Schema as JSON text: {error}") from None
    if not isinstance(schema, dict | bool):
        raise RequestRejected(field, text, "a JSON Schema: an object, true or false")
    if schema is not False:
        own = {} if schema is True else schema
        options = own.get("x-guidance", {})
        if isinstance(options, dict):
            schema = {**own, "x-guidance": {**JSON_OPTIONS, **options}}
    return {"json_schema": schema}


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _lark_of_regex(regex: str) -> str:
    from llguidance import LLMatcher

    grammar = json.loads(LLMatcher.grammar_from_regex(regex))
    lark: str = grammar["grammars"][0]["lark_grammar"]
    return lark


def _lark_of_options(options: Sequence[str]) -> str:
    if not options:
        raise RequestRejected("sampling.choice.options", [], "at least 1 option")
    _check_size("sampling.choice.options", options)
    return "start: " + " | ".join(map(json.dumps, options))


def _check_size(field: str, texts: Sequence[str]) -> None:
    num_bytes = sum(len(text.encode()) for text in texts)
    if num_bytes > MAX_SOURCE_BYTES:
        raise RequestRejected(field, f"{num_bytes} bytes", f"up to {MAX_SOURCE_BYTES} bytes")
