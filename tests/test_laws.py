"""The laws in C, Triton and JAX are those of law.py: files are current, random numbers agree.

NaN and ∞ are among the numbers: what is not finite must go the same way everywhere.
"""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from adamo_optim import law, native

BLOCKS = 4000
SPECIAL = torch.tensor([0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan, 1e-320, 1e308])


def test_generated_files_are_current() -> None:
    script = Path(__file__).parent.parent / "scripts" / "generate_laws.py"
    result = subprocess.run(
        [sys.executable, str(script), "--check"], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr


def draw(kind: Any, source: torch.Generator, choices: dict[str, Callable[[], Tensor]]) -> Tensor:
    """One row for each field: positive numbers over many decades, unless told otherwise."""

    def usual() -> Tensor:
        return 10 ** (torch.rand(BLOCKS, generator=source, dtype=torch.float64) * 12 - 8)

    return torch.stack([choices.get(name, usual)() for name in kind._fields])


def spoil(rows: Tensor, source: torch.Generator, share: float) -> Tensor:
    """Special numbers here and there."""
    hit = torch.rand(rows.shape, generator=source) < share
    which = torch.randint(len(SPECIAL), rows.shape, generator=source)
    return torch.where(hit, SPECIAL.double()[which], rows)


def numbers_of_adamo(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Options, traits, memory, record and activity of many blocks."""
    source = torch.Generator().manual_seed(seed)

    def rand() -> Tensor:
        return torch.rand(BLOCKS, generator=source, dtype=torch.float64)

    def flag() -> Tensor:
        return (rand() < 0.5).double()

    def signed() -> Tensor:
        return (rand() - 0.5) * 10 ** (rand() * 8 - 4)

    def count() -> Tensor:
        return (rand() * 50).floor()

    def or_unset() -> Tensor:
        return torch.where(rand() < 0.3, law.UNSET, 10 ** (rand() * 6 - 3))

    def or_off() -> Tensor:
        return torch.where(rand() < 0.5, 0.0, rand())

    sign = {"sign": lambda: 2 * flag() - 1}
    options = {
        **dict.fromkeys(("beta1", "beta2", "radial_beta", "curvature_beta"), rand),
        **dict.fromkeys(("isotropic_decay", "radial_lr", "curvature_target", "delta"), or_off),
        **dict.fromkeys(("guard", "curvature_auto"), flag),
        **sign,
    }
    memory = {"step": count, "curvature_step": count, "radial_momentum": signed}
    memory |= {"tau": or_unset, "initial_norm": or_unset}
    record = torch.zeros(len(law.RECORD), BLOCKS, dtype=torch.float64)
    record[: len(law.Sums._fields)] = draw(law.Sums, source, {"gw": signed, "mw": signed})
    place = law.RECORD.index("uw")
    record[place : place + 2] = draw(law.Products, source, {"uw": signed})
    record = spoil(record, source, 0.03)
    return (
        draw(law.Options, source, options),
        draw(law.Traits, source, {"low_dim": flag, "scale_invariant": flag}),
        draw(law.Memory, source, memory),
        record,
        rand() < 0.9,
    )


def stacked(rows: Iterable[Any]) -> Tensor:
    """Of torch's numbers or JAX's."""
    return torch.stack([torch.tensor(np.asarray(x), dtype=torch.float64) for x in rows])


def laws_of_adamo(
    options: Any, traits: Any, memory: Any, record: Any, active: Any, law: Any = law
) -> tuple[Tensor, Tensor]:
    """What law.py makes of them: memory and record."""
    o, about = law.Options(*options), law.Traits(*traits)
    sums, products = law.Sums(*record[:5]), law.Products(*record[5:7])
    first, before = law.moments_law(o, about, law.Memory(*memory), sums, active)
    second, after = law.weights_law(o, about, before, sums, first, products)
    rows = [*sums, *products, *first, *second, active]
    return stacked(after), stacked(rows)


def numbers_of_turns(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    options, _, memory, record, active = numbers_of_adamo(seed)
    source = torch.Generator().manual_seed(seed)
    chosen = [law.Options._fields.index(x) for x in ("lr", "beta1", "beta2", "eps", "delta")]
    angle = torch.rand(BLOCKS, generator=source, dtype=torch.float64)
    options = torch.stack([*options[chosen], angle, options[-1]])
    keys = [law.Memory._fields.index(x) for x in ("step", "tau_reference", "initial_norm")]
    sums = torch.zeros(len(law.TURN_RECORD), BLOCKS, dtype=torch.float64)
    sums[:4] = record[[0, 2, 4, 3]]
    return options, torch.rand(2, BLOCKS, generator=source).double(), memory[keys], sums, active


def laws_of_turns(
    options: Any, traits: Any, memory: Any, record: Any, active: Any, law: Any = law
) -> tuple[Tensor, Tensor]:
    o, about, sums = law.TurnOptions(*options), law.TurnTraits(*traits), law.TurnSums(*record[:4])
    first, before = law.square_law(o, about, law.TurnMemory(*memory), sums, active)
    whole = law.Whole(sums.ww, first.uw, first.uu)  # every weight is one block
    turn, after = law.turn_law(o, about, before, first, whole, active)
    return stacked(after), stacked([*sums, *first, *whole, *turn, active])


FAMILIES = {
    "adamo": (numbers_of_adamo, laws_of_adamo, law.Memory, law.RECORD),
    "turns": (numbers_of_turns, laws_of_turns, law.TurnMemory, law.TURN_RECORD),
}


def agree(found: Tensor, expected: Tensor, names: tuple[str, ...]) -> None:
    for name, x, y in zip(names, found, expected, strict=True):
        if name.startswith(("guarded", "at_max")) or name in ("live", "use_gradient"):
            assert (x != y).sum() <= 1, name  # a number that lies on a bound to the last digit
            continue
        torch.testing.assert_close(
            x, y, rtol=1e-9, atol=1e-12, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.skipif(isinstance(native.kernel(), str), reason="the native kernel is not built")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", range(3))
def test_the_laws_in_c(family: str, seed: int) -> None:
    numbers, laws, memory_of, names = FAMILIES[family]
    options, traits, memory, record, active = numbers(seed)
    after, rows = laws(options, traits, memory, record, active)
    module: Any = native.kernel()
    module.laws(options, traits, memory, record, active.tolist(), family == "turns")
    agree(memory, after, memory_of._fields)
    agree(record, rows, names)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_laws_in_jax(family: str) -> None:
    jax = pytest.importorskip("jax")
    from adamo_optim.optax import laws as written
    from adamo_optim.optax.scale_invariance import enable_x64

    numbers, laws, memory_of, names = FAMILIES[family]
    given = numbers(5)
    after, rows = laws(*given)
    with enable_x64(True):
        found_after, found_rows = laws(*(jax.numpy.asarray(x.numpy()) for x in given), written)
    agree(found_after, after, memory_of._fields)
    agree(found_rows, rows, names)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter
@pytest.mark.parametrize("family", FAMILIES)
def test_the_laws_in_triton(family: str) -> None:
    triton = pytest.importorskip("triton", minversion="3.4")
    if torch.cuda.is_available():
        pytest.skip("tests/test_gpu.py compares them on the device")
    from adamo_optim import triton_kernels as kernels

    assert triton.knobs.runtime.interpret
    numbers, laws, memory_of, names = FAMILIES[family]
    count = 150  # the interpreter runs programs one after another
    options, traits, memory, record, active = (x[..., :count].contiguous() for x in numbers(7))
    after, rows = laws(options, traits, memory, record, active)
    launch_laws(kernels, family, options, traits, memory, record, active)
    agree(memory, after, memory_of._fields)
    if family == "adamo":  # what a block that is not live has left of pass 2 is not looked at
        live, products = rows[names.index("live")] > 0, slice(5, 7)
        rows[products] = torch.where(live, rows[products], 0)
    # the record of a block that is not active holds no sums
    agree(record[:, active], rows[:, active], names)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_the_laws_of_weights_with_many_rows_in_triton() -> None:
    """Each row has two chunks, and a weight has more rows than a tile holds."""
    pytest.importorskip("triton", minversion="3.4")
    if torch.cuda.is_available():
        pytest.skip("tests/test_gpu.py compares whole steps on the device")
    from adamo_optim import triton_kernels as kernels

    sizes = torch.tensor([50, 1, 36, 63])
    first = sizes.cumsum(0) - sizes
    member = torch.arange(4).repeat_interleave(sizes)
    given = (x[..., :150].contiguous() for x in numbers_of_turns(8))
    options, traits, memory, record, active = given
    alike = first[member]  # rows of a weight have these in common
    options, traits, active = (x[..., alike].contiguous() for x in (options, traits, active))
    memory = torch.stack([memory[0][alike], memory[1], memory[2][alike]])
    sums = torch.where(record[:4].isfinite(), record[:4], 1.0)  # one row would spoil a weight

    o, about, rows = law.TurnOptions(*options), law.TurnTraits(*traits), law.TurnSums(*sums)
    scaled, before = law.square_law(o, about, law.TurnMemory(*memory), rows, active)
    sums_of_rows = (rows.ww, scaled.uw, scaled.uu)
    whole = (torch.zeros(4).double().index_add(0, member, x)[member] for x in sums_of_rows)
    turn, after = law.turn_law(o, about, before, scaled, law.Whole(*whole), active)

    chunks = torch.stack([0.25 * sums, 0.75 * sums], dim=2).view(4, 300)
    places = torch.arange(0, 300, 2)
    kernels.before_turn[(4,)](
        options, traits, memory, record, 150, active[first].long(), None, chunks, 300, places,
        places + 2, first, sizes, CHECKED=False, ROWS=True, TILE=16,
    )  # fmt: skip
    agree(memory, stacked(after), law.TurnMemory._fields)
    agree(record[-5:-1, active], stacked(turn)[:, active], law.Turn._fields)


def launch_laws(kernels: Any, family: str, *matrices: Tensor) -> None:
    """The laws of all blocks, each of which is one chunk."""
    options, traits, memory, record, active = matrices
    blocks, device = options.shape[1], options.device
    first = torch.arange(blocks, device=device)
    ones = torch.ones(blocks, dtype=torch.float64, device=device)
    chunks = (blocks, first, first + 1)
    flags = active.long()
    common = (options, traits, memory, record, blocks)
    grid, sums = (blocks,), record.clone()
    if family == "turns":
        weights = (first, torch.ones_like(first))
        kernels.before_turn[grid](
            *common, flags, None, sums[:4].contiguous(), *chunks, *weights, CHECKED=False,
            ROWS=False, TILE=16,
        )  # fmt: skip
        return
    kernels.before_moments[grid](
        *common, flags, None, sums[:5].contiguous(), *chunks, ones, CHECKED=False, TILE=16
    )
    kernels.before_weights[grid](*common, sums[5:7].contiguous(), *chunks, TILE=16)
