"""`chairlift generate`: streams one answer as plain text, several side by side, or JSON."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import importlib.util
import io
import json
import sys
from dataclasses import dataclass
from typing import Any

from client.aio import AsyncChairlift
from client.aio_stream import AsyncTokenStream
from client.answers import Answer
from client.chat_messages import ChatMessage
from client.commands.options import add_sampling_options, add_server_options, sampling_options
from client.connection import READY_SECONDS
from client.errors import ChairliftError, Unreachable
from client.messages import GenerateOptions, Prompt, generate_request
from client.terminal.display import Display, PlainText, TaggedLines
from client.terminal.panels import MAX_PANELS, Panels
from client.terminal.streams import print_error, printable, why_not_text

_DEFAULT_MAX_TOKENS = 256

_EXAMPLES = """\
examples:
  chairlift generate "Once upon a time"
  chairlift generate --n 3 "Once upon a time"
  chairlift generate --chat "Why is the sky blue?" "Name three rivers."
  cat letter.txt | chairlift generate -
  chairlift generate --lines --json - < prompts.txt > answers.jsonl
"""


@dataclass(frozen=True, slots=True)
class Job:
    """The options that apply to every prompt."""

    sampling: GenerateOptions
    is_chat: bool
    system: str | None
    priority: int | None
    cache_salt: str
    concurrency: int  # maximum requests in progress
    is_json: bool


def add_parser(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "generate",
        help="stream answers to one or several prompts",
        description="Stream the model's continuation of each PROMPT; several run at once.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "prompts", nargs="*", metavar="PROMPT", help="- (default in a pipe) reads standard input"
    )
    parser.add_argument(
        "--lines", action="store_true", help="standard input holds one prompt per line"
    )
    parser.add_argument("--chat", action="store_true", help="send each PROMPT as a chat message")
    parser.add_argument("--system", metavar="TEXT", help="system message; implies --chat")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object per answer, as answers finish"
    )
    parser.add_argument(
        "--concurrency", type=int, default=64, metavar="N", help="parallel requests (default: 64)"
    )
    parser.add_argument("--priority", type=int, metavar="N", help="lower values run first")
    parser.add_argument(
        "--cache-salt", default="", metavar="TEXT", help="share cached prefixes only with this salt"
    )
    add_sampling_options(parser, max_tokens=_DEFAULT_MAX_TOKENS, has_siblings=True)
    add_server_options(parser, has_retries=True)
    parser.set_defaults(run=lambda options: run(parser, options))


def run(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """Exit code 0 if every prompt was answered, else 1."""
    if options.concurrency < 1:
        parser.error(f"--concurrency is {options.concurrency}; allowed: at least 1")
    prompts = read_prompts(parser, options.prompts, options.lines)
    sampling = sampling_options(parser, options)
    for name in ("logprobs", "prompt_logprobs"):
        if name in sampling and not options.json:
            parser.error(f"--{name.replace('_', '-')} needs --json, which prints them")
    try:
        generate_request("", sampling, priority=options.priority, cache_salt=options.cache_salt)
    except ValueError as error:
        parser.error(str(error))
    job = Job(
        sampling=sampling,
        is_chat=options.chat or options.system is not None,
        system=options.system,
        priority=options.priority,
        cache_salt=options.cache_salt,
        concurrency=options.concurrency,
        is_json=options.json,
    )
    return asyncio.run(_answer_all(options.address, options.timeout, options.retries, prompts, job))


def read_prompts(
    parser: argparse.ArgumentParser, given: list[str], is_one_per_line: bool
) -> list[str]:
    """The prompts of the command line, with `-` replaced by those of standard input."""
    if not given:
        if sys.stdin.isatty():
            parser.error("PROMPT is missing; allowed: text, or - for standard input")
        given = ["-"]
    if given.count("-") > 1:
        parser.error("- is given twice; standard input can be read only once")
    if is_one_per_line and "-" not in given:
        parser.error("--lines applies to standard input; add - as PROMPT")
    prompts: list[str] = []
    for prompt in given:
        if prompt == "-":
            prompts.extend(_standard_input(parser, is_one_per_line))
        else:
            prompts.append(prompt)
    if not prompts:
        parser.error("standard input is empty; allowed: at least one prompt")
    return prompts


def _standard_input(parser: argparse.ArgumentParser, is_one_per_line: bool) -> list[str]:
    if is_one_per_line and isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(newline="\n")  # a lone carriage return is no line end
    text = sys.stdin.read().removeprefix("\ufeff")  # the byte order mark of some editors
    if (reason := why_not_text(text)) is not None:
        parser.error(f"standard input: {reason}; convert it, for example with iconv")
    if is_one_per_line:
        return [line.removesuffix("\r") for line in text.split("\n") if line.strip()]
    # the final newline of echo and of editors is not part of the prompt
    return [text.removesuffix("\n")]


async def _answer_all(
    address: str, timeout_seconds: float | None, retries: int, prompts: list[str], job: Job
) -> int:
    slots = asyncio.Semaphore(job.concurrency)
    async with AsyncChairlift(address, timeout=timeout_seconds, retries=retries) as chairlift:
        await require_server(chairlift)
        if job.is_json:
            tasks = [
                _answer_as_json(chairlift, number, prompt, job, slots)
                for number, prompt in enumerate(prompts)
            ]
            return max(await asyncio.gather(*tasks))
        num_siblings = job.sampling.get("n") or 1
        lanes = {
            _lane(number, index, num_siblings): prompt
            for number, prompt in enumerate(prompts)
            for index in range(num_siblings)
        }
        with choose_display(lanes) as display:
            tasks = [
                _answer_on_display(chairlift, number, prompt, job, slots, display)
                for number, prompt in enumerate(prompts)
            ]
            codes = await asyncio.gather(*tasks)
        return max(codes)


async def require_server(chairlift: AsyncChairlift) -> None:
    """Raises Unreachable at once where no server answers: a wrong address is more likely than a
    server that starts this moment, and retries would only delay the message."""
    try:
        await chairlift.server_info(timeout=READY_SECONDS)
    except Unreachable:
        raise
    except ChairliftError:  # it is busy, or something in front of it answers
        pass


def choose_display(lanes: dict[str, str]) -> Display:
    """The display that suits standard output and the number of lanes. {lane: title}"""
    if len(lanes) == 1:
        return PlainText(sys.stdout)
    has_rich = importlib.util.find_spec("rich") is not None
    if has_rich and sys.stdout.isatty() and len(lanes) <= MAX_PANELS:
        return Panels(lanes)
    return TaggedLines(sys.stdout, lanes)


def _lane(number: int, index: int, num_siblings: int) -> str:
    return f"{number + 1}.{index + 1}" if num_siblings > 1 else f"{number + 1}"


def _start(chairlift: AsyncChairlift, prompt: str, job: Job) -> AsyncTokenStream:
    request: Prompt = prompt
    if job.is_chat:
        system = [ChatMessage("system", job.system)] if job.system is not None else []
        request = [*system, ChatMessage("user", prompt)]
    return chairlift.generate(
        request, priority=job.priority, cache_salt=job.cache_salt, **job.sampling
    )


async def _answer_on_display(
    chairlift: AsyncChairlift,
    number: int,
    prompt: str,
    job: Job,
    slots: asyncio.Semaphore,
    display: Display,
) -> int:
    num_siblings = job.sampling.get("n") or 1
    lanes = [_lane(number, index, num_siblings) for index in range(num_siblings)]
    async with slots:
        stream = _start(chairlift, prompt, job)
        try:
            async for delta in stream:
                display.delta(lanes[delta.index], delta.text)
        except ChairliftError as error:
            for lane in lanes if stream.started is not None else lanes[:1]:
                display.end(lane, f"failed: {error}")
            print_error(f"prompt {number + 1}: {error}")
            return 1
        for index, completion in sorted(stream.completions.items()):
            tokens = completion.usage.completion_tokens
            display.end(lanes[index], f"{completion.finish_reason}, {tokens} tokens")
    return 0


async def _answer_as_json(
    chairlift: AsyncChairlift, number: int, prompt: str, job: Job, slots: asyncio.Semaphore
) -> int:
    async with slots:
        try:
            answers = await _start(chairlift, prompt, job).answers()
        except ChairliftError as error:
            _print_json({"prompt_index": number, "error": str(error), "status": error.status.name})
            print_error(f"prompt {number + 1}: {error}")
            return 1
    for answer in answers:
        _print_json({"prompt_index": number, "prompt": prompt, **as_json(answer)})
    return 0


def as_json(answer: Answer) -> dict[str, Any]:
    """One answer as the object that `--json` prints."""
    completion = answer.completion
    result: dict[str, Any] = {
        "index": completion.index,
        "text": answer.text,
        "token_ids": answer.token_ids,
        "finish_reason": completion.finish_reason,
        "stop_token_id": completion.stop_token_id,
        "stop_string": completion.stop_string,
        "request_id": answer.started.request_id,
        "seed": answer.started.seed,
        "model": answer.started.model,
        "usage": dataclasses.asdict(completion.usage),
        "timing": dataclasses.asdict(completion.timing),
    }
    if completion.beam_score is not None:
        result["beam_score"] = completion.beam_score
    for name in ("logprobs", "prompt_logprobs"):
        if entries := getattr(answer, name):
            result[name] = [dataclasses.asdict(entry) for entry in entries]
    return result


def _print_json(value: dict[str, Any]) -> None:
    text = json.dumps(value, ensure_ascii=not (sys.stdout.encoding or "").lower().startswith("utf"))
    print(printable(text, sys.stdout), flush=True)
