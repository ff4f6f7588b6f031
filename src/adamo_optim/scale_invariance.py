"""Parameter groups that know the architecture: scale-invariant weights by Euler's identity.

The model itself is never run; a float64 twin of it is, so that zero can mean rounding level.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import difflib
import inspect
import math
import random
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from .options import DEFAULTS, check_low_dim, users_level
from .rules import (
    EPS_MATTERS,
    HARDLY_VARIES,
    NO_GRADIENT,
    NOT_EXAMINED,
    NOT_FINITE,
    SCALE_DEPENDENT,
    SCALE_INVARIANT,
    SET_BY_USER,
    Verdict,
    low_dim_by_shape,
)

RULES = ("low_dim", "scale_invariant", "general", "auto")

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

Forward = Callable[[nn.Module, Any], Any]


def param_groups(
    model: nn.Module,
    example_batch: Any = None,
    *,
    overrides: Mapping[str, str | Mapping[str, Any]] | None = None,
    forward: Forward | None = None,
    low_dim: str | int | None = "auto",
    trials: int = 3,
    tolerance: float = 1e-10,
) -> list[dict[str, Any]]:
    r"""Sort a model's parameters into groups for AdamO by the rule each should follow.

    A weight is scale-invariant when :math:`f(c\,w) = f(w)` for every :math:`c > 0`, as before
    BatchNorm. By Euler's identity the Jacobian then takes w to zero, and every gradient g = Jᵀy is
    orthogonal to w, whatever the cotangent y:

    .. math:: J(w)\,w = 0 \quad\Longrightarrow\quad \langle g, w\rangle = 0

    A few backward passes with random cotangents therefore examine all weights at once. They run in
    train mode, modules in eval mode inside a model in train mode (a frozen BatchNorm) excepted, on
    a float64 copy whose norm layers have a negligible eps and whose parameters are perturbed: a
    bias that starts at zero hides that W x + b depends on the scale of W, and a zero weight lets no
    gradient through. What passes is examined once more with the layers' own eps, for which its
    features may be too small. The model, its gradients and flags and the random state stay as they
    are; forward hooks are called, with the copy.

    Args:
        model: the model, before it is wrapped for distributed training; where wrapping replaces
            its parameters (``fully_shard``), :func:`adamo_optim.rebind` carries the groups over.
        example_batch: what the model takes: ``model(**batch)`` for a mapping, ``model(*batch)``
            for a tuple or list, else ``model(batch)``. A small one will do, but of real samples
            or random numbers, not of zeros or ones, and BatchNorm needs three values a channel (it
            maps any two to ±1). ``None``: nothing is guessed, every rule is ``"auto"`` and AdamO
            decides by shape.
        overrides: a rule, or a dict of group options with or without ``"rule"``, by parameter name
            or glob pattern. Options add up; where they differ, later patterns win over earlier
            ones and exact names over patterns.
        forward: ``forward(model, batch)`` in place of the calls above. Every tensor in its result
            counts, so leave out what the loss does not read, such as caches.
        low_dim: ``"auto"`` makes parameters with dim <= 1 or one entry low-dimensional, an integer
            also those with fewer entries, ``None`` none. Decided first, as in Algorithm 1.
        trials: the number of forward and backward passes; as many more with the layers' own eps
            where a weight has passed.
        tolerance: the largest \|cos(g, w)\| of a scale-invariant weight.

    Returns:
        Groups ``{"params": [(name, parameter), ...], "rule": ..., "rule_reason": ..., **options}``
        with every parameter once: tied ones by their first name, frozen ones too, but not those of
        integers, which nobody can train. A norm written by hand with a literal eps looks
        scale-dependent; ``overrides`` can correct that.

    Example:
        >>> model = nn.Sequential(
        ...     nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(32, 5)
        ... )
        >>> for group in param_groups(model, torch.randn(4, 3, 4, 4)):
        ...     print(group["rule"], [name for name, _ in group["params"]])
        scale_invariant ['0.weight']
        low_dim ['1.weight', '1.bias', '3.bias']
        general ['3.weight']

    References:
        AdamO, Algorithm 1, ScaleInv(w): https://arxiv.org/abs/2602.05136.
        AdamP, on the growth of scale-invariant weights: https://arxiv.org/abs/2006.08217.
    """
    _check(model, example_batch, forward, low_dim, trials, tolerance)
    options = _options_by_name(model, overrides or {})
    trainable = {n: p for n, p in model.named_parameters() if is_trainable(p)}
    if example_batch is None or not trainable:
        verdicts = dict.fromkeys(trainable, NOT_EXAMINED)
        shared = {} if low_dim == "auto" else {"low_dim": low_dim}  # AdamO decides, so tell it
    else:
        verdicts = _examine(model, example_batch, forward or _call, trials, tolerance)
        verdicts |= {n: v for n, p in trainable.items() if (v := low_dim_by_shape(p, low_dim))}
        shared = {}
    groups: dict[tuple[object, ...], dict[str, Any]] = {}
    for name, parameter in trainable.items():
        extra = {**shared, **options[name]}
        rule, reason = verdicts[name]
        if "rule" in extra:
            rule, reason = extra.pop("rule"), SET_BY_USER
        # Options need not be hashable, and equal tensors may still be different learning rates.
        values = [(k, id(v) if isinstance(v, Tensor) else repr(v)) for k, v in extra.items()]
        new = {"params": [], "rule": rule, "rule_reason": reason, **extra}
        groups.setdefault((rule, reason, *sorted(values)), new)["params"].append((name, parameter))
    return list(groups.values())


def _check(
    model: nn.Module, batch: Any, forward: Any, low_dim: Any, trials: int, tolerance: float
) -> None:
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be a torch.nn.Module, got {type(model).__name__}.")
    check_low_dim(low_dim)
    if type(trials) is not int or trials < 1:
        raise ValueError(f"trials must be an integer >= 1, got {trials!r}.")
    if not 0.0 < tolerance < 1.0:
        raise ValueError(f"tolerance must lie between 0 and 1, got {tolerance!r}.")
    if forward is not None and batch is None:
        raise ValueError("forward has nothing to run on: pass an example_batch with it.")
    scripted = any(isinstance(module, torch.jit.ScriptModule) for module in model.modules())
    if scripted and batch is not None:
        raise ValueError("A scripted model cannot be examined: call param_groups before scripting.")
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise ValueError(
                f"Parameter {name!r} is lazy and has no shape yet: run a forward pass first."
            )
        if parameter.is_meta:
            raise ValueError(
                f"Parameter {name!r} is on the meta device and has no values: materialize the "
                "model on a real device first."
            )


def _options_by_name(model: nn.Module, overrides: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The user's group options of every parameter, under the name it is listed by."""
    listed_as = {p: name for name, p in model.named_parameters()}
    # Tied weights answer to each of their names.
    aliases = {n: listed_as[p] for n, p in model.named_parameters(remove_duplicate=False)}
    options: dict[str, dict[str, Any]] = {name: {} for name in listed_as.values()}
    for key in sorted(overrides, key=aliases.__contains__):  # exact names last, so that they win
        names = [n for n in aliases if n == key or (key not in aliases and fnmatchcase(n, key))]
        if not names:
            some = ", ".join(repr(n) for n in list(aliases)[:5])
            raise ValueError(
                f"The override {key!r} matches no parameter; the names are like {some}."
            )
        for name in names:
            options[aliases[name]].update(_as_options(key, overrides[key]))
    return options


def _as_options(key: str, override: object) -> dict[str, Any]:
    if not isinstance(override, (str, Mapping)):
        raise ValueError(
            f"The override of {key!r} must be a rule or a dict of options, got {override!r}."
        )
    options = {"rule": override} if isinstance(override, str) else dict(override)
    if options.get("rule", "auto") not in RULES:
        legal = ", ".join(map(repr, RULES))
        raise ValueError(f"The rule of {key!r} must be one of {legal}, got {options['rule']!r}.")
    if written_here := {"params", "rule_reason"} & options.keys():
        raise ValueError(f"The override of {key!r} must not set {min(written_here)!r}.")
    for name in options.keys() - DEFAULTS.keys():  # a group may carry anything, such as lr_scale
        if meant := difflib.get_close_matches(str(name), DEFAULTS, n=1, cutoff=0.85):
            raise ValueError(f"The override of {key!r} has {name!r}: did you mean {meant[0]!r}?")
    return options


def _examine(
    model: nn.Module, batch: Any, forward: Forward, trials: int, tolerance: float
) -> dict[str, Verdict]:
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
                gradients = _random_gradients(twin, batch, forward, generator, modes[-1])
                for name, weight in twin.named_parameters():
                    measured[name].append(_alignment(gradients.get(weight), weight))
            return measured

        with _eps_of_norm_layers(twin, NEGLIGIBLE_EPS):
            measured = measure(NEGLIGIBLE_EPS)
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
        warnings.warn(
            "Features before a BatchNorm hardly vary in this example_batch, so that weights whose "
            "scale does not matter cannot be told from others. Pass real samples, or random "
            "numbers of their shape, not zeros or ones.",
            UserWarning,
            stacklevel=users_level(),
        )
        unsure = {SCALE_DEPENDENT, EPS_MATTERS}
        verdicts = {n: HARDLY_VARIES if v in unsure else v for n, v in verdicts.items()}
    return verdicts


def is_trainable(parameter: Tensor) -> bool:
    """Integers (quantized weights) have no gradient."""
    return parameter.is_floating_point() or parameter.is_complex()


def _alignment(gradient: Tensor | None, weight: Tensor) -> tuple[float, float]:
    if gradient is None:
        return 0.0, 0.0
    g, w = gradient.to_dense(), weight.detach()
    if w.is_complex():
        g, w = torch.view_as_real(g), torch.view_as_real(w)
    return float((g * w).sum()), float(g.norm() * w.norm())


def _verdict(measured: list[tuple[float, float]], tolerance: float, noise: float) -> Verdict:
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


def _float64_twin(model: nn.Module) -> nn.Module:
    """A float64 copy for training, every weight trainable."""
    # Hook-based weight_norm leaves computed weights in its module, which torch refuses to copy.
    computed = [t for t in _plain_tensors(model) if not t.is_leaf]
    try:
        twin = copy.deepcopy(model, {id(t): t.detach().clone() for t in computed})
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
    twin: nn.Module, batch: Any, forward: Forward, generator: torch.Generator, mode: _Float64Mode
) -> dict[Tensor, Tensor | None]:
    """Every trainable parameter's gradient in one forward pass with random cotangents."""
    weights = [p for p in twin.parameters() if p.requires_grad]
    try:
        with mode:
            result = forward(twin, _float64_batch(batch, {p.device for p in twin.parameters()}))
            outputs = [t for t in _tensors_in(result) if t.requires_grad]
            cotangents = [_normal_like(t, generator) for t in outputs]
            # Not backward(): that could write into .grad fields outside the twin.
            gradients = outputs and torch.autograd.grad(
                outputs, weights, cotangents, allow_unused=True
            )
    except Exception as error:
        raise RuntimeError(
            "The model could not be examined: in train mode and float64, on this example_batch, it "
            f"raised {type(error).__name__}: {error}\nIf it is called in another way, pass forward="
            "lambda model, batch: ... (say model(batch[0]) for a loader's (x, y)). BatchNorm needs "
            f"several samples. {_hint(str(error))}With example_batch=None nothing is examined."
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


def _call(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)


def _float64_batch(batch: Any, devices: set[torch.device]) -> Any:
    """A copy of the batch, floating tensors in float64, on the twin's device if it has one."""
    copies = {}
    for t in _tensors_in(batch):
        device = next(iter(devices)) if len(devices) == 1 else t.device
        wide = t.detach().to(device, WIDE.get(t.dtype, t.dtype), copy=True)
        copies[id(t)] = wide.requires_grad_(t.requires_grad)
    return copy.deepcopy(batch, copies)  # whatever the containers are, they keep their types


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors_in(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _tensors_in(getattr(value, field.name))


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
