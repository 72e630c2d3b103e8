"""Makes the golden hypotheses: what transformers' `generate(num_beams=...)` finds with the embedded
model, each search by itself, in float32.

    python -m tests.golden.make_beams
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from scheduler_svc.core.request import BeamSearch
from tests.support.beam_oracle import generate_beams
from worker.model.embedded import DEFAULT_MODEL, resolve_model

OUTPUT = Path(__file__).parent / "beams_smollm2.jsonl"
SEARCHES = [  # prompt, whether it is a question to the chat model, max_tokens, the search
    ("Once upon a time", False, 12, BeamSearch(3, 3)),
    ("What is the capital of France?", True, 16, BeamSearch(3, 2)),
    ("Is water wet?", True, 8, BeamSearch(2, 2, length_penalty=0.0, early_stopping=True)),
]


def main() -> int:
    folder = resolve_model(DEFAULT_MODEL, lambda what, _: print(what, file=sys.stderr))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa"
    )
    stops = [tokenizer.eos_token_id]
    lines = []
    for text, is_chat, max_tokens, beams in SEARCHES:
        if is_chat:
            text = tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
            )
        prompt = tokenizer.encode(text, add_special_tokens=False)
        found = generate_beams(model, prompt, max_tokens, beams, stops)
        golden = {
            "prompt": prompt,
            "max_tokens": max_tokens,
            "beam_width": beams.width,
            "n": beams.num_answers,
            "length_penalty": beams.length_penalty,
            "early_stopping": beams.early_stopping,
            "answers": [{"tokens": tokens, "score": round(score, 5)} for tokens, score in found],
        }
        lines.append(json.dumps(golden) + "\n")
        for tokens, score in found:
            print(f"{score:.5f} {tokenizer.decode(tokens)!r}", file=sys.stderr)
    OUTPUT.write_text("".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
