"""One batch of everything before a comparison, so that mistakes show at once.

A digest of what it saw tells whether a record is of the same experiment.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from adamo_optim import param_groups

from . import optimizers as registry
from .errors import LabError
from .fingerprint import fingerprint
from .records import RunConfig, canonical
from .tasks.base import Phase
from .train import new_model, threads
from .your_task import Recipe, Yours


def rehearse(
    recipe: Recipe, settings: Mapping[str, Mapping[str, Any]], device: torch.device
) -> str:
    """One batch of everything, so that mistakes show at once; returns a digest of what it saw.

    Twice, with two models: what differs then, such as a list of results or the time at which a
    model was made, is no part of the experiment.
    """
    name = next(iter(settings))
    task = Yours(RunConfig("yours", name, 0, 1, settings[name]), device, recipe)
    with steady(device):
        model, other = new_model(task), new_model(task)
        check_start(model, other)
        rules = rules_of(other, task.example())
        for key in settings:
            registry.build(key, settings[key], other, task.example())
        loss, first_time = try_out(task)
        first_time |= describe(recipe, model)
        again, second_time = try_out(task)
        second_time |= describe(recipe, other)
    check_batches(first_time, second_time)
    check_loss(loss, again, 1e-5 if device.type == "cpu" else 1e-2)  # elsewhere sums have no order
    return digest_of(rules | dict(first_time.items() & second_time.items()))[:8]


def check_batches(first_time: Mapping[str, str], second_time: Mapping[str, str]) -> None:
    for loader in ("train_loader", "valid_loader"):
        if first_time.get(loader) != second_time.get(loader):
            raise LabError(
                f"{loader} gave two different first batches under the same seed; draw its random "
                "numbers from torch, numpy or random, and from no generator of its own, and let "
                "loss_fn and metrics change no batch in place"
            )


def check_loss(one: float, other: float, tolerance: float) -> None:
    """A counter in a loss, say, would go on where the last run's ended."""
    if not math.isclose(one, other, rel_tol=tolerance) and not (one != one and other != other):
        raise LabError(
            f"loss_fn gave {one:.6g} and then {other:.6g} for the same weights, batch and seed, so "
            "every optimizer would have another loss; keep what it counts or collects in the model "
            "(a buffer), new for every run, and draw random numbers from torch, numpy or random"
        )


def rules_of(model: nn.Module, example: Any) -> dict[str, str]:
    """What the example decides, by parameter."""
    try:
        groups = param_groups(model, example)
    except (RuntimeError, TypeError, ValueError) as error:
        cause = error.__cause__ or str(error).partition(": pass forward")[0]  # not ours to offer
        raise LabError(
            "example_batch must be what the model takes, a loader's (x, y) or x alone, with "
            f"several samples, or be left out; the model said: {cause}"
        ) from error
    return {f"rule of {name}": group["rule"] for group in groups for name, _ in group["params"]}


@contextlib.contextmanager
def steady(device: torch.device) -> Iterator[None]:
    """One thread and deterministic kernels: the same numbers whenever it is asked for them."""
    convolutions = fixed_convolutions() if device.type == "cuda" else contextlib.nullcontext()
    with convolutions, threads(1):
        yield


@contextlib.contextmanager
def fixed_convolutions() -> Iterator[None]:
    """cuDNN's algorithms are those of every run, not those that happen to be fastest now.

    ``cudnn.flags`` would also touch the TF32 flags, and refuses what their newer names may say.
    """
    cudnn = torch.backends.cudnn
    before = cudnn.benchmark, cudnn.deterministic
    cudnn.benchmark, cudnn.deterministic = False, True
    try:
        yield
    finally:
        cudnn.benchmark, cudnn.deterministic = before


def try_out(task: Yours) -> tuple[float, dict[str, str]]:
    """The first loss; the first batches' digests, and what a new model makes of them, in short."""
    model = new_model(task).train()
    torch.manual_seed(task.seed_of(0, purpose=1))  # as at the beginning of an epoch
    batch = first(task.stream(0), "train_loader")
    seen = {"train_loader": digest_of(fingerprint({"batch": batch}))}
    loss = task.loss(model, (batch,), Phase())
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        what = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise LabError(f"loss_fn must return one number that has a gradient, got {what}")
    values = {"loss": loss.detach()}
    if task.recipe.valid is not None:
        batch = first(task.validation(task.recipe.valid), "valid_loader")
        seen["valid_loader"] = digest_of(fingerprint({"batch": batch}))
        with torch.no_grad():
            values |= task.measure(model.eval(), batch)
    told = {f"value of {key}": f"{value.item():.3e}" for key, value in values.items()}
    return loss.item(), seen | told


def describe(recipe: Recipe, model: nn.Module) -> dict[str, str]:
    """All that is known before a run; a library's own kind of loader has no more than a length."""
    loaders = {"all of train_loader": recipe.train, "all of valid_loader": recipe.valid}
    lengths = {f"length of {name}": length_of(loader) for name, loader in loaders.items()}
    functions = {"model_fn": recipe.model_fn, "loss": recipe.loss_fn, "metrics": recipe.metrics}
    return fingerprint({**functions, **loaders, **lengths, "model": model})


def length_of(loader: Any) -> int | None:
    with contextlib.suppress(Exception):  # a DataLoader may have none, and others say so otherwise
        return len(loader)


def digest_of(parts: Mapping[str, str]) -> str:
    return hashlib.sha256(canonical(dict(parts)).encode()).hexdigest()


def check_start(model: nn.Module, again: nn.Module) -> None:
    """Whoever trains second must not begin where the first one ended, nor anywhere else."""
    if any(is_lazy(tensor) for tensor in chain(model.parameters(), model.buffers())):
        raise LabError(
            "model_fn made a model with lazy layers, whose weights have no shape yet; call it once "
            "on a batch before you return it"
        )
    parameters = {id(p) for p in model.parameters()}
    if not parameters:
        raise LabError("model_fn made a model without parameters: there is nothing to train")
    if parameters & {id(p) for p in again.parameters()}:
        raise LabError(
            "model_fn returned the same parameters twice, so the second optimizer would go on "
            "where the first one ended; make a new model in it (copy.deepcopy of yours will do)"
        )
    pairs = zip(model.state_dict().values(), again.state_dict().values(), strict=False)
    if not all(same_values(a, b) for a, b in pairs):
        raise LabError(
            "model_fn made two models with different weights under the same seed; draw its random "
            "numbers from torch, numpy or random, and from no generator of its own"
        )


def same_values(a: Any, b: Any) -> bool:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return True  # extra state
    return a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)


def first(batches: Iterable[Any], what: str) -> Any:
    for batch in batches:
        return batch
    raise LabError(f"{what} gave no batch; is its data set empty?")
