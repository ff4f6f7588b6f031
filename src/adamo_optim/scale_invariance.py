"""Which weights are scale-invariant: Euler's identity on a float64 twin of the model.

A weight is scale-invariant when f(c·w) = f(w) for every c > 0. The Jacobian then takes w to zero,
and every gradient g = Jᵀy is orthogonal to w, whatever the cotangent y. The model itself is never
run; a float64 twin of it is, so that zero can mean rounding level.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import inspect
import math
import random
import sys
import threading
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import _engine_run_backward
from torch.overrides import TorchFunctionMode

from .example_batch import Call, tensors_in
from .options import users_level
from .rules import Rule

# What the examination finds
SCALE_INVARIANT = Rule("scale_invariant", "scale-invariant by Euler's identity")
SCALE_DEPENDENT = Rule("general", "depends on its scale")
NO_GRADIENT = Rule("general", "no gradient reached it: unknown, treated as general")
NOT_FINITE = Rule("general", "its gradient was not finite: unknown, treated as general")
EPS_MATTERS = Rule("general", "depends on its scale through the eps of a norm layer")
HARDLY_VARIES = Rule(
    "general", "unknown: features before a BatchNorm hardly vary in the example batch"
)

# A norm layer's eps moves |cos(g, w)| by about eps / variance: 1e-20 serves features down to a
# standard deviation of 1e-5 at the default tolerance. Features without any variance are divided
# by √eps = 1e-10 instead of 0: their gradients stay finite, and not so large that another
# dependence on the scale of w could vanish beside them in the cosine.
NEGLIGIBLE_EPS = 1e-20
# With the model's own eps, |cos(g, w)|·√(entries of w) is about eps / (variance + eps), and about 1
# where no norm layer follows. Above this the scale of w does matter.
FELT_EPS = 0.1
RMS_NORM_EPS = torch.finfo(torch.float32).eps  # what F.rms_norm takes where none is given
EPS_NAMES = ("eps", "epsilon", "variance_epsilon")
NORM_FUNCTIONS = {F.batch_norm, F.group_norm, F.instance_norm, F.layer_norm, F.rms_norm}
NARROW_CASTS = {Tensor.float, Tensor.half, Tensor.bfloat16}
WIDE = dict.fromkeys((torch.float16, torch.bfloat16, torch.float32), torch.float64)
WIDE[torch.complex64] = torch.complex128
ROUNDING = 1e-13  # ‖g‖‖w‖ below this share of the model's largest is cancellation noise

# What varies less than this beside its mean, in squares, has lost too many digits to tell.
HARDLY = 1e-7

# Default dtype, random states and torch.compile's stance belong to the whole process.
ONE_AT_A_TIME = threading.RLock()


def examine(model: nn.Module, call: Call, trials: int, tolerance: float) -> dict[str, Rule]:
    """Rule and reason of every parameter by Euler's identity."""
    generator = torch.Generator("cpu").manual_seed(0)  # the same verdicts every time
    with _isolation():
        twin = _float64_twin(model)
        _leave_special_points(twin.parameters(), generator)
        modes: list[_Float64Mode] = []

        def measure(eps: float | None) -> dict[str, list[tuple[float, float]]]:
            """⟨g, w⟩ and ‖g‖‖w‖ of every weight, per trial."""
            measured = {name: [] for name, _ in twin.named_parameters()}
            for _ in range(trials):
                modes.append(_Float64Mode(eps))
                gradients = _random_gradients(twin, call, generator, modes[-1])
                for name, weight in twin.named_parameters():
                    if (gradient := gradients.get(weight)) is not None:
                        measured[name].append(_alignment(gradient, weight))
            return measured

        with _eps_of_norm_layers(twin, NEGLIGIBLE_EPS):
            measured = measure(NEGLIGIBLE_EPS)
        if not any(measured.values()):
            raise ValueError(
                f"No gradient of {call} reached any weight: does forward call the model that it is "
                "given, a copy? What closes over the model itself does not run the copy."
            )
        sizes = [size for pairs in measured.values() for _, size in pairs if math.isfinite(size)]
        noise = ROUNDING * max(sizes, default=0.0)
        verdicts = {name: _verdict(pairs, tolerance, noise) for name, pairs in measured.items()}
        if SCALE_INVARIANT in verdicts.values():
            for name, pairs in measure(None).items():
                bound = FELT_EPS / math.sqrt(max(twin.get_parameter(name).numel(), 1))
                felt = any(abs(inner) > bound * size for inner, size in pairs)
                if felt and verdicts[name] == SCALE_INVARIANT:
                    verdicts[name] = EPS_MATTERS
    if any(mode.saw_constant_features for mode in modes):
        _warn_of_constant_features()
        unsure = {SCALE_DEPENDENT, EPS_MATTERS}
        verdicts = {n: HARDLY_VARIES if v in unsure else v for n, v in verdicts.items()}
    told = f" (examined with {call.taken})" if call.taken else ""
    return {name: Rule(rule, reason + told) for name, (rule, reason) in verdicts.items()}


def _warn_of_constant_features() -> None:
    warnings.warn(
        "Features before a BatchNorm hardly vary in this example_batch, so that weights whose "
        "scale does not matter cannot be told from others. Pass real samples, or random "
        "numbers of their shape, not zeros or ones.",
        UserWarning,
        stacklevel=users_level(),
    )


def is_trainable(parameter: Tensor) -> bool:
    """Integers (quantized weights) have no gradient."""
    return parameter.is_floating_point() or parameter.is_complex()


def _alignment(gradient: Tensor, weight: Tensor) -> tuple[float, float]:
    g, w = gradient.to_dense(), weight.detach()
    if w.is_complex():
        g, w = torch.view_as_real(g), torch.view_as_real(w)
    return float((g * w).sum()), float(g.norm() * w.norm())


def _verdict(measured: list[tuple[float, float]], tolerance: float, noise: float) -> Rule:
    if not all(math.isfinite(value) for pair in measured for value in pair):
        return NOT_FINITE
    # Stochastic depth and routing may miss a weight in one trial: those that reach it decide.
    reached = [(inner, size) for inner, size in measured if size > 0.0]
    if reached and all(abs(inner) <= tolerance * size for inner, size in reached):
        return SCALE_INVARIANT
    if all(size <= noise for _, size in reached):
        return NO_GRADIENT
    return SCALE_DEPENDENT


@contextlib.contextmanager
def _isolation() -> Iterator[None]:
    """Gradients on, autocast and compilation off, float64 by default; random states come back."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(ONE_AT_A_TIME)
        stack.enter_context(_caches_forget())
        # Asking CUDA for its state would initialize it.
        cuda = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
        stack.enter_context(torch.random.fork_rng(devices=cuda))
        stack.callback(random.setstate, random.getstate())
        if numpy := sys.modules.get("numpy"):
            stack.callback(numpy.random.set_state, numpy.random.get_state())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for device_type in ("cpu", "cuda"):
            stack.enter_context(torch.autocast(device_type, enabled=False))
        if "torch._dynamo" in sys.modules:  # else nothing compiles, and importing it is slow
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(torch.float64)
        yield


@contextlib.contextmanager
def _caches_forget() -> Iterator[None]:
    """Clear every lru_cache that was added to: the model would find the twin's float64 there.

    All of it is cleared, what stood there before as well.
    """
    caches = [c for c in gc.get_objects() if type(c) is functools._lru_cache_wrapper]
    misses = [c.cache_info().misses for c in caches]
    try:
        yield
    finally:
        for cache, before in zip(caches, misses, strict=True):
            if cache.cache_info().misses != before:
                cache.cache_clear()


def _float64_twin(model: nn.Module) -> nn.Module:
    """A float64 copy for training, every weight trainable."""
    # Hook-based weight_norm leaves computed weights in its module, which torch refuses to copy.
    computed = [t for t in _plain_tensors(model) if not t.is_leaf]
    try:
        twin = copy.deepcopy(model, {id(t): t.detach().clone() for t in computed})
        if [n for n, _ in twin.named_parameters()] != [n for n, _ in model.named_parameters()]:
            raise ValueError("the copy gives its parameters other names, as in Keras")
    except Exception as error:
        raise RuntimeError(
            f"The model cannot be copied ({type(error).__name__}: {error}). Call param_groups "
            "before the model is wrapped, or with example_batch=None to examine nothing."
        ) from error
    if not all(map(_has_float64, {p.device for p in twin.parameters()})):
        twin.cpu()
    twin.double()
    if not model.training:  # else as it stands: a BatchNorm in eval mode was frozen on purpose
        twin.train()
    for tensor in (*twin.parameters(), *twin.buffers(), *_plain_tensors(twin)):
        tensor.data = tensor.data.to(WIDE.get(tensor.dtype, tensor.dtype))
    for parameter in twin.parameters():
        parameter.requires_grad_(is_trainable(parameter))
    return twin


@contextlib.contextmanager
def _eps_of_norm_layers(twin: nn.Module, eps: float) -> Iterator[None]:
    """Another eps in every module that has one, for a while."""
    with contextlib.ExitStack() as stack:
        for module in twin.modules():
            for name in EPS_NAMES:
                own = getattr(module, name, None)
                if isinstance(own, float):
                    with contextlib.suppress(AttributeError):  # a read-only property
                        setattr(module, name, eps)
                        stack.callback(setattr, module, name, own)
        yield


def _plain_tensors(model: nn.Module) -> list[Tensor]:
    """Tensors kept as attributes that are neither parameters nor buffers."""
    return [t for m in model.modules() for t in vars(m).values() if isinstance(t, Tensor)]


def _has_float64(device: torch.device) -> bool:
    try:
        torch.zeros(1, dtype=torch.float64, device=device)
    except (TypeError, RuntimeError):  # mps
        return False
    return True


@torch.no_grad()
def _leave_special_points(parameters: Iterable[Tensor], generator: torch.Generator) -> None:
    """Perturb all parameters: what holds only at 0, at 1 or at an identity does not last.

    Entries that are not 0 move away from it, so that what must be positive stays so.
    """
    for p in parameters:
        if p.requires_grad and p.numel() > 0:
            noise = _normal_like(p, generator) * (0.1 * p.abs().max().item() or 0.02)
            constant = p.is_complex() or (p == p.flatten()[0]).all()
            p.add_(noise if constant else torch.where(p == 0, noise, noise.abs() * p.sign()))


def _normal_like(t: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(t.shape, generator=generator, dtype=t.dtype, device="cpu").to(t.device)


def _random_gradients(
    twin: nn.Module, call: Call, generator: torch.Generator, mode: _Float64Mode
) -> dict[Tensor, Tensor | None]:
    """Every trainable parameter's gradient in one forward pass with random cotangents."""
    weights = tuple(p for p in twin.parameters() if p.requires_grad)
    try:
        with mode:
            args, kwargs = _float64_copy((call.args, call.kwargs), twin)
            result = call.function(twin, *args, **kwargs)
            outputs = tuple(t for t in tensors_in(result) if t.requires_grad)
            cotangents = tuple(_normal_like(t, generator) for t in outputs)
            # Not backward(): that could write into .grad fields outside the twin. Nor grad(): it
            # leaves the mode, and checkpointed layers, computed once more, would cast again.
            gradients = outputs and _engine_run_backward(
                outputs, cotangents, False, False, weights, True, accumulate_grad=False
            )
    except Exception as error:
        raise RuntimeError(
            f"The model could not be examined: {call}, in train mode and float64, raised "
            f"{type(error).__name__}: {error}\nIf the model is called in another way, pass "
            "forward=lambda model, batch: ... that calls it. BatchNorm needs several samples. "
            f"{_hint(str(error))}param_groups(model) alone examines nothing."
        ) from error
    if not outputs:
        raise ValueError(
            f"The model's output, of type {type(result).__name__}, contains no tensor that requires"
            " grad: pass forward=lambda model, batch: ... that returns what the loss is made of."
        )
    return dict(zip(weights, gradients, strict=True))


def _hint(error: str) -> str:
    words = error.lower()
    if "double" in words and "float" in words:
        return (
            "A tensor that the copy does not reach, in a list, a closure, a global or a numpy "
            "array, keeps its dtype: make it a buffer (register_buffer). "
        )
    if "checkpoint" in words or "incompatible with .grad()" in words:
        return "Checkpointing needs use_reentrant=False here, or is switched on afterwards. "
    return ""


def _float64_copy(inputs: Any, twin: nn.Module) -> Any:
    """A copy of the inputs, floating tensors in float64, on the twin's device if it has one."""
    devices = {p.device for p in twin.parameters()}
    copies = {}
    for t in tensors_in(inputs):
        device = next(iter(devices)) if len(devices) == 1 else t.device
        wide = t.detach().to(device, WIDE.get(t.dtype, t.dtype), copy=True)
        copies[id(t)] = wide.requires_grad_(t.requires_grad)
    return copy.deepcopy(inputs, copies)  # whatever the containers are, they keep their types


class _Float64Mode(TorchFunctionMode):
    """Keeps models that cast inside in float64, and sets the eps of functional norms."""

    def __init__(self, eps: float | None) -> None:
        super().__init__()
        self.eps = eps  # None: as the model has it
        self.saw_constant_features = False  # most channels that a BatchNorm divided

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in NORM_FUNCTIONS:
            bound = inspect.signature(func).bind(*args, **kwargs)
            if func is F.batch_norm and bound.arguments.get("training", False):
                x = bound.arguments["input"].detach()
                variance, mean = torch.var_mean(
                    x, [d for d in range(x.dim()) if d != 1], correction=0
                )
                constant = variance <= HARDLY * mean.square()
                self.saw_constant_features |= bool(constant.double().mean() > 0.5)
            if self.eps is not None:
                bound.arguments["eps"] = self.eps
            elif func is F.rms_norm and bound.arguments.get("eps") is None:
                bound.arguments["eps"] = RMS_NORM_EPS
            return func(*bound.args, **bound.kwargs)
        if func in NARROW_CASTS:
            return Tensor.double(*args, **kwargs)
        if func is not Tensor.view:  # view(dtype) reads the same bytes in another way
            args = tuple(_widened(a) for a in args)
            kwargs = {key: _widened(a) for key, a in kwargs.items()}
        return func(*args, **kwargs)


def _widened(argument: Any) -> Any:
    return WIDE.get(argument, argument) if isinstance(argument, torch.dtype) else argument
