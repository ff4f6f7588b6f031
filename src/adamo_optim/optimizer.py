"""The optimizer class: options, state, step, checkpoints. The maths is in ``control.py``."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import (
    Optimizer,
    ParamsT,
    StateDict,
    _use_grad_for_differentiable,
)

from . import diagnostics, geometry, migrate
from . import sharded as sharding
from .backends import choose
from .layout import Layout
from .options import (
    DEFAULTS,
    FORM,
    PAPER,
    RADIAL_SGD,
    SCHEMA,
    as_pair,
    check_options,
    warn_of_collapse,
)
from .rules import Explanation, Row, decays, rule_of, warn_of_declared_rules
from .state import (
    BUFFERS,
    SCALARS,
    Bucket,
    Work,
    apart,
    complete_mean_square,
    initialize,
    is_fresh,
    refuse_scaling,
    sampled_state,
    whole_previous,
)


class AdamO(Optimizer):
    r"""AdamO: a weight's norm and its direction, each with a step size of its own.

    .. math::
        w^+ = (1 - \eta_{\rho,t}\lambda)\,w
              - \eta_{\rho,t}\,\varphi^\rho_w(u^\rho)
              - \eta_\theta\,\varphi^\theta_w(\hat m / (\sqrt{\hat v} + \epsilon)),
        \qquad \eta_{\rho,t} = \eta_\rho / \sqrt{\tau_t/\tau_{target} + \epsilon}

    with :math:`\varphi^\rho_w, \varphi^\theta_w` the projections on and across ``w``, one block per
    tensor. The radial step :math:`u^\rho` is Adam's own quotient (``radial="adam"``) or momentum
    SGD (``radial="sgd"``, the paper). Low-dimensional parameters follow AdamW; scale-invariant ones
    take no radial step and all turn by about the same angle.

    Coming from AdamW: keep all of its numbers, and the schedule.

    Args:
        params: parameters, named parameters, or groups; see :func:`adamo_optim.param_groups`.
            Every option may differ per group and may be changed during training, except
            ``differentiable``. A group may also carry ``rule``: ``"auto"`` (by shape),
            ``"general"``, ``"scale_invariant"`` or ``"low_dim"``.
        lr: learning rate η_θ of the tangential step, and the unit of the radial one's; a number or
            a tensor with one element.
        betas: (β₁, β₂) of Adam's moments.
        eps: ε, in the denominators of Adam and of the curvature scale.
        weight_decay: λ of the radial decay; the decay per step is λ·η_ρ,t. AdamW's value with the
            other defaults; around 1e-3 with :meth:`radial_sgd`.
        radial_lr_ratio: η_ρ = ``radial_lr_ratio``·``lr``, so that schedulers move both.
        radial_lr: an absolute η_ρ in its place, which no scheduler moves.
        radial_beta: β₁^ρ, momentum of the radial SGD step.
        curvature_target: τ_target as a number (the paper), ``"auto"`` (each block's own slow
            average of κ: scale-free), or ``None`` (no curvature adaptation).
        curvature_beta: β_τ.
        previous_gradient: how g⁻ is kept for κ = ‖g − g⁻‖²: ``"exact"``; ``"bfloat16"`` (half the
            memory; adds about 10⁻⁶·‖g‖² to κ); ``"sampled"`` (a fixed slice of about 1/16 of the
            entries, scaled up; unbiased over the choice of the slice, but for one parameter off
            by a fixed factor where its rows differ in gradient noise, which cancels under
            ``curvature_target="auto"`` and does not under a number).
        decay_lr: λ is multiplied by η_ρ,t (``"radial"``) or by η_θ (``"tangential"``: the paper's
            AdamO-Isotropic).
        tangential: ``"additive"`` (the paper); ``"angular"``: a rotation whose angle does not
            depend on ‖w‖, so that the norm moves through the radial part alone; ``"auto"`` =
            angular for weights declared scale-invariant (``rule``, :func:`param_groups`), additive
            for the others. Where a weight is both, it does not decay: its norm would set neither
            the output nor the angle.
        angular_rms: what ``lr`` means as an angle: a step turns w as far as an additive one would
            turn a weight whose entries have this root mean square, so that all blocks turn alike.
            ``None``: as it would turn the block's own weight of its first step.
            ``"equilibrium"``: as it would turn AdamW's weight that has come to rest between growth
            and decay, with entries of lr/√(2ηλ): an angle that falls with the root of ``lr`` and
            that λ sets. With an absolute ``radial_lr`` the angle does not depend on ``lr``; without
            decay it is as with ``None``.
        radial: ``"adam"`` = moments of the whole gradient, as in Adam, and η_ρ,t times the radial
            part of m̂/(√v̂ + ε); with ``radial_lr_ratio=1`` and without curvature it is AdamW's own
            step. ``"sgd"`` = the paper: momentum SGD on ‖w‖, and moments of the tangential
            gradient. It needs a much larger ``radial_lr_ratio`` and a smaller ``weight_decay``,
            which :meth:`radial_sgd` sets.
        second_moment: what Adam divides by: ``"entry"`` = every entry by the root of its own v̂;
            ``"block"`` = all entries of a block by the root of v̂'s mean over it, so that the block
            moves along its averaged gradient; ``"auto"`` = ``"block"`` for weights declared
            scale-invariant, ``"entry"`` for the others. Low-dimensional parameters keep
            ``"entry"``. v is kept in any case: this saves no memory, and may be changed during
            training.
        low_dim: ``"auto"`` = tensors with dim <= 1, or of one entry, follow AdamW; an integer d_th
            = also those with numel < d_th; ``None`` = none. A rule that a group declares wins:
            with :func:`param_groups`, pass it there.
        low_dim_scale: α in (0, 1], on the step of low-dimensional parameters.
        low_dim_decay: λ of low-dimensional parameters: w shrinks by lr·``low_dim_decay`` a step.
            ``None`` = ``weight_decay``, as in AdamW; 0 = plain Adam, as in the paper.
        delta: AdamP's online test: a block with \|cos(g, w)\| < delta/√numel takes no radial step.
        wd_ratio: multiplies λ wherever the scale-invariant rule is active, declared or by the test.
        guard: bounds η_ρ,t/η_ρ to [0.1, 10], a step's factor on w to [0.5, 2] and the root mean
            square of m̂/(√v̂ + ε) to 100, counts ``lr/angular_rms`` as 0.1 at most, skips decay
            while ‖w‖ < 0.1·‖w₀‖, takes tangential gradients at rounding level as 0
            (``radial="sgd"``), and leaves a block untouched when gradient or norm is not finite.
            ``False`` is Algorithm 1 to the letter; non-finite gradients then reach the weights, as
            in ``torch.optim.AdamW``.
        maximize, foreach, fused, capturable, differentiable: as in ``torch.optim.AdamW``.
        rounding: how a new bfloat16 weight is rounded: to ``"nearest"``, which loses steps smaller
            than about 0.2 % of an entry (a small decay above all), or ``"stochastic"``, which is
            exact in the mean. Other dtypes are rounded to nearest; float16 with ``"stochastic"``
            is refused.

    Example:
        >>> model = torch.nn.Linear(8, 2)
        >>> optimizer = AdamO(model.named_parameters(), lr=1e-3)
        >>> model(torch.ones(4, 8)).sum().backward()
        >>> optimizer.step()

    References:
        H. Chen, J. Yuan, H. Zhang: Decoupled Orthogonal Dynamics: Regularization for Deep Network
        Optimizers. The equations' numbers in this package are that paper's.
    """

    _layout: Any = None  # a Layout, which the first step makes
    _seen: Sequence[dict[int, bool]] = ()  # of every group: its parameters, and which are matrices
    _loading: StateDict | None = None  # what is being loaded, as the user's hooks left it
    _is_built = False

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float | Tensor = 0.01,
        *,
        radial_lr_ratio: float = 2.0,
        radial_lr: float | Tensor | None = None,
        radial_beta: float = 0.9,
        curvature_target: float | str | None = "auto",
        curvature_beta: float = 0.9,
        previous_gradient: str = "exact",
        decay_lr: str = "radial",
        tangential: str = "auto",
        angular_rms: float | str | None = 0.015,
        radial: str = "adam",
        second_moment: str = "auto",
        low_dim: int | str | None = "auto",
        low_dim_scale: float = 1.0,
        low_dim_decay: float | None = None,
        delta: float | None = None,
        wd_ratio: float = 1.0,
        guard: bool = True,
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        rounding: str = "nearest",
    ) -> None:
        arguments = locals()
        defaults = {name: arguments.get(name, value) for name, value in DEFAULTS.items()}
        check_options(defaults)
        defaults["betas"] = as_pair(betas)
        super().__init__(params, defaults)
        self._remember_parameters()
        self._populate()
        warn_of_collapse([group for p, _, group, _ in self._parameters() if decays(p, group)])
        warn_of_declared_rules(self._parameters())
        self._is_built = True

    @classmethod
    def paper(cls, params: ParamsT, **options: Any) -> AdamO:
        """The paper's CIFAR-100 settings, literal; ``options`` make the rows of its tables.

        η_θ = 8e-4, η_ρ = 5e-3 (unscheduled), λ = 2e-4, no guard. τ_target is printed nowhere: 1.
        The protocol sets ``delta=0.1, wd_ratio=0.5`` in the groups from epoch 200 on. A
        ``radial_lr_ratio`` takes the place of the absolute η_ρ.
        """
        scheduled = {"radial_lr": None} if "radial_lr_ratio" in options else {}
        return cls(params, **{**PAPER, **scheduled, **options})

    @classmethod
    def radial_sgd(cls, params: ParamsT, **options: Any) -> AdamO:
        """The paper's step with safe numbers: SGD on the norm, an additive tangential step.

        ``radial_lr_ratio=100``, ``weight_decay=1e-3`` (AdamW's divided by 100), adaptive τ_target,
        guard.
        """
        return cls(params, **{**RADIAL_SGD, **options})

    @classmethod
    def from_adamw(cls, optimizer: Optimizer, scheduler: Any = None, **options: Any) -> AdamO:
        """Continue a running ``torch.optim.AdamW`` or ``Adam``.

        Groups, defaults, step counts and moments are taken over; with ``radial="sgd"`` the weight
        decay is divided by ``radial_lr_ratio``. The old optimizer is left untouched. AdamO writes
        into a copy of a tensor learning rate: to move it through a tensor of your own, pass that as
        ``lr``.

        Args:
            optimizer: the one to continue, without amsgrad. Adam's coupled weight decay is taken
                over as a decoupled one, with a warning.
            scheduler: a learning rate scheduler of it, or several, which then move AdamO's instead;
                those that a ``SequentialLR`` or ``ChainedScheduler`` is made of come along.
            options: AdamO's options; they win over what is taken over. With a scheduler no ``lr``,
                unless it is a tensor.

        Example:
            >>> optimizer = AdamO.from_adamw(optimizer, scheduler=scheduler)
        """
        return migrate.from_adamw(cls, optimizer, scheduler, options)

    @_use_grad_for_differentiable
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update all parameters that have a gradient; ``closure`` reevaluates the loss."""
        self._accelerator_graph_capture_health_check()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # a GradScaler sets these before a step that is to unscale and skip by itself
        amp = {name: getattr(self, name, None) for name in ("grad_scale", "found_inf")}
        sharded: dict[Any, list[Work]] = {}
        for work in self._prepare():
            mesh = work.bucket.mesh
            if mesh is None:
                work.run(**amp)
            else:
                refuse_scaling(amp)
                sharded.setdefault(mesh, []).append(work)
        for mesh, works in sharded.items():
            sharding.step(works, self._layout.on_mesh[mesh])
        return loss

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """As in torch, a scaler leaves gradients to ``step()`` where ``fused=True`` was asked for.

        Not where the fused backend is merely the default: trainers then refuse to clip gradients.
        """
        asked = all(group["fused"] for group in self.param_groups)
        return asked and all(b.backend == "fused" and b.mesh is None for b in self._buckets())

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its options are checked and its state is laid out at once."""
        if isinstance(param_group, dict):
            param_group = dict(param_group)  # so that the same groups can serve several optimizers
            check_options({**self.defaults, **param_group})
            if "betas" in param_group:
                param_group["betas"] = as_pair(param_group["betas"])
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self._check_differentiable(group)
            for p, name in _named(len(self.param_groups) - 1, group):
                geometry.check_parameter(p, name)
                choose(p, group, name)
        except Exception:
            self.param_groups.pop()
            raise
        if self._is_built:
            self._remember_parameters()
            self._populate()
            if any(decays(p, group) for p in group["params"]):
                warn_of_collapse([group])

    def _check_differentiable(self, group: dict[str, Any]) -> None:
        if group["differentiable"] != self.defaults["differentiable"]:
            raise ValueError(
                "differentiable must be the same for all groups, and stay what it was when AdamO "
                "was built"
            )

    def explain(self) -> Explanation:
        """Which rule and backend each parameter got, and why."""
        rows = Explanation()
        for p, name, group, _ in self._parameters():
            if is_lazy(p):
                rows.append(Row(name, (), "auto", "lazy: it has no shape yet", "not chosen yet"))
                continue
            rule, reason = rule_of(p, group)
            rule, reason = diagnostics.refine_rule(p, self.state.get(p, {}), rule, reason)
            backend, note = choose(p, group, name)
            rows.append(Row(name, tuple(p.shape), rule, reason, backend, note))
        return rows

    def diagnostics(self, synchronize: bool = False) -> dict[str, dict[str, Any]]:
        """Norms, step sizes, radial shares and guard activity of the last step, per parameter.

        Returns ``{parameter: {quantity: value}}``. The values are 0-D tensors on the parameters'
        device, or, with ``synchronize``, Python numbers fetched in one transfer per device.
        :func:`adamo_optim.flatten_diagnostics` gives a logger's flat dictionary.
        """
        return diagnostics.collect(self._layout.buckets if self._layout else [], synchronize)

    # ---- checkpoints ----------------------------------------------------------------------

    @torch._disable_dynamo
    def state_dict(self) -> StateDict:
        """The state as in any torch optimizer; buffers of DTensors are DTensors themselves.

        Take it when you save it: its moments go on with the training, as in any torch optimizer,
        and its numbers, such as ``step``, are copies of what they were.
        """
        self._drop_unused()
        result = super().state_dict()
        states = result["state"]
        for key, state in states.items():
            if isinstance(state, dict):
                states[key] = apart(state)
        keys = list(chain.from_iterable(group["params"] for group in result["param_groups"]))
        for p, _, _, number in self._parameters():
            previous = self.state.get(p, {}).get("previous_grad")
            if previous is None or not geometry.is_sharded(p) or not sampled_state(previous, p):
                continue
            key = keys[number]
            states[key]["previous_grad"] = whole_previous(previous, p, number)
        return result

    @torch._disable_dynamo
    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load a state; buffers keep their own dtype (float32 for bfloat16 parameters)."""
        # The base class casts state to the parameters' dtype. This hook is the last one, so it
        # sees the dictionary as the user's hooks left it, and __setstate__ takes the values back.
        source: StateDict = {}

        def look(_: Optimizer, final: StateDict) -> None:
            _check_schema(final["param_groups"])
            self._check_state(final)
            source.update(final)

        handle = self.register_load_state_dict_pre_hook(look)
        self._loading = source
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
            self._loading = None

    def _check_state(self, state_dict: StateDict) -> None:
        """Moments that are missing or of another shape must not turn into zeros unnoticed."""
        theirs, ours = state_dict["param_groups"], self.param_groups
        if [len(g["params"]) for g in theirs] != [len(g["params"]) for g in ours]:
            return  # torch says so in a moment
        saved = [key for group in theirs for key in group["params"]]
        for p, name, _, number in self._parameters():
            state = state_dict["state"].get(saved[number]) or {}
            for moment in ("exp_avg", "exp_avg_sq") if state else ():
                found = state.get(moment)
                if not isinstance(found, Tensor) or found.shape != p.shape:
                    shape = tuple(found.shape) if isinstance(found, Tensor) else ()
                    what = f"one of shape {shape}" if isinstance(found, Tensor) else "none"
                    raise ValueError(
                        f"{name} of shape {tuple(p.shape)} needs {moment} of that shape, and this "
                        f"state_dict has {what}: it is damaged, or of another model."
                    )

    def __getstate__(self) -> dict[str, Any]:
        """What pickle writes."""
        result = super().__getstate__()
        states = defaultdict(dict)
        for p, state in result["state"].items():
            states[p] = apart(state) if isinstance(p, Tensor) else state
        return {**result, "state": states}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._layout, self._is_built = None, True
        before = {**DEFAULTS, **FORM}  # what the options meant that an old checkpoint has not got
        for group in self.param_groups:
            for name, value in before.items():
                group.setdefault(name, value)
            group["schema"] = SCHEMA
        self._remember_parameters()
        for name, value in before.items():
            self.defaults.setdefault(name, value)
        if self._loading is not None:
            self._take_back(self._loading)

    def _take_back(self, source: StateDict) -> None:
        saved = chain.from_iterable(group["params"] for group in source["param_groups"])
        params = chain.from_iterable(group["params"] for group in self.param_groups)
        for key, p in zip(saved, params, strict=True):
            for name, value in source["state"].get(key, {}).items():
                if isinstance(value, Tensor) and name in (*SCALARS, *BUFFERS):
                    self.state[p][name] = value.to(p.device)
            complete_mean_square(self.state.get(p, {}))

    # ---- layout ---------------------------------------------------------------------------

    def _parameters(self) -> Iterator[tuple[Tensor, str, dict[str, Any], int]]:
        """Every parameter once, with a name of its own, its group and its running number."""
        seen: set[int] = set()
        times: Counter[str] = Counter()
        number = 0
        groups = [list(_named(g, group)) for g, group in enumerate(self.param_groups)]
        uses = Counter(name for named in groups for name in {name for _, name in named})
        for g, named in enumerate(groups):
            for p, name in named:
                if id(p) not in seen:
                    seen.add(id(p))
                    unique = name if uses[name] == 1 else f"group{g}.{name}"
                    times[unique] += 1
                    unique += f"#{times[unique]}" if times[unique] > 1 else ""
                    yield p, unique, self.param_groups[g], number
                number += 1

    def _trains(self, p: Tensor) -> bool:
        wanted = p.requires_grad or p.grad is not None or bool(self.state.get(p))
        return wanted and not p.is_meta and not is_lazy(p)

    def _populate(self) -> None:
        """State exists before the first step, so that saving a fresh optimizer changes nothing."""
        for p, name, group, number in self._parameters():
            if self._trains(p):
                _check_shape(self.state[p].get("exp_avg"), p, name)
                initialize(self.state[p], p, group, number)

    def _drop_unused(self) -> None:
        """Forget the untouched state of parameters that others have taken the place of.

        Trainers shard a model after its optimizer was built. State that a step has written stays,
        as in torch: its parameter may come back.
        """
        here = {id(p) for group in self.param_groups for p in group["params"]}
        gone = [p for p in self.state if isinstance(p, Tensor) and id(p) not in here]
        for p in filter(lambda p: is_fresh(self.state[p]), gone):
            del self.state[p]

    @torch._disable_dynamo
    def _prepare(self) -> list[Work]:
        """What the host does in a step; the rest is tensor code that torch.compile can trace."""
        works = (bucket.prepare() for bucket in self._buckets())
        return [work for work in works if work is not None]

    def _buckets(self) -> list[Bucket]:
        """The blocks by device and backend, laid out anew when anything about them changed."""
        if self._layout is None or not self._layout.is_current(self):
            for group in self.param_groups:
                check_options(group)
                self._check_differentiable(group)
            self._check_swapped()
            self._remember_parameters()
            self._drop_unused()
            self._populate()
            self._layout = Layout(self)
        return self._layout.buckets

    def _remember_parameters(self) -> None:
        self._seen = [
            {id(p): not is_lazy(p) and p.dim() > 1 for p in group["params"]}
            for group in self.param_groups
        ]

    def _check_swapped(self) -> None:
        """ZeRO-style wrappers put flat partitions in the place of the parameters we were given."""
        known = {key for seen in self._seen for key in seen}
        for p, name, _, _ in self._parameters():
            if id(p) not in known:
                geometry.check_parameter(p, name)
        for g, (group, seen) in enumerate(zip(self.param_groups, self._seen, strict=False)):
            named = list(_named(g, group))
            flat = [id(p) not in known and not is_lazy(p) and p.dim() == 1 for p, _ in named]
            if any(seen.values()) and flat and all(flat):
                raise RuntimeError(
                    f"{named[0][1]} was put in the place of the parameter AdamO was built with, "
                    f"and it is flat. {geometry.FLAT_PARAMETER_HELP}"
                )


def _named(index: int, group: dict[str, Any]) -> Iterator[tuple[Tensor, str]]:
    params, names = group["params"], group.get("param_names") or []
    if len(names) != len(params):  # none given, or a wrapper has put in other parameters
        names = [f"group{index}.param{i}" for i in range(len(params))]
    return zip(params, names, strict=True)


def _check_shape(m: Tensor | None, p: Tensor, name: str) -> None:
    if m is not None and not m.is_meta and m.shape != p.shape:
        raise RuntimeError(
            f"{name} had the shape {tuple(m.shape)} and now has {tuple(p.shape)}, which its state "
            "does not fit. Let it start afresh with optimizer.state.pop(parameter), or build a new "
            "AdamO."
        )


def _check_schema(groups: Iterable[dict[str, Any]]) -> None:
    for group in groups:
        schema = group.get("schema")
        if schema is None:
            raise ValueError(
                "this state_dict was not written by AdamO. To continue a run of AdamW or Adam, "
                "load it into that optimizer and pass that to AdamO.from_adamw."
            )
        if schema > SCHEMA:
            raise ValueError(
                f"this state_dict has schema {schema}; this version of adamo-optim reads up to "
                f"{SCHEMA}. Install a newer adamo-optim."
            )
