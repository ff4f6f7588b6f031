"""Stochastic rounding of bfloat16 weights: the same random bits in every backend."""

from __future__ import annotations

import torch
from torch import Tensor

INDEX_FACTOR, NUMBER_FACTOR = 0x9E3779B1, 0x85EBCA6B


def round_stochastically(value: Tensor, step: Tensor, number: int, index: Tensor) -> Tensor:
    """float32 → bfloat16, up or down with the probabilities that make the mean exact.

    The random bits are a hash (Wellons' lowbias32) of step, parameter and place in memory, so that
    a resumed run repeats them, no generator is touched and every backend draws the same ones.
    ``index`` gives the places in the memory of the whole tensor.
    """
    value, mask = value.float(), 0xFFFFFFFF
    key = step.long() * 0x9E3779B9 + number * NUMBER_FACTOR
    x = (index * INDEX_FACTOR + key) & mask
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & mask
    x = ((x ^ (x >> 15)) * 0x846CA68B) & mask
    noise = (x ^ (x >> 16)) & 0xFFFF
    bits = (value.view(torch.int32) + noise.int()) & -0x10000
    return torch.where(value.isfinite(), bits.view(torch.float32), value).bfloat16()


def moved_number(number: int, place: int) -> int:
    """The number under which a piece that starts at ``place`` draws the bits of the whole.

    The hash starts from index·A + number·B modulo 2³², B is odd: its inverse turns a move of the
    index into one of the number, and the kernels need not know.
    """
    inverse = pow(NUMBER_FACTOR, -1, 2**32)
    return (number + place * INDEX_FACTOR * inverse) % 2**32
