"""PyTorch's compiled-optimizer suite: ``torch.compile(optimizer.step)`` equals eager.

A compilation takes seconds, with Inductor half a minute: `make test` compiles a few inputs with
Dynamo alone, and all of them, and Inductor, are marked slow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.lr_scheduler import ExponentialLR
from torch.testing import assert_close

from adamo_optim import AdamO
from torch_kit import (
    ADAMO_ENTRY,
    FEW,
    TURNING_ENTRY,
    Case,
    Entry,
    Regression,
    build,
    clones,
    flat,
    gradients,
    over_backends,
    set_gradients,
    steps_of,
)

pytestmark = pytest.mark.filterwarnings(
    # torch's own: what Dynamo and Inductor call inside themselves
    "ignore:`torch.jit:DeprecationWarning",
    "ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning",
)


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class CountingBackend:
    """Runs graphs as they are; counts how many were compiled and how often they ran."""

    def __init__(self) -> None:
        self.graphs, self.runs = 0, 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        self.graphs += 1

        def run(*args: Any) -> Any:
            self.runs += 1
            return graph.forward(*args)

        return run


def compiled_and_eager(
    make: Callable[[list[Any]], Any], steps: int, compiler: Any
) -> tuple[Any, Any]:
    """Two optimizers after the same gradients, a bias without one in the third step."""
    problems = Regression(), Regression()
    compiled, eager = (make(problem.params) for problem in problems)
    functions = torch.compile(compiled.step, backend=compiler), eager.step
    for seed in range(steps):
        for problem, step in zip(problems, functions, strict=True):
            grads: list[Tensor | None] = list(gradients(problem.params, seed))
            set_gradients(problem.params, [grads[0], None if seed == 2 else grads[1]])
            step()
    assert_close(clones(problems[0].params), clones(problems[1].params))
    for p, q in zip(*(problem.params for problem in problems), strict=True):
        ours, theirs = compiled.state[p], eager.state[q]
        assert ours.keys() == theirs.keys()
        assert_close(flat(ours.values()), flat(theirs[key] for key in ours), rtol=1e-5, atol=1e-7)
    assert steps_of(eager, problems[1].weight) == steps
    return compiled, eager


def skip_what_dynamo_cannot(case: Case) -> None:
    foreach = case.entry.cls is AdamO and case.backend == "foreach"
    if foreach and torch.__version__ < (2, 10):
        pytest.skip("Dynamo breaks the graph inside zip(strict=True), and fails to go on")


@over_backends(skip=("differentiable", "fused"), only=("default",))
def test_a_compiled_step_equals_an_eager_one(case: Case) -> None:
    skip_what_dynamo_cannot(case)
    backend = CountingBackend()
    compiled_and_eager(lambda params: build(params, case), 4, backend)
    assert backend.runs >= 4


@pytest.mark.slow
@over_backends(skip=("differentiable",))
def test_a_compiled_step_equals_an_eager_one_with_every_option(case: Case) -> None:
    skip_what_dynamo_cannot(case)
    compiled_and_eager(lambda params: build(params, case), 4, "aot_eager")


@pytest.mark.slow
@over_backends(skip=("differentiable",), only=FEW)
def test_a_step_compiled_by_inductor_equals_an_eager_one(case: Case) -> None:
    skip_what_dynamo_cannot(case)
    compiled_and_eager(lambda params: build(params, case), 4, "inductor")


@pytest.mark.parametrize(
    ("entry", "lr", "foreach"),
    [
        (ADAMO_ENTRY, 0.01, False),
        (TURNING_ENTRY, torch.tensor(0.01), False),
    ],
    ids=["AdamO-float-lr", "turning-tensor-lr"],
)
def test_a_scheduler_does_not_make_the_step_compile_again(
    entry: Entry, lr: Any, foreach: bool
) -> None:
    """The learning rate is an input of the graph, not a constant in it."""
    ends, backend, graphs = [], CountingBackend(), 0
    for compiled in (True, False):
        problem = Regression()
        optimizer = entry.make(
            problem.params, lr=lr.clone() if isinstance(lr, Tensor) else lr, foreach=foreach
        )
        scheduler = ExponentialLR(optimizer, gamma=0.7)
        step = torch.compile(optimizer.step, backend=backend) if compiled else optimizer.step
        for number in range(6):
            problem.backward()
            step()
            scheduler.step()
            if compiled and number == 1:  # the first step, which makes state, and all later ones
                graphs = backend.graphs
        ends.append(clones(problem.params))
    assert_close(*ends)
    assert backend.graphs == graphs
    assert backend.runs >= 6
