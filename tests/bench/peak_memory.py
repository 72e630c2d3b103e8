"""Processes of their own that run full steps and print what they took beside what was planned.

`python -m tests.bench.peak_memory FAMILY ATTENTION ...`: random weights of a shape in which every
part of the memory plan weighs megabytes. Prints, a line for every pair, the planned bytes and the
bytes by which resident memory grew at its peak, from the loaded model on. Each pair runs in a fork
of this process, which has imported what takes seconds and computed nothing. Linux only.
"""

from __future__ import annotations

import copy
import os
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from protos import link_pb2
from protos.plan import StepPlan
from scheduler_svc.core.request import Sampling
from tests.support import tiny_models
from tests.support.core_driver import CoreDriver
from tests.support.plan_builder import COMPUTED, plan_of
from tests.support.promised_geometry import promised_geometry
from tests.support.sampled_steps import mask_message
from worker.attention.interface import ATTENTION_NAME, register
from worker.memory.pool_size import plan_memory
from worker.model.load import LoadedModel
from worker.runner import Runner

_WIDE = {
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "vocab_size": 16_384,
    "max_position_embeddings": 2048,
}


def measure(family: str, attention: str) -> None:
    torch.set_num_threads(1)  # spinning threads would only cost time
    config = tiny_models.SERVED[family]()
    for name, value in _WIDE.items():
        setattr(config, name, value)
    configure = link_pb2.Configure(
        device="cpu",
        page_size=16,
        max_batch_tokens=512,
        max_requests_per_batch=32,
        num_blocks=256,
        cpu_offload_space=1 / 64,
        attention=attention,
    )
    loaded = _load(config, configure)
    plan = plan_memory(loaded, configure, attention)
    before = _forget_peak()
    runner = Runner(loaded, configure)
    _run_full_steps(runner)
    print(plan.total, _peak() - before, flush=True)


def _load(config: PreTrainedConfig, configure: link_pb2.Configure) -> LoadedModel:
    register()
    model = AutoModelForCausalLM.from_config(
        copy.deepcopy(config), attn_implementation=ATTENTION_NAME, dtype=torch.float32
    ).eval()
    return LoadedModel(
        model=model,
        hidden_states=model.base_model,
        model_path="",
        model_type=config.model_type,
        architecture=type(model).__name__,
        vocab_size=config.vocab_size,
        max_model_len=1024,
        dtype=torch.float32,
        kv_dtype=torch.float32,
        device=torch.device("cpu"),
        geometry=promised_geometry(config, configure.page_size, 4),
    )


def _run_full_steps(runner: Runner) -> None:
    """Both pools written; a long prompt in full chunks, then as many rows and tokens as go into a
    step, sampling with everything on."""
    geometry = runner.pool.geometry
    runner.pool.memory.fill_(1.0)
    core = CoreDriver(runner.ready(), max_batch_tokens=512, max_requests=32)
    # blocks of the first group reach into every chunk: all groups share the bytes
    first, num_swapped = geometry.groups[0].first_block, runner.swap.num_blocks(0)
    num_swapped = min(num_swapped, runner.pool.num_blocks(0) - first)
    swap_out = [(0, first + block, block) for block in range(num_swapped)]
    core.submit_prompts([7] * 1000)
    first_chunk, *others = core.plans_without_model()
    runner.launch(replace(first_chunk, swap_out=np.array(swap_out, np.int32))).wait()
    core.submit_prompts(*[range(1, 17)] * 32, sampling=Sampling(1.0, top_p=0.999))
    for plan in (*others, *core.plans_without_model()):
        runner.launch(plan).wait()
    full = _with_all_logits(first_chunk, runner)
    mask = mask_message(full.step_id, {i: range(9) for i in range(512)}, _WIDE["vocab_size"])
    runner.launch(full, lambda: mask).wait()


def _with_all_logits(chunk: StepPlan, runner: Runner) -> StepPlan:
    """The chunk with as many logits as a step may have, all of them sampled under penalties and a
    mask, and all of them scored."""
    count = runner.ready().max_logits
    assert count == len(chunk.token_ids) == 512
    each = np.arange(count)
    return replace(
        plan_of(
            chunk.step_id,
            **{name: getattr(chunk, name) for name in COMPUTED},
            logits_indices=each,
            sample_logits=each,
            sample_rows=np.repeat(chunk.rows, count),
            temperature=np.ones(count),
            top_p=np.full(count, 0.999),
            repetition_penalty=np.full(count, 1.1),
            num_candidates=np.full(count, 20),
            score_logits=each,
            score_tokens=each,
            score_candidates=np.full(count, 20),
            history_start=100 * np.arange(count + 1),
            history_tokens=np.tile(np.arange(100), count),
            history_counts=np.ones(100 * count),
        ),
        awaits_mask=True,
    )


def _forget_peak() -> int:
    """Resident bytes now; the peak counts from here."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _peak() -> int:
    return _status("VmHWM")


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return 1024 * int(line.split()[1])
    raise OSError(f"/proc/self/status has no {name}")


def main(arguments: list[str]) -> int:
    for family, attention in zip(arguments[::2], arguments[1::2], strict=True):
        child = os.fork()
        if child == 0:
            measure(family, attention)
            return 0
        _, status = os.waitpid(child, 0)
        if status:
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
