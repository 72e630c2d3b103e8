"""Options that several subcommands share: the server, and sampling."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Final

from client.connection import DEFAULT_ADDRESS, MAX_DEADLINE_SECONDS
from client.messages import GenerateOptions, sampling_params
from client.resuming import DEFAULT_RETRIES

_NUMBERS: Final[tuple[tuple[str, type, str], ...]] = (
    ("temperature", float, "0 always takes the most probable token"),
    ("top_p", float, "sample from the most probable tokens with this total probability"),
    ("top_k", int, "sample from this many tokens; 0 = all"),
    ("min_p", float, "drop tokens below this fraction of the highest probability"),
    ("max_tokens", int, "maximum length of the answer"),
    ("min_tokens", int, "minimum length of the answer"),
    ("repetition_penalty", float, "above 1 discourages tokens that have occurred"),
    ("frequency_penalty", float, "penalty per occurrence of a token in the answer"),
    ("presence_penalty", float, "penalty for every token that has occurred in the answer"),
    ("seed", int, "the same seed gives the same answer"),
    ("speculate", int, "verify up to N guessed tokens per step; text that repeats comes faster"),
)
# these need an output that shows more than one text as it grows
_OF_SEVERAL: Final[tuple[tuple[str, type, str], ...]] = (
    ("n", int, "number of answers per prompt"),
    ("beam_width", int, "beam search with N beams; the best ones are printed when they end"),
    ("length_penalty", float, "beams: above 0 favours long answers, below 0 short ones"),
    ("logprobs", int, "report each token's log probability, and the N best beside it (--json)"),
    ("prompt_logprobs", int, "the same for the prompt's tokens (--json)"),
)
_FLAGS: Final = (
    ("ignore_eos", "continue past the model's end of sequence"),
    ("json_object", "answer with a JSON object"),
)
_LISTS: Final = (
    ("stop", "stop before this text; may be repeated"),
    ("bad_words", "a text that the answer must not have; may be repeated"),
    ("choice", "answer with one of these texts; may be repeated"),
)
_TEXTS: Final = (
    ("json_schema", "answer with JSON that this schema allows"),
    ("regex", "answer with a text that this regular expression matches as a whole"),
    ("grammar", "answer with a text of this Lark grammar"),
)
_SINGULAR: Final = {"bad_words": "bad-word"}


def add_server_options(parser: argparse.ArgumentParser, *, has_retries: bool = False) -> None:
    """`has_retries` adds --retries, for commands that generate."""
    group = parser.add_argument_group("server")
    group.add_argument(
        "--address", default=DEFAULT_ADDRESS, metavar="HOST:PORT", help="default: %(default)s"
    )
    group.add_argument(
        "--timeout", type=_seconds, metavar="SECONDS", help="deadline of each request"
    )
    if has_retries:
        group.add_argument(
            "--retries",
            type=at_least(0),
            default=DEFAULT_RETRIES,
            metavar="N",
            help="attempts in a row to reach a server that is away or full (default: %(default)s)",
        )


def add_sampling_options(
    parser: argparse.ArgumentParser, max_tokens: int | None = None, *, has_siblings: bool = False
) -> None:
    """`max_tokens` is that option's default, `has_siblings` adds the options for several answers.
    All others stay unset unless given, so that the model's defaults apply."""
    group = parser.add_argument_group("sampling (default: the model's generation config)")
    for name, kind, help_text in (*_NUMBERS, *(_OF_SEVERAL if has_siblings else ())):
        default = max_tokens if name == "max_tokens" else None
        note = f"{help_text} (default: {default})" if default is not None else help_text
        metavar = "N" if kind is int else "X"
        group.add_argument(_flag(name), type=kind, metavar=metavar, default=default, help=note)
    for name, help_text in _FLAGS:
        group.add_argument(_flag(name), action="store_true", default=None, help=help_text)
    for name, help_text in _LISTS:
        group.add_argument(_flag(name), dest=name, action="append", metavar="TEXT", help=help_text)
    for name, help_text in _TEXTS:
        note = f"{help_text}; @FILE reads it from a file"
        group.add_argument(_flag(name), type=_text_or_file, metavar="TEXT", help=note)


def sampling_options(
    parser: argparse.ArgumentParser, options: argparse.Namespace
) -> GenerateOptions:
    """The given ones; exits with a message if one does not fit its protobuf field."""
    tables = (_NUMBERS, _OF_SEVERAL, _FLAGS, _LISTS, _TEXTS)
    given = {row[0]: getattr(options, row[0], None) for table in tables for row in table}
    chosen: GenerateOptions = {name: value for name, value in given.items() if value is not None}  # type: ignore[assignment]
    try:
        sampling_params(chosen)
    except ValueError as error:
        parser.error(str(error))
    return chosen


def at_least(minimum: int) -> Callable[[str], int]:
    """The type of an option that is an integer of at least `minimum`."""

    def integer(text: str) -> int:
        if not text.lstrip("+-").isdecimal() or int(text) < minimum:
            raise argparse.ArgumentTypeError(f"{text} is not an integer of at least {minimum}")
        return int(text)

    return integer


def _flag(name: str) -> str:
    return "--" + _SINGULAR.get(name, name).replace("_", "-")


def _text_or_file(text: str) -> str:
    if not text.startswith("@"):
        return text
    try:
        return Path(text[1:]).read_text(encoding="utf-8")
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text[1:]}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise argparse.ArgumentTypeError(
            f"{text[1:]}: byte 0x{error.object[error.start]:02x} is not UTF-8 text"
        ) from None


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds <= MAX_DEADLINE_SECONDS:
        raise argparse.ArgumentTypeError(
            f"{text} is not a number of seconds above 0 and up to {MAX_DEADLINE_SECONDS:g}"
        )
    return seconds
