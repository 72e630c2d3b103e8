"""Options that several subcommands share: which server, and how to sample."""

from __future__ import annotations

import argparse

from client.connection import DEFAULT_ADDRESS, LONGEST_SECONDS
from client.requests import SamplingOptions, sampling_params

_ONE_ANSWER: tuple[tuple[str, type, str], ...] = (
    ("temperature", float, "0 = always the most probable token"),
    ("top_p", float, "sample among the tokens that hold this share of probability"),
    ("top_k", int, "sample among this many tokens; 0 = all"),
    ("min_p", float, "drop tokens below this share of the best one's probability"),
    ("max_tokens", int, "longest answer"),
    ("min_tokens", int, "shortest answer (later: refused so far)"),
    (
        "repetition_penalty",
        float,
        "above 1 discourages tokens that have been there (later: refused so far)",
    ),
    ("frequency_penalty", float, "the same, by how often (later)"),
    ("presence_penalty", float, "the same, once (later)"),
    ("seed", int, "same seed, same answer"),
)
_SAMPLING = (*_ONE_ANSWER, ("n", int, "answers per prompt, side by side"))


def add_server(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    group.add_argument(
        "--address", default=DEFAULT_ADDRESS, metavar="HOST:PORT", help="default: %(default)s"
    )
    group.add_argument(
        "--timeout", type=_seconds, metavar="SECONDS", help="deadline of each request"
    )


def add_sampling(
    parser: argparse.ArgumentParser, max_tokens: int | None = None, *, has_siblings: bool = False
) -> None:
    """Options that are not given stay unset: the model's own defaults apply."""
    group = parser.add_argument_group("sampling (not given: the model's own defaults)")
    for name, kind, help_text in _SAMPLING if has_siblings else _ONE_ANSWER:
        default = max_tokens if name == "max_tokens" else None
        note = f"{help_text} (default: {default})" if default is not None else help_text
        flag = "--" + name.replace("_", "-")
        metavar = "N" if kind is int else "X"
        group.add_argument(flag, type=kind, metavar=metavar, default=default, help=note)
    group.add_argument(
        "--stop", action="append", metavar="TEXT", help="end before this text; may be repeated"
    )
    group.add_argument(
        "--ignore-eos", action="store_true", default=None, help="go on after the end"
    )


def sampling(parser: argparse.ArgumentParser, options: argparse.Namespace) -> SamplingOptions:
    """What was given of it; ends the program where no request could carry it."""
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
    if not 0 < seconds <= LONGEST_SECONDS:
        raise argparse.ArgumentTypeError(
            f"{text} is not a number of seconds above 0 and up to {LONGEST_SECONDS:g}"
        )
    return seconds
