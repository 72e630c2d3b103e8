"""Reads settings from the command line, the environment and a TOML file.

Turns the three sources into one checked `Config`. Every error names the source, and for an unknown
key the closest known one.
"""

from __future__ import annotations

import argparse
import itertools
import math
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any, Final

from scheduler_svc.settings.config import Config, ConfigError, Rule, UnknownKey, allowed, check
from scheduler_svc.settings.kubernetes import service_links

ENV_PREFIX: Final = "CHAIRLIFT_"
# Variables read elsewhere: the worker's model cache, the TOML file, keys of encrypted worker links.
OTHER_VARIABLES: Final = ("CHAIRLIFT_CACHE_DIR", "CHAIRLIFT_CONFIG")
OTHER_PREFIXES: Final = ("CHAIRLIFT_CURVE_",)

_SPECS: Final[dict[str, Field[Any]]] = {spec.name: spec for spec in fields(Config)}


def load_config(arguments: Sequence[str], environ: Mapping[str, str]) -> Config:
    """Raises ConfigError; `--help` prints and exits as argparse does."""
    options = _parse(arguments)
    path = options.pop("config", "") or environ.get("CHAIRLIFT_CONFIG", "")
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    layers = [_from_file(path)] if path else []
    layers += [_from_environment(environ), _from_command_line(options)]
    for key, value, where in itertools.chain(*layers):  # later layers win
        values[key] = value
        sources[key] = where
    _let_defaults_follow(values)
    try:
        return Config(**values)
    except ConfigError as error:  # an error in the combination of values
        if (source := sources.get(error.key)) is not None:
            raise ConfigError(
                error.key, values[error.key], source, str(error).partition("allowed: ")[2]
            ) from None
        raise


def _let_defaults_follow(values: dict[str, Any]) -> None:
    """Adjusts the default of one of two settings that bound each other if only the other is set."""
    rows, tokens = "max_requests_per_batch", "max_batch_tokens"
    if rows not in values and tokens in values:
        values[rows] = min(_SPECS[rows].default, values[tokens])
    elif tokens not in values and rows in values:
        values[tokens] = max(_SPECS[tokens].default, values[rows])


def build_parser() -> argparse.ArgumentParser:
    """All flags, with help. Values stay strings, so that there is one set of error messages."""
    parser = argparse.ArgumentParser(
        prog="chairlift scheduler",
        description="The scheduler process of Chairlift: gRPC to clients, ZeroMQ to a worker.",
        epilog=f"Every option is also a variable ({ENV_PREFIX}PORT) and a key of the TOML file.",
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="FILE", help="TOML file with settings")
    for spec in _SPECS.values():
        flag = "--" + spec.name.replace("_", "-")
        text = _help(spec)
        if str(spec.type) == "bool":
            parser.add_argument(flag, nargs="?", const="true", metavar="true|false", help=text)
        else:
            parser.add_argument(flag, metavar="VALUE", help=text)
    return parser


def parse_text(spec: Field[Any], text: str, source: str) -> Any:
    """A value from the command line or the environment."""
    value: Any = text
    try:
        match str(spec.type):
            case "int":
                value = int(text)
            case "float":
                value = float(text)
            case "float | None":
                value = None if text in ("", "none") else float(text)
            case "bool":
                value = {"true": True, "1": True, "false": False, "0": False}[text.lower()]
    except (ValueError, KeyError):
        raise ConfigError(spec.name, text, source, allowed(spec)) from None
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(spec.name, text, source, allowed(spec))
    check(spec, value, source)
    return value


def _parse(arguments: Sequence[str]) -> dict[str, str]:
    options, unknown = build_parser().parse_known_args(arguments)
    if unknown:
        if not re.match("--?[A-Za-z]", unknown[0]):
            stray = unknown[1] if unknown[0] == "--" and len(unknown) > 1 else unknown[0]
            allowed_there = "options that begin with --, such as --model NAME"
            raise ConfigError("argument", stray, "command line", allowed_there)
        flag, _, value = " ".join(unknown[:2]).replace(" ", "=", 1).partition("=")
        key = flag.lstrip("-").replace("-", "_")
        raise UnknownKey(key, value, "command line", _SPECS)
    return {key: text for key, text in vars(options).items() if text is not None}


def _from_command_line(options: Mapping[str, str]) -> Iterator[tuple[str, Any, str]]:
    for key, text in options.items():
        yield key, parse_text(_SPECS[key], text, "command line"), "command line"


def _from_environment(environ: Mapping[str, str]) -> Iterator[tuple[str, Any, str]]:
    links = service_links(environ)
    for name, text in sorted(environ.items()):
        if not name.startswith(ENV_PREFIX) or name in links:
            continue
        if name in OTHER_VARIABLES or name.startswith(OTHER_PREFIXES):
            continue
        source = f"environment {name}"
        key = name.removeprefix(ENV_PREFIX).lower()
        if key not in _SPECS:
            raise UnknownKey(key, text, source, _SPECS)
        yield key, parse_text(_SPECS[key], text, source), source


def _from_file(path: str) -> Iterator[tuple[str, Any, str]]:
    try:
        content = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError("config", path, reason, "a TOML file that can be read") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError("config", path, str(error), "a TOML file") from None
    for key, value in content.items():
        source = f"file {path}"
        spec = _SPECS.get(key)
        if spec is None:
            raise UnknownKey(key, value, source, _SPECS)
        if str(spec.type).startswith("float") and type(value) is int:
            value = float(value)
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(key, value, source, allowed(spec))
        check(spec, value, source)
        yield key, value, source


def _help(spec: Field[Any]) -> str:
    rule: Rule = spec.metadata["rule"]
    default = spec.default if spec.default is not MISSING else ""
    shown = str(default).lower() if isinstance(default, bool) else str(default)
    ending = f"{allowed(spec)}; default {shown}" if shown not in ("", "None") else allowed(spec)
    return f"{rule.help} ({ending})".replace("%", "%%").lstrip()
