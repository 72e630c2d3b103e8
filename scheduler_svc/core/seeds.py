"""Uniform numbers for sampling, a function of (seed, sibling, position) alone.

So a seed gives the same tokens alone, in any batch, after a preemption and after a crash. The hash
is SplitMix64's finaliser (Steele, Lea, Flood: "Fast splittable pseudorandom number generators",
OOPSLA 2014), once per input, on whole arrays.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from protos.plan import Float32

_UInt64 = npt.NDArray[np.uint64]
_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)
_MIX1: Final = np.uint64(0xBF58476D1CE4E5B9)
_MIX2: Final = np.uint64(0x94D049BB133111EB)


def streams(seed: _UInt64, sibling: _UInt64) -> _UInt64:
    """The streams of siblings' uniform numbers. Arguments and result: [n]"""
    return _mix(_mix(seed) ^ sibling)


def uniforms(stream: _UInt64, position: npt.NDArray[np.integer]) -> Float32:
    """Numbers k / 2^24 in [0, 1), exact in float32. Arguments and result: [n]"""
    mixed = _mix(stream ^ position.astype(np.uint64))
    return (mixed >> np.uint64(40)).astype(np.float32) / np.float32(2.0**24)


def _mix(value: _UInt64) -> _UInt64:
    value = value + _GOLDEN
    value = (value ^ (value >> np.uint64(30))) * _MIX1
    value = (value ^ (value >> np.uint64(27))) * _MIX2
    mixed: _UInt64 = value ^ (value >> np.uint64(31))
    return mixed
