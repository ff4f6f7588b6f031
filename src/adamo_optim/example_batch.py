"""How a model is called with an example batch, whatever a loader has put into it."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

Forward = Callable[[nn.Module, Any], Any]


@dataclasses.dataclass(frozen=True)
class Call:
    """One way to call the model: ``function(model, *args, **kwargs)``."""

    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    taken: str = ""  # what it takes of the example batch, if that is not all

    def __str__(self) -> str:
        if self.function is not _call:
            return "forward(model, example_batch)"
        named = [f"{name}={_described(value)}" for name, value in self.kwargs.items()]
        return f"model({', '.join([*map(_described, self.args), *named])})"


def ways_to_call(model: nn.Module, batch: Any, forward: Forward | None = None) -> list[Call]:
    """The calls that ``model.forward`` can take, those that hand more of the batch over first.

    More than one, because a call that the signature allows may still fail: a loader's (images,
    labels) fits ``forward(x, attn_mask=None)``.
    """
    if forward is not None:
        return [Call(forward, (batch,))]
    if isinstance(batch, Mapping):
        calls = [_by_name(model, batch), Call(_call, (batch,))]
    elif isinstance(batch, (tuple, list)):
        firsts = [_with_first(k, batch) for k in range(len(batch), 0, -1)]
        calls = [*firsts, Call(_call, (batch,))]
    else:
        calls = [Call(_call, (batch,))]
    fitting = [call for call in calls if _binds(model, call)]
    return fitting or calls[:1]  # the error of the first says what is missing


def check_finite(call: Call) -> None:
    """Refuse NaN and +∞, but not −∞, which masks attention."""
    for t in tensors_in((call.args, call.kwargs)):
        dense = t.layout is torch.strided and not t.is_nested and not t.is_meta
        readable = dense and t.itemsize > 1 and (t.is_floating_point() or t.is_complex())
        if readable and not bool((t.isfinite() | (t == -math.inf)).all()):
            raise ValueError(
                f"example_batch has NaN or infinity in a tensor of shape {tuple(t.shape)}: pass "
                "samples that are finite."
            )


def tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name))


def _call(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return model(*args, **kwargs)


def _with_first(k: int, batch: Sequence[Any]) -> Call:
    n, some = len(batch), "the first" if k == 1 else f"the first {k}"
    taken = "" if k == n else f"{some} of {n} items of example_batch"
    return Call(_call, tuple(batch[:k]), taken=taken)


def _by_name(model: nn.Module, batch: Mapping[Any, Any]) -> Call:
    parameters = _signature(model).parameters.values()
    names = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        names |= batch.keys()
    left_out = ", ".join(repr(name) for name in batch if name not in names)
    taken = left_out and f"example_batch without {left_out}"
    return Call(_call, kwargs={k: v for k, v in batch.items() if k in names}, taken=taken)


def _binds(model: nn.Module, call: Call) -> bool:
    try:
        _signature(model).bind(*call.args, **call.kwargs)
    except TypeError:
        return False
    return True


def _signature(model: nn.Module) -> inspect.Signature:
    model = getattr(model, "_orig_mod", model)  # torch.compile's own forward takes anything
    try:
        return inspect.signature(model.forward)
    except ValueError:  # a function of C has none: anything may fit
        return inspect.signature(lambda *args, **kwargs: None)


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return type(value).__name__
