"""transformers' own generation on a workload: the yardstick of `chairlift bench --compare`.

    static      padded `generate`: batches of 16 in the order of the workload, prompts padded on
                the left, eager attention, each batch until its longest request is complete
    continuous  its own continuous batching over a paged cache, sdpa attention, all requests at
                once

Both greedy in float32 (or --dtype), ignoring the end of a sequence. Reads the name of a system per
line from standard input, runs it, and answers with one line of JSON; what libraries print goes to
standard error. `python -m worker.model.compare --model … --workload FILE`; not part of serving.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation import ContinuousBatchingConfig
from transformers.generation.stopping_criteria import StoppingCriteria, StoppingCriteriaList
from transformers.utils.logging import disable_progress_bar

from worker.model.embedded import resolve_model

STATIC_BATCH: Final = 16
PAGE_SIZE: Final = 16


@dataclass(frozen=True, slots=True)
class Request:
    prompt: list[int]
    max_new: int


@dataclass(slots=True)
class Answer:
    """When each of a request's tokens came, and when it ended; seconds since the start."""

    moments: list[float]
    end: float


@dataclass(slots=True)
class Outcome:
    """One answer per request, in order."""

    answers: list[Answer]
    notes: list[str]

    def as_dict(self) -> dict[str, Any]:
        return {
            "requests": [
                {"end": answer.end, "deliveries": [(moment, 1) for moment in answer.moments]}
                for answer in self.answers
            ],
            "notes": self.notes,
        }


class _Clock(StoppingCriteria):
    """Stops nothing; records when each step of `generate` ended."""

    def __init__(self) -> None:
        self.moments: list[float] = []

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        self.moments.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


@torch.inference_mode()
def run_static(model: Any, requests: Sequence[Request]) -> Outcome:
    """Tokens count as delivered when they are computed; a request ends with its batch."""
    model.set_attn_implementation("eager")
    start = time.perf_counter()
    answers: list[Answer] = []
    for first in range(0, len(requests), STATIC_BATCH):
        batch = requests[first : first + STATIC_BATCH]
        width = max(len(request.prompt) for request in batch)
        longest = max(request.max_new for request in batch)
        ids = torch.tensor(
            [[0] * (width - len(request.prompt)) + request.prompt for request in batch]
        )
        mask = torch.tensor(
            [[0] * (width - len(request.prompt)) + [1] * len(request.prompt) for request in batch]
        )
        clock = _Clock()
        model.generate(
            input_ids=ids.to(model.device),
            attention_mask=mask.to(model.device),
            generation_config=_greedy(longest, None),
            stopping_criteria=StoppingCriteriaList([clock]),
        )
        moments = [moment - start for moment in clock.moments]
        assert len(moments) == longest, f"{len(moments)} steps for {longest} tokens"
        answers += [Answer(moments[: request.max_new], moments[-1]) for request in batch]
    return Outcome(answers, [])


@torch.inference_mode()
def run_continuous(model: Any, requests: Sequence[Request]) -> Outcome:
    """All requests are submitted at once."""
    model.set_attn_implementation("sdpa")
    longest = max(request.max_new for request in requests)
    tokens = sum(
        -(-(len(request.prompt) + request.max_new) // PAGE_SIZE) * PAGE_SIZE for request in requests
    )
    config = ContinuousBatchingConfig(
        page_size=PAGE_SIZE,
        num_blocks=tokens // PAGE_SIZE + 2,  # everything fits, so nothing is recomputed
        max_batch_tokens=2048,
        allow_block_sharing=False,
    )
    answers: dict[str, Answer] = {}
    notes: list[str] = []
    with model.continuous_batching_context_manager(
        generation_config=_greedy(longest, -1), continuous_batching_config=config
    ) as manager:
        start = time.perf_counter()
        for number, request in enumerate(requests):
            manager.add_request(
                request.prompt,
                request_id=str(number),
                max_new_tokens=request.max_new,
                record_timestamps=True,
            )
        while len(answers) < len(requests) and manager.is_running():
            output = manager.get_result(timeout=1)
            if output is None or not output.is_finished():
                continue
            moments = [moment - start for moment in output.timestamps or []]
            answers[output.request_id] = Answer(moments, time.perf_counter() - start)
            if output.error is not None:
                notes.append(f"request {output.request_id}: {output.error}")
    missing = Answer([], time.perf_counter() - start)
    return Outcome([answers.get(str(number), missing) for number in range(len(requests))], notes)


SYSTEMS: Final[dict[str, Callable[[Any, Sequence[Request]], Outcome]]] = {
    "static": run_static,
    "continuous": run_continuous,
}


def _greedy(max_new_tokens: int, eos_token_id: int | None) -> GenerationConfig:
    """`eos_token_id` None: no sequence ends early; -1, which is no token, where None means "not
    given"."""
    return GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=False,
        eos_token_id=eos_token_id,
        pad_token_id=0,
        use_cache=True,
    )


def read_workload(path: Path) -> list[Request]:
    """JSON lines with `prompt` and `max_new`."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [Request(row["prompt"], row["max_new"]) for row in rows]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m worker.model.compare",
        description="Run transformers' own generation on a workload; commands on standard input.",
    )
    parser.add_argument("--model", required=True, help="alias, folder or Hub id")
    parser.add_argument("--workload", required=True, type=Path, metavar="FILE")
    parser.add_argument("--threads", type=int, default=0, metavar="N", help="0: torch's choice")
    parser.add_argument("--dtype", default="float32", choices=["float32", "float16", "bfloat16"])
    options = parser.parse_args(arguments)
    _end_with_parent()
    answers, sys.stdout = sys.stdout, sys.stderr  # libraries print; the answers' pipe is ours
    disable_progress_bar()
    if options.threads:
        torch.set_num_threads(options.threads)
    requests = read_workload(options.workload)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model: Any = AutoModelForCausalLM.from_pretrained(
        resolve_model(options.model), dtype=getattr(torch, options.dtype), trust_remote_code=False
    )
    model = model.to(device).eval()
    model.generation_config = _greedy(1, None)  # else the checkpoint's defaults would be merged in
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        outcome = SYSTEMS[line.strip()](model, requests)
        print(json.dumps(outcome.as_dict()), file=answers, flush=True)
    return 0


def _end_with_parent() -> None:
    """It may compute for minutes before it reads again and finds its parent gone."""
    if sys.platform == "linux":
        set_parent_death_signal = 1  # PR_SET_PDEATHSIG of linux/prctl.h
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
