"""Parameter groups that know the architecture: ``param_groups`` and its overrides."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader

from .example_batch import Call, Forward, check_finite, ways_to_call
from .options import refuse_misspelt
from .ranges import RULES
from .rules import Rule, low_dim_by_shape
from .scale_invariance import examine, is_trainable

NOT_EXAMINED = Rule("auto", "not examined: no example batch was given")


def param_groups(
    model: nn.Module,
    example_batch: Any = None,
    *,
    overrides: Mapping[str, str | Mapping[str, Any]] | None = None,
    forward: Forward | None = None,
    trials: int = 3,
    tolerance: float = 1e-10,
) -> list[dict[str, Any]]:
    r"""Sort a model's parameters into groups for AdamO or AngularAdamW by their rules.

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
        example_batch: a batch as the loader gives it, ``next(iter(loader))``: a tensor, a tuple or
            list of arguments, or a mapping of them by name. What ``model.forward`` has no place
            for, such as targets, is left out, and the reasons say so. A small batch will do, but
            of real samples or random numbers, not of zeros or ones, and BatchNorm needs three
            values a channel (it maps any two to ±1). ``None``: nothing is guessed, every rule is
            ``"auto"``, and the shape decides.
        overrides: a rule, or a dict of group options with or without ``"rule"``, by parameter name
            or glob pattern. Options add up; where they differ, later patterns win over earlier
            ones and exact names over patterns.
        forward: ``forward(model, batch)`` calls the model in another way. Every tensor in its
            result counts, so leave out what the loss does not read, such as caches.
        trials: the number of forward and backward passes; as many more with the layers' own eps
            where a weight has passed.
        tolerance: the largest \|cos(g, w)\| of a scale-invariant weight.

    Returns:
        Groups ``{"params": [(name, parameter), ...], "rule": ..., "found": (rule, reason),
        "order": [...], **options}`` with every parameter once: tied ones by their first name,
        frozen ones too, but not those of integers, which nobody can train. ``found`` says what the
        examination found and why; a rule of ``overrides`` has none. ``order`` has the positions in
        ``model.parameters()``. A norm written by hand with a literal eps looks scale-dependent;
        ``overrides`` can correct that.

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
    _check(model, example_batch, forward, trials, tolerance)
    options = _options_by_name(model, overrides or {})
    trainable = {n: p for n, p in model.named_parameters() if is_trainable(p)}
    if example_batch is None or not trainable:
        found = dict.fromkeys(trainable, NOT_EXAMINED)
    else:
        calls = ways_to_call(model, example_batch, forward)
        found = _examine_by_first_that_runs(model, calls, trials, tolerance)
        found |= {n: rule for n, p in trainable.items() if (rule := low_dim_by_shape(p, "auto"))}
    groups: dict[tuple[object, ...], dict[str, Any]] = {}
    # Integers count: AdamW(model.parameters()) takes them, and steps over them.
    for position, (name, parameter) in enumerate(model.named_parameters()):
        if name not in trainable:
            continue
        # A plain tuple, which torch.load(weights_only=True) takes
        rule = {"rule": found[name].name, "found": tuple(found[name])}
        if "rule" in options[name]:
            rule = {"rule": options[name].pop("rule")}
        # Options need not be hashable, and equal tensors may still be different learning rates.
        values = [
            (k, id(v) if isinstance(v, Tensor) else repr(v)) for k, v in options[name].items()
        ]
        new = {"params": [], **rule, "order": [], **options[name]}
        group = groups.setdefault((*rule.values(), *sorted(values)), new)
        group["params"].append((name, parameter))
        group["order"].append(position)
    return list(groups.values())


def _examine_by_first_that_runs(
    model: nn.Module, calls: list[Call], trials: int, tolerance: float
) -> dict[str, Rule]:
    errors: list[RuntimeError] = []
    for call in calls:
        check_finite(call)
        try:
            return examine(model, call, trials, tolerance)
        except RuntimeError as error:
            errors.append(error)
    raise errors[0]


def _check(model: nn.Module, batch: Any, forward: Any, trials: int, tolerance: float) -> None:
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be a torch.nn.Module, got {type(model).__name__}.")
    if type(trials) is not int or trials < 1:
        raise ValueError(f"trials must be an integer >= 1, got {trials!r}.")
    if not 0.0 < tolerance < 1.0:
        raise ValueError(f"tolerance must lie between 0 and 1, got {tolerance!r}.")
    if isinstance(batch, DataLoader):
        raise ValueError("example_batch is a DataLoader: pass a batch, next(iter(loader)).")
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
    if written_here := {"params", "param_names", "found", "order"} & options.keys():
        raise ValueError(f"The override of {key!r} must not set {min(written_here)!r}.")
    refuse_misspelt(options.keys() - {"rule"}, f"The override of {key!r}")
    return options
