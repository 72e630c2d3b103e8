"""Attention of a decode step against the machine's memory, and against gather + SDPA."""

from __future__ import annotations

import os

import pytest
import torch

from tests.worker.attention_bench import decode

AT_MOST_READING = 1.8  # 1.2 to 1.4 on a quiet machine; others may read memory meanwhile
AT_LEAST_FASTER = 3


@pytest.mark.parametrize("num_rows", [16, pytest.param(64, marks=pytest.mark.slow)])
def test_a_decode_step_costs_little_more_than_reading_its_keys_and_values(show, num_rows):
    """Guards the kernel's speed: a step has to read all keys and values once, and should do little
    else. The best of several turns counts, since other processes may take the cores."""
    torch.set_num_threads(min(2, os.cpu_count() or 1))
    figures = decode(num_rows, turns=9, pick=min)
    show(str(figures))
    assert figures.gather >= AT_LEAST_FASTER * figures.attention
    assert figures.attention <= AT_MOST_READING * figures.reading
