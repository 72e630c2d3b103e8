"""What transformers does with a workload, by itself: the yardstick of `chairlift bench --compare`.

    static      padded `generate`: batches of 16 in the order of the workload, prompts padded on
                the left, eager attention, each batch until its longest request has its tokens
    continuous  its own continuous batching over a paged cache, sdpa attention, all requests at
                once

Both greedy in float32 (or --dtype), the end of a sequence ignored. Reads the name of a system per
line from standard input, runs it, and answers with one line of JSON; what libraries print goes to
standard error. `python -m worker.compare --model … --workload FILE`; not a part of serving.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.generation import ContinuousBatchingConfig
from transformers.generation.stopping_criteria import StoppingCriteria, StoppingCriteriaList

from worker.embedded import resolve_model

STATIC_BATCH: Final = 16
PAGE_SIZE: Final = 16


@dataclass(frozen=True, slots=True)
class Ask:
    prompt: list[int]
    max_new: int


@dataclass(slots=True)
class Outcome:
    """Of each request, in order: when its tokens came, in seconds since the start."""

    deliveries: list[list[tuple[float, int]]]
    notes: list[str]

    def as_dict(self) -> dict[str, Any]:
        return {
            "requests": [
                {"end": rows[-1][0] if rows else 0.0, "deliveries": rows}
                for rows in self.deliveries
            ],
            "notes": self.notes,
        }


class _Clock(StoppingCriteria):
    """Stops nothing; notes when each step of `generate` ended."""

    def __init__(self) -> None:
        self.moments: list[float] = []

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        self.moments.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


@torch.inference_mode()
def run_static(model: PreTrainedModel, asks: Sequence[Ask]) -> Outcome:
    """A request has its tokens as they are computed, and is not held until its batch ends."""
    model.set_attn_implementation("eager")
    start = time.perf_counter()
    deliveries: list[list[tuple[float, int]]] = []
    for first in range(0, len(asks), STATIC_BATCH):
        batch = asks[first : first + STATIC_BATCH]
        width = max(len(ask.prompt) for ask in batch)
        longest = max(ask.max_new for ask in batch)
        ids = torch.tensor([[0] * (width - len(ask.prompt)) + ask.prompt for ask in batch])
        mask = torch.tensor(
            [[0] * (width - len(ask.prompt)) + [1] * len(ask.prompt) for ask in batch]
        )
        clock = _Clock()
        model.generate(
            input_ids=ids.to(model.device),
            attention_mask=mask.to(model.device),
            generation_config=_greedy(longest),
            stopping_criteria=StoppingCriteriaList([clock]),
        )
        moments = [moment - start for moment in clock.moments]
        assert len(moments) == longest, f"{len(moments)} steps for {longest} tokens"
        deliveries += [[(moment, 1) for moment in moments[: ask.max_new]] for ask in batch]
    return Outcome(deliveries, [])


@torch.inference_mode()
def run_continuous(model: PreTrainedModel, asks: Sequence[Ask]) -> Outcome:
    """All requests are handed over at once."""
    model.set_attn_implementation("sdpa")
    longest = max(ask.max_new for ask in asks)
    tokens = sum(-(-(len(ask.prompt) + ask.max_new) // PAGE_SIZE) * PAGE_SIZE for ask in asks)
    config = ContinuousBatchingConfig(
        page_size=PAGE_SIZE,
        num_blocks=tokens // PAGE_SIZE + 2,  # everything fits: nothing is computed twice
        max_batch_tokens=2048,
        allow_block_sharing=False,
    )
    deliveries: dict[str, list[tuple[float, int]]] = {}
    notes: list[str] = []
    with model.continuous_batching_context_manager(
        generation_config=_greedy(longest), continuous_batching_config=config
    ) as manager:
        start = time.perf_counter()
        for number, ask in enumerate(asks):
            manager.add_request(
                ask.prompt,
                request_id=str(number),
                max_new_tokens=ask.max_new,
                record_timestamps=True,
            )
        while len(deliveries) < len(asks) and manager.is_running():
            output = manager.get_result(timeout=1)
            if output is None or not output.is_finished():
                continue
            moments = output.timestamps or [time.perf_counter()]
            deliveries[output.request_id] = [(moment - start, 1) for moment in moments]
            if output.error is not None:
                notes.append(f"request {output.request_id}: {output.error}")
    return Outcome([deliveries.get(str(number), []) for number in range(len(asks))], notes)


SYSTEMS: Final[dict[str, Callable[[PreTrainedModel, Sequence[Ask]], Outcome]]] = {
    "static": run_static,
    "continuous": run_continuous,
}


def _greedy(max_new_tokens: int) -> GenerationConfig:
    """No end of sequence: -1 is no token."""
    return GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=False,
        eos_token_id=-1,
        pad_token_id=0,
        use_cache=True,
    )


def read_workload(path: Path) -> list[Ask]:
    """JSON lines with `prompt` and `max_new`."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [Ask(row["prompt"], row["max_new"]) for row in rows]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m worker.compare",
        description="Run transformers' own generation on a workload, as told on standard input.",
    )
    parser.add_argument("--model", required=True, help="alias, folder or Hub id")
    parser.add_argument("--workload", required=True, type=Path, metavar="FILE")
    parser.add_argument("--threads", type=int, default=0, metavar="N", help="0: torch's choice")
    parser.add_argument("--dtype", default="float32", choices=["float32", "float16", "bfloat16"])
    options = parser.parse_args(arguments)
    answers, sys.stdout = sys.stdout, sys.stderr  # libraries print; the answers' pipe is ours
    os.environ.setdefault("TQDM_DISABLE", "1")
    if options.threads:
        torch.set_num_threads(options.threads)
    asks = read_workload(options.workload)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(
        resolve_model(options.model), dtype=getattr(torch, options.dtype)
    ).to(device)
    model.eval()
    model.generation_config = _greedy(1)  # else the checkpoint's own defaults are merged in
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        outcome = SYSTEMS[line.strip()](model, asks)
        print(json.dumps(outcome.as_dict()), file=answers, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
