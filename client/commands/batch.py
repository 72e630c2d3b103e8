"""`chairlift batch`: answers a file of requests into a file of results, and goes on where it was
interrupted."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc

from client.aio import AsyncChairlift
from client.answers import Answer
from client.batch.files import BatchFileError, Results, custom_ids, requests_but
from client.batch.openai_requests import BadRequest, batch_request
from client.batch.openai_responses import answer_line, error_line, reported_tokens
from client.commands.generate import require_server
from client.commands.options import add_server_options, at_least
from client.errors import (
    Cancelled,
    ChairliftError,
    Paused,
    QueueFull,
    Unauthenticated,
    Unavailable,
)
from client.mapping import DEFAULT_CONCURRENCY
from client.terminal.progress_bar import ProgressBar, progress_bar
from client.terminal.streams import print_error

# Nothing about a request is wrong then: it has no result, and the next run asks again.
_ENDS_THE_RUN = (Unavailable, Cancelled, Paused, QueueFull, Unauthenticated)
_WRONG_USAGE = 2

_DESCRIPTION = """\
Answer the requests of an OpenAI batch file: a JSON object per line, with custom_id, url
(/v1/chat/completions or /v1/completions) and body. Results are appended to OUT as they come, in any
order, each with its custom_id. Run the same command again to go on after an interruption: requests
that have a result are skipped.

A body's model is ignored, and tool calls are not parsed: an answer's text is its content. Fields of
the server's own SamplingParams are understood too; a request with an unknown field fails.
"""


def add_parser(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "batch",
        help="answer a file of requests in OpenAI's batch format",
        description=_DESCRIPTION,
        epilog="Exit code 0 if every request was answered, 1 if any failed or is left, 2 if IN or "
        "OUT is not such a file.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("requests", type=Path, metavar="IN", help="requests, one JSON per line")
    parser.add_argument("results", type=Path, metavar="OUT", help="results, appended")
    parser.add_argument(
        "--concurrency",
        type=at_least(1),
        default=DEFAULT_CONCURRENCY,
        metavar="N",
        help="parallel requests (default: %(default)s)",
    )
    parser.add_argument(
        "--retry-failed", action="store_true", help="ask again for results in OUT that are errors"
    )
    add_server_options(parser, has_retries=True)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    try:
        known = custom_ids(options.requests)
        results = Results(options.results, known, drops_failed=options.retry_failed)
    except BatchFileError as error:
        print_error(error)
        return _WRONG_USAGE
    with results:
        batch = _Batch(options, results, num_left=len(known) - len(results.finished))
        try:
            asyncio.run(batch.run())
        except ChairliftError as error:  # of the server, not of a request
            print_error(error)
        except KeyboardInterrupt:
            print_error(f"interrupted; {batch.summary()}; run it again to go on")
            raise
    is_whole = batch.num_left == 0
    print_error(batch.summary() if is_whole else f"{batch.summary()}; run it again to go on")
    return 0 if is_whole and batch.num_failed == 0 else 1


class _Batch:
    """One run over the requests that have no result yet."""

    def __init__(self, options: argparse.Namespace, results: Results, num_left: int) -> None:
        self.num_left = num_left
        self.num_failed = results.num_failed
        self._num_skipped = len(results.finished)
        self._num_answered = self._num_tokens = 0
        self._options = options
        self._results = results
        self._requests = requests_but(options.requests, results.finished)
        self._token_texts: dict[int, str] = {}

    async def run(self) -> None:
        """Ends when every request has a result, or when the server does not answer any more."""
        options = self._options
        workers = min(options.concurrency, self.num_left)
        if workers == 0:
            return
        async with AsyncChairlift(
            options.address, timeout=options.timeout, retries=options.retries
        ) as chairlift:
            await require_server(chairlift)
            with progress_bar(self.num_left, sys.stderr) as bar:
                tasks = [asyncio.ensure_future(self._work(chairlift, bar)) for _ in range(workers)]
                try:
                    await asyncio.gather(*tasks)
                finally:
                    for task in tasks:
                        task.cancel()
                    await asyncio.gather(*tasks, return_exceptions=True)

    def summary(self) -> str:
        parts = [f"{self._num_answered} answered ({self._num_tokens} tokens)"]
        parts.append(f"{self.num_failed} failed")
        if self._num_skipped:
            parts.append(f"{self._num_skipped} done before")
        if self.num_left:
            parts.append(f"{self.num_left} left")
        return ", ".join(parts)

    async def _work(self, chairlift: AsyncChairlift, bar: ProgressBar) -> None:
        for line in self._requests:  # shared: each takes the next
            result, tokens = await self._result(chairlift, line)
            self._results.append(result)
            self.num_left -= 1
            self._num_tokens += tokens
            if result["error"] is None:
                self._num_answered += 1
            else:
                self.num_failed += 1
            bar.advance(tokens)

    async def _result(
        self, chairlift: AsyncChairlift, line: dict[str, Any]
    ) -> tuple[dict[str, Any], int]:
        """The line of a request's result, and its output tokens."""
        custom_id: str = line["custom_id"]
        try:
            request = batch_request(line)
            answer = await chairlift.complete(
                request.prompt,
                priority=request.priority,
                cache_salt=request.cache_salt,
                **request.options,
            )
            await self._learn_tokens(chairlift, answer)
        except (BadRequest, TypeError, ValueError) as error:
            return error_line(custom_id, str(error), grpc.StatusCode.INVALID_ARGUMENT), 0
        except _ENDS_THE_RUN:
            raise
        except ChairliftError as error:
            return error_line(custom_id, str(error), error.status), 0
        tokens = sum(each.usage.completion_tokens for each in _all(answer))
        return answer_line(custom_id, answer, request.is_chat, self._token_texts), tokens

    async def _learn_tokens(self, chairlift: AsyncChairlift, answer: Answer) -> None:
        """Asks for the texts of tokens whose logprobs are reported, each token once per run."""
        for token in sorted(reported_tokens(answer) - self._token_texts.keys()):
            text = await chairlift.detokenize([token], skip_special_tokens=False)
            self._token_texts[token] = text


def _all(answer: Answer) -> Iterator[Answer]:
    yield answer
    yield from answer.siblings
