"""`chairlift demo`: serves the embedded model and streams several answers at once.

Six requests, three at a time: short answers leave the batch and waiting requests join it while
long answers continue. Fails unless every answer is complete and the server stops cleanly.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from dataclasses import dataclass
from typing import Any, Final

from client.aio import AsyncChairlift
from client.chat_messages import ChatMessage
from client.commands.generate import choose_display
from client.errors import ChairliftError
from client.processes.local_server import LocalServer
from client.terminal.display import Display, shortened
from client.terminal.streams import print_error

_AT_ONCE: Final = 3
_PROMPTS: Final = (  # (question, max_tokens)
    ("Write a short story about a fox who finds a lantern in the snow.", 120),
    ("What is the capital of France?", 24),
    ("Explain in two sentences why the sky is blue.", 72),
    ("Name three fruits.", 32),
    ("Give me a simple recipe for pancakes.", 96),
    ("Say good night in one sentence.", 24),
)
_CHART_WIDTH: Final = 60


@dataclass(slots=True)
class Span:
    """When one request waited and ran, in seconds since all were sent."""

    title: str
    first: float | None = None
    last: float = 0.0
    tokens: int = 0
    ending: str = "no answer"
    is_good: bool = False


def add_parser(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "demo",
        help="serve the embedded model and stream several answers",
        description=(
            "Start a server with the embedded model on a free port, stream "
            f"{len(_PROMPTS)} answers, {_AT_ONCE} at a time, and stop the server."
        ),
        allow_abbrev=False,
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Exit code 0 only if every answer was complete and the server stopped cleanly."""
    print(f"Starting `chairlift serve`, {_AT_ONCE} requests per batch.", flush=True)
    server = LocalServer(["--max-requests-per-batch", str(_AT_ONCE)])
    try:
        spans = asyncio.run(_stream_all(server))
    except ChairliftError as error:
        print_error(error)
        spans = []
    finally:
        code = server.stop()
    if spans:
        print("\n".join(timeline(spans)))
    failed = [span.title for span in spans if not span.is_good]
    for title in failed:
        print_error(f"no complete answer to {title!r}")
    if code != 0:
        print_error(f"the server ended with exit code {code}")
    if not spans or failed or code != 0:
        return 1
    print("Stopped cleanly. Next: `chairlift serve`, then `chairlift chat` in another terminal.")
    return 0


async def _stream_all(server: LocalServer) -> list[Span]:
    spans = [Span(question) for question, _ in _PROMPTS]
    lanes = {str(number + 1): span.title for number, span in enumerate(spans)}
    async with AsyncChairlift(server.address, retries=0) as chairlift:
        if not await server.is_ready(
            chairlift, lambda what: print(f"Waiting ({what}) …", flush=True)
        ):
            return []
        model = (await chairlift.model_info()).model
        print(f"Ready: {model}. {len(spans)} prompts, {_AT_ONCE} at a time:\n", flush=True)
        start = time.monotonic()
        with choose_display(lanes) as display:
            tasks = [
                _stream_one(chairlift, str(number + 1), max_tokens, span, start, display)
                for number, (span, (_, max_tokens)) in enumerate(zip(spans, _PROMPTS, strict=True))
            ]
            await asyncio.gather(*tasks)
    return spans


async def _stream_one(
    chairlift: AsyncChairlift,
    lane: str,
    max_tokens: int,
    span: Span,
    start: float,
    display: Display,
) -> None:
    # greedy, so that the demo is always the same
    stream = chairlift.generate(
        [ChatMessage("user", span.title)], temperature=0.0, max_tokens=max_tokens
    )
    try:
        async for delta in stream:
            span.last = time.monotonic() - start
            span.first = span.last if span.first is None else span.first
            span.tokens += len(delta.token_ids)
            display.delta(lane, delta.text)
    except ChairliftError as error:
        span.ending = f"failed: {error}"
    if stream.finish_reason is not None:
        span.ending = stream.finish_reason
        span.is_good = stream.finish_reason in ("stop", "length") and span.tokens > 0
    display.end(lane, f"{span.ending}, {span.tokens} tokens")


def timeline(spans: list[Span]) -> list[str]:
    """A chart of when each request waited (·) and ran (█)."""
    total = max(span.last for span in spans) or 1.0
    lines = ["", f"Requests waiting (·) and running (█) over {total:.1f} s:"]
    for number, span in enumerate(spans):
        first = span.last if span.first is None else span.first
        start, end = (round(_CHART_WIDTH * moment / total) for moment in (first, span.last))
        running = 0 if span.first is None else max(1, end - start)
        bar = ("·" * start + "█" * running).ljust(_CHART_WIDTH + 1)
        note = f"{span.tokens:4d} tokens, {span.ending}"
        lines.append(f"  {number + 1}  {bar} {note:<20}  {shortened(span.title, 40)}")
    return lines
