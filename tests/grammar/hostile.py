"""Constraints made to hurt a server, or merely wrong; each must be refused before anything runs."""

from __future__ import annotations

import json
from typing import Any, Final

Sampling = dict[str, Any]


def _nested(opening: str, closing: str, depth: int, inner: str = "true") -> str:
    return opening * depth + inner + closing * depth


def _schema(**keywords: Any) -> Sampling:
    return {"json_schema": json.dumps(keywords)}


def _chain(name: str, line: str, count: int) -> str:
    rules = [line.format(i, i + 1) for i in range(count)]
    return "\n".join([f"start: {name}0", *rules, f'{name}{count}: "z"'])


def _references(keyword: str, depth: int, width: int) -> Sampling:
    """Definitions that each name the next one several times."""
    defs = {f"d{i}": {keyword: [{"$ref": f"#/$defs/d{i + 1}"}] * width} for i in range(depth)}
    return _schema(**{"$defs": defs | {f"d{depth}": {"type": "null"}}, "$ref": "#/$defs/d0"})


# name → the field, and a part of the reason
WRONG: Final[dict[str, tuple[Sampling, str]]] = {
    "no JSON": ({"json_schema": '{"type":'}, "JSON text"),
    "no schema": ({"json_schema": "5"}, "true or false"),
    "a list": ({"json_schema": "[]"}, "true or false"),
    "an empty text": ({"json_schema": ""}, "JSON text"),
    "NaN": ({"json_schema": '{"minimum": NaN}'}, "NaN is no JSON"),
    "half a surrogate": ({"json_schema": r'{"const": "\ud800"}'}, "hex escape"),
    "a huge number": ({"json_schema": '{"minimum": ' + "9" * 5000 + "}"}, "4300 digits"),
    "false": ({"json_schema": "false"}, "schema is false"),
    "an unknown type": (_schema(type="strin"), "Invalid type: strin"),
    "an unknown format": (_schema(type="string", format="nonsense"), "Unknown format"),
    "not": (_schema(type="integer", **{"not": {"const": 1}}), '"not"'),
    "uniqueItems": (_schema(type="array", uniqueItems=True), "uniqueItems"),
    "no such integer": (_schema(type="integer", minimum=5, maximum=3), "greater than"),
    "a missing definition": (_schema(**{"$ref": "#/$defs/nope"}), "does not exist"),
    "a file": (_schema(**{"$ref": "file:///etc/passwd"}), "does not fetch"),
    "a remote schema": (_schema(**{"$ref": "http://localhost:1/x.json"}), "does not fetch"),
    "a circle": (_schema(**{"$ref": "#"}), "no text satisfies it"),
    "a circle of allOf": (
        _schema(**{"$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"}),
        "no text satisfies it",
    ),
    "an unknown option": (_schema(**{"x-guidance": {"nonsense": 1}}), "unknown field"),
    "look-ahead": ({"regex": "a(?=b)"}, "look-around"),
    "look-behind": ({"regex": "(?<!b)a"}, "look-around"),
    "a back reference": ({"regex": r"(a)\1"}, "backreferences"),
    "an open class": ({"regex": "[a-"}, "unclosed character class"),
    "no character": ({"regex": r"[^\s\S]"}, "no text satisfies it"),
    "an open string": ({"grammar": 'start: "a'}, "lexer error"),
    "no start": ({"grammar": 'foo: "a"'}, "no start rule"),
    "an unknown rule": ({"grammar": "start: foo"}, 'unknown name: "foo"'),
    "endless recursion": ({"grammar": "start: start"}, "no text satisfies it"),
    "an import of a file": ({"grammar": "%import .foo.INT\nstart: INT"}, "Unknown common regex"),
    "an empty grammar": ({"grammar": ""}, "no start rule"),
    "no options": ({"choice": {"options": []}}, "at least 1 option"),
}

HOSTILE: Final[dict[str, tuple[Sampling, str]]] = {
    "megabytes of schema": (_schema(description="x" * (3 << 20)), "up to 131072 bytes"),
    "megabytes of regex": ({"regex": "a" * (3 << 20)}, "up to 131072 bytes"),
    "megabytes of Lark": ({"grammar": 'start: "' + "a" * (3 << 20)}, "up to 131072 bytes"),
    "megabytes of options": ({"choice": {"options": ["ab"] * 70_000}}, "up to 131072 bytes"),
    "nested schemas": ({"json_schema": _nested('{"items":', "}", 10_000)}, "nested less deeply"),
    "a nested constant": (
        {"json_schema": '{"const":' + _nested("[", "]", 10_000, "") + "}"},
        "nested less deeply",
    ),
    "some nested schemas": ({"json_schema": _nested('{"items":', "}", 200)}, "recursion limit"),
    "nested groups": ({"regex": _nested("(", ")", 20_000, "a")}, "nest"),
    "nested Lark": ({"grammar": "start: " + _nested("(", ")", 20_000, '"a"')}, "deeply nested"),
    # these overflow the stack of whoever compiles them
    "a chain of rules": ({"grammar": _chain("r", "r{}: r{}", 8000)}, "processor time"),
    "a chain of terminals": ({"grammar": _chain("R", 'R{}: R{} "a"', 6000)}, "processor time"),
    "a chain of definitions": (_references("anyOf", 2500, 1), "processor time"),
    # these double with each line
    "a bomb of terminals": ({"grammar": _chain("R", "R{0}: R{1} R{1}", 60)}, ""),
    "a bomb of options": ({"regex": "a?" * 500 + "a" * 500}, ""),
    "a large prime": (_schema(type="integer", multipleOf=999_999_937), "fuel"),
    "three primes": (
        _schema(allOf=[{"type": "integer", "multipleOf": p} for p in (9973, 9967, 9949)]),
        "fuel",
    ),
    "many optional properties": (
        _schema(type="object", properties={f"p{i}": {"type": "null"} for i in range(300)},
                additionalProperties=False),
        "items",
    ),
    "a product of choices": (
        _schema(allOf=[
            {"anyOf": [{"properties": {f"p{i}_{j}": {"type": "string"}}} for j in range(10)]}
            for i in range(20)
        ]),
        "too large",
    ),
    "exponential patterns": (
        _schema(type="string", pattern="^(a|b)*a(a|b){200}$", minLength=500, maxLength=9999),
        "",
    ),
}  # fmt: skip

# Look as bad, but a lexer of derivatives follows them at little cost, so they may run.
HARMLESS: Final[dict[str, Sampling]] = {
    "nested repetition": {"regex": "(a{1000}){1000}"},
    "nested stars": {"regex": "(((((a*)*)*)*)*)*b"},
    "an exponential automaton": {"regex": "(a|b)*a(a|b){3000}"},
    "a catastrophe of backtracking": {"regex": "(x+x+)+y"},
    "many words": {"regex": r"(\w{1,100}\s{1,100}){1,100}"},
    "a billion items": _schema(type="array", minItems=10**9),
    "a billion characters": _schema(type="string", minLength=10**9),
    "a billion laughs": _references("prefixItems", 30, 10),
    "any of a billion": _references("anyOf", 30, 10),
    "infinite objects": _schema(type="object", properties={"a": {"$ref": "#"}}, required=["a"]),
    "ambiguity": {"grammar": 'start: e\ne: e e | e e e | "a" |'},
    "some optional properties": _schema(
        type="object", properties={f"p{i}": {"type": "null"} for i in range(150)}
    ),
    "no end": {"grammar": 'start: "a" start'},
    "true": {"json_schema": "true"},
    "an empty schema": {"json_schema": "{}"},
}
