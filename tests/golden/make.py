"""Makes the golden tokens: what transformers' own `generate` answers to a workload, alone.

    python -m tests.golden.make [--model …] [--workload …] [--output …]

Each request runs by itself: greedy, float32, end of sequence ignored, exactly `max_new` tokens.
About ten minutes on two cores for `mixed`. Beside the tokens stands `min_gap`, the smallest
distance between the two largest logits over the request's steps, in logits: where it is near the
rounding of float32 sums (about 1e-5), another order of summation may rightly choose another token.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from worker.model.embedded import DEFAULT_MODEL, resolve_model

HERE = Path(__file__).parent


def generate(model: PreTrainedModel, prompt: list[int], max_new: int) -> tuple[list[int], float]:
    """The `max_new` greedy tokens after `prompt`, and the smallest top-1/top-2 distance."""
    # eos_token_id must be absent from the model's own defaults too, or generate takes it from there
    model.generation_config = GenerationConfig()
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        generation_config=GenerationConfig(
            max_new_tokens=max_new,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        ),
    )
    tokens = output.sequences[0, len(prompt) :].tolist()
    if len(tokens) != max_new:
        raise RuntimeError(f"generate gave {len(tokens)} tokens where {max_new} were asked for")
    best = torch.cat(output.logits).topk(2).values  # [max_new, 2]
    return tokens, (best[:, 0] - best[:, 1]).min().item()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.golden.make", description=__doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--workload", type=Path, default=HERE.parent / "workloads" / "mixed.jsonl")
    parser.add_argument("--output", type=Path, default=HERE / "mixed_smollm2.jsonl")
    arguments = parser.parse_args()

    folder = resolve_model(arguments.model, lambda what, _: print(what, file=sys.stderr))
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa"
    )
    requests = [json.loads(line) for line in arguments.workload.read_text().splitlines()]
    started = time.monotonic()
    lines = []
    for request in requests:
        tokens, gap = generate(model, request["prompt"], request["max_new"])
        golden = {"id": request["id"], "min_gap": float(f"{gap:.3g}"), "tokens": tokens}
        lines.append(json.dumps(golden) + "\n")
        seconds = time.monotonic() - started
        print(f"{len(lines)}/{len(requests)} requests, {seconds:.0f} s", file=sys.stderr)
    arguments.output.write_text("".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
