"""How often a weight format of SmolLM2 says what float32 says.

`python -m tests.bench.format_agreement [--formats int8 float16]`. Prompts of mixed.jsonl, each
with the tokens that float32 goes on with: every format computes the same tokens, through the
worker's own step, and the distributions behind each of them are compared. Keys and values are
stored as each format has them by default (`kv_cache_dtype` auto). Errors do not add up over an
answer, as they would if each format went on with its own tokens.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
import torch.nn.functional as F

from tests.bench.step_speed import load
from tests.support.in_process import InProcess
from tests.support.plan_builder import with_samples
from tests.support.without_model import without_model
from worker.cpu_layers.packed_linear import WEIGHT_FORMATS

MIXED: Final = Path(__file__).resolve().parents[1] / "workloads" / "mixed.jsonl"
_MOST_TOKENS: Final = 1024  # of a step
_NUM_CHUNKS: Final = 1000


@dataclass(frozen=True, slots=True)
class Agreement:
    """A format's distributions of the next token beside float32's."""

    num_tokens: int = 0
    num_same: int = 0  # tokens whose likeliest successor is float32's
    divergence: float = 0.0  # nats, of all tokens: sum of p float32 * log(p float32 / p format)

    @property
    def share(self) -> float:
        return self.num_same / self.num_tokens

    @property
    def mean_divergence(self) -> float:
        return self.divergence / self.num_tokens

    def with_logits(self, float32: torch.Tensor, other: torch.Tensor) -> Agreement:
        """Both [tokens, vocabulary]."""
        same = float32.argmax(dim=-1) == other.argmax(dim=-1)
        divergence = F.kl_div(
            other.log_softmax(-1), float32.log_softmax(-1), reduction="sum", log_target=True
        )
        return Agreement(
            self.num_tokens + len(same),
            self.num_same + int(same.sum()),
            self.divergence + float(divergence),
        )

    def __str__(self) -> str:
        return (
            f"the same likeliest token {self.share:.1%}, KL {self.mean_divergence:.2g} nats, "
            f"of {self.num_tokens:,} tokens"
        )


class _Served:
    """SmolLM2 in one weight format, behind the worker's runner."""

    def __init__(self, weight_format: str) -> None:
        self._process = InProcess(
            load(weight_format),
            chunks=_NUM_CHUNKS,
            max_batch_tokens=_MOST_TOKENS,
            max_requests=_MOST_TOKENS,
            allow_block_sharing=False,
        )

    def go_on(self, prompts: Sequence[list[int]], num_tokens: int) -> list[list[int]]:
        """Prompts with so many greedy tokens behind each."""
        answers = self._process.answers(prompts, [num_tokens] * len(prompts))
        self._process.logits.clear()
        return [[*prompt, *answer.tokens] for prompt, answer in zip(prompts, answers, strict=True)]

    def logits(self, tokens: list[int]) -> torch.Tensor:
        """[tokens, vocabulary]: of what follows each of them."""
        process, places = self._process, range(len(tokens))
        plan = process.first_plan(tokens)
        process.step(with_samples(plan, places, places, [plan.rows[0]] * len(tokens)))
        process.core.absorb(without_model(plan))
        return process.logits.pop()


def agreements(
    formats: Sequence[str],
    num_prompts: int,
    num_generated: int,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Agreement]:
    """Of each format, over the first prompts of mixed.jsonl and the tokens behind them."""
    lines = MIXED.read_text().splitlines()[:num_prompts]
    prompts = [json.loads(line)["prompt"] for line in lines]
    progress("loading float32")
    float32 = _Served("float32")
    progress(f"generating {num_generated} tokens for each of {len(prompts)} prompts")
    sequences = float32.go_on(prompts, num_generated)
    others = {}
    for weight_format in formats:
        progress(f"loading {weight_format}")
        others[weight_format] = _Served(weight_format)
    found = dict.fromkeys(formats, Agreement())
    for number, sequence in enumerate(sequences, 1):
        logits = float32.logits(sequence)
        for name, other in others.items():
            found[name] = found[name].with_logits(logits, other.logits(sequence))
        shares = ", ".join(f"{name} {one.share:.1%}" for name, one in found.items())
        progress(f"{number} of {len(sequences)}: {shares}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.format_agreement")
    parser.add_argument(
        "--formats", nargs="+", choices=WEIGHT_FORMATS[1:], default=["int8", "float16"]
    )
    parser.add_argument("--prompts", type=int, default=16, help="of mixed.jsonl (16)")
    parser.add_argument(
        "--generated", type=int, default=32, help="tokens behind each (default: 32)"
    )
    options = parser.parse_args()
    found = agreements(
        options.formats,
        options.prompts,
        options.generated,
        lambda line: print(line, file=sys.stderr, flush=True),
    )
    for name, agreement in found.items():
        print(f"{name}: {agreement}")


if __name__ == "__main__":
    main()
