"""Options that several subcommands share: the server, and sampling."""

from __future__ import annotations

import argparse

from client.connection import DEFAULT_ADDRESS, MAX_DEADLINE_SECONDS
from client.messages import SamplingOptions, sampling_params

_LATER = "not supported by the server yet"
_ONE_ANSWER: tuple[tuple[str, type, str], ...] = (
    ("temperature", float, "0 always takes the most probable token"),
    ("top_p", float, "sample from the most probable tokens with this total probability"),
    ("top_k", int, "sample from this many tokens; 0 = all"),
    ("min_p", float, "drop tokens below this fraction of the highest probability"),
    ("max_tokens", int, "maximum length of the answer"),
    ("min_tokens", int, f"minimum length of the answer ({_LATER})"),
    ("repetition_penalty", float, f"above 1 discourages tokens that have occurred ({_LATER})"),
    ("frequency_penalty", float, f"penalty per occurrence of a token ({_LATER})"),
    ("presence_penalty", float, f"penalty for every token that has occurred ({_LATER})"),
    ("seed", int, "the same seed gives the same answer"),
)
_SAMPLING = (*_ONE_ANSWER, ("n", int, "number of answers per prompt"))


def add_server_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    group.add_argument(
        "--address", default=DEFAULT_ADDRESS, metavar="HOST:PORT", help="default: %(default)s"
    )
    group.add_argument(
        "--timeout", type=_seconds, metavar="SECONDS", help="deadline of each request"
    )


def add_sampling_options(
    parser: argparse.ArgumentParser, max_tokens: int | None = None, *, has_siblings: bool = False
) -> None:
    """`max_tokens` is that option's default, `has_siblings` adds --n. All others stay unset unless
    given, so that the model's defaults apply."""
    group = parser.add_argument_group("sampling (default: the model's generation config)")
    for name, kind, help_text in _SAMPLING if has_siblings else _ONE_ANSWER:
        default = max_tokens if name == "max_tokens" else None
        note = f"{help_text} (default: {default})" if default is not None else help_text
        flag = "--" + name.replace("_", "-")
        metavar = "N" if kind is int else "X"
        group.add_argument(flag, type=kind, metavar=metavar, default=default, help=note)
    group.add_argument(
        "--stop", action="append", metavar="TEXT", help="stop before this text; may be repeated"
    )
    group.add_argument(
        "--ignore-eos",
        action="store_true",
        default=None,
        help="continue past the model's end of sequence",
    )


def sampling_options(
    parser: argparse.ArgumentParser, options: argparse.Namespace
) -> SamplingOptions:
    """The given ones; exits with a message if one does not fit its protobuf field."""
    names = [name for name, _, _ in _SAMPLING] + ["stop", "ignore_eos"]
    given = {name: getattr(options, name, None) for name in names}
    chosen: SamplingOptions = {name: value for name, value in given.items() if value is not None}  # type: ignore[assignment]
    try:
        sampling_params(chosen)
    except ValueError as error:
        parser.error(str(error))
    return chosen


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds <= MAX_DEADLINE_SECONDS:
        raise argparse.ArgumentTypeError(
            f"{text} is not a number of seconds above 0 and up to {MAX_DEADLINE_SECONDS:g}"
        )
    return seconds
