"""AngularAdamW: torch's AdamW, except for weights whose scale cannot matter, which turn."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import AdamW
from torch.optim.adamw import adamw
from torch.optim.optimizer import ParamsT, _use_grad_for_differentiable
from torch.utils._foreach_utils import (
    _get_foreach_kernels_supported_devices,
    _get_fused_kernels_supported_devices,
)

from . import checkpoint, turning
from .backends import refuse_differentiable_shards, why_not_fused
from .blockwise import Blockwise, Layout
from .dtensor import as_real, is_sharded, local, mesh_of, place_like
from .geometry import is_dense, real_numel, scalar_dtype
from .options import as_pair, check_options, explain_mistakes, users_level
from .rules import rule_of
from .sharding import whole_sums
from .turning import TwoPasses


class AngularAdamW(Blockwise, AdamW):
    r"""AdamW, except for weights whose scale cannot matter: these turn, by an angle that lr sets.

    Weights of the rule ``scale_invariant`` (before BatchNorm, or q and k before QK-norm;
    :func:`adamo_optim.param_groups` finds them) keep their norm :math:`\rho_0` for good:

    .. math::
        m &\leftarrow \beta_1 m + (1 - \beta_1) g, \qquad
        s \leftarrow \beta_2 s + (1 - \beta_2) \|g\|^2/n, \qquad
        u = \hat m / (\sqrt{\hat s} + \epsilon) \\
        \varphi &= \min(lr/r,\ max\_angle) \cdot \|u^\theta\|/\sqrt{n}, \qquad
        u^\theta = u - (\langle u, w\rangle/\|w\|^2)\, w \\
        w &\leftarrow \rho_0 (\cos\varphi \cdot w/\|w\| - \sin\varphi \cdot u^\theta/\|u^\theta\|)

    All other parameters are updated by torch's own AdamW, bit for bit. Coming from AdamW: keep
    all of its numbers and the schedule, and load its checkpoint.

    Args:
        params: parameters, named parameters, or groups; from
            ``param_groups(model, example_batch)`` it knows what may turn. Without rules nothing
            does, and this is AdamW.
        lr: AdamW's learning rate; it also sets the angle.
        betas: AdamW's (β₁, β₂).
        eps: AdamW's ε.
        weight_decay: AdamW's λ; weights that turn do not decay.
        angular_rms: r, what ``lr`` means as an angle: a step turns a weight as far as AdamW's would
            turn one whose entries have this root mean square, so that all layers turn alike.
            ``None``: that of the weight's own first step.
        max_angle: bounds lr/r, in radians; a step never turns further than this times the root mean
            square of u, which is about 1.
        maximize: as in AdamW.
        foreach: as in AdamW.
        fused: as in AdamW; with ``foreach=None, fused=None`` torch's fused form is taken wherever
            it exists.
        capturable: as in AdamW.
        differentiable: as in AdamW.

    Example:
        >>> model = torch.nn.Sequential(
        ...     torch.nn.Linear(8, 16, bias=False), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 2)
        ... )
        >>> batch = torch.randn(32, 8)
        >>> optimizer = AngularAdamW(param_groups(model, batch), lr=1e-3, weight_decay=0.1)
        >>> model(batch).sum().backward()
        >>> optimizer.step()
    """

    STRUCTURE = ("rule", "found", "foreach", "fused", "capturable", "differentiable")
    NUMBERS = turning.NUMBERS
    _layout: AngularLayout | None

    @explain_mistakes
    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        angular_rms: float | None = 0.015,
        max_angle: float = 0.05,
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
    ) -> None:
        own = {"angular_rms": angular_rms, "max_angle": max_angle, "rule": "auto"}
        flags = {"maximize": maximize, "foreach": foreach, "fused": fused}
        flags |= {"capturable": capturable, "differentiable": differentiable}
        betas = as_pair(betas)
        numbers = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        check_options({**numbers, **own, **flags})
        self._own_defaults = own  # AdamW's constructor calls add_param_group, which needs them
        super().__init__(params, lr, betas, eps, weight_decay, **flags)
        if not any(_declares(group) for group in self.param_groups):
            warnings.warn(
                "no group says which weights are scale-invariant, so nothing turns and this is "
                "AdamW. Write AngularAdamW(param_groups(model, example_batch), ...) with a batch "
                "of what the model takes.",
                UserWarning,
                stacklevel=users_level(),
            )

    @_use_grad_for_differentiable
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update all parameters that have a gradient; ``closure`` reevaluates the loss."""
        self._accelerator_graph_capture_health_check()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        works = self._prepare()
        assert self._layout is not None
        for group, following in zip(self.param_groups, self._layout.following, strict=True):
            self._follow_adamw(group, *following)
        self._run(works)
        return loss

    def _follow_adamw(
        self, group: dict[str, Any], params: list[Tensor], fused: bool | None
    ) -> None:
        """AdamW by torch's own code."""
        lists: list[list[Tensor]] = [[] for _ in range(6)]
        # As Dynamo does with torch's own optimizers: a count on the host would be a constant.
        capturable = group["capturable"] or torch.compiler.is_compiling()
        those = {**group, "params": params, "fused": fused, "capturable": capturable}
        has_complex = self._init_group(those, *lists)
        if fused and group["fused"] is None and not _laid_out_alike(*lists[:2]):
            fused = None  # torch's own default, which takes any layout
        beta1, beta2 = group["betas"]
        adamw(
            *lists,
            foreach=group["foreach"],
            capturable=capturable,
            differentiable=group["differentiable"],
            fused=fused,
            grad_scale=getattr(self, "grad_scale", None),
            found_inf=getattr(self, "found_inf", None),
            has_complex=has_complex,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its options are checked."""
        self.defaults |= getattr(self, "_own_defaults", {})  # a copy has them in its defaults
        super().add_param_group(param_group)

    # ---- what the base class asks ---------------------------------------------------------

    def _bucket(self, device: torch.device, backend: str, mesh: Any) -> TwoPasses:
        return TwoPasses(device, backend, mesh)

    def _rule(self, p: Tensor, group: dict[str, Any]) -> str:
        return rule_of(p, group).name

    def _may_turn(self, p: Tensor, group: dict[str, Any]) -> bool:
        return self._rule(p, group) == "scale_invariant" and real_numel(p) > 1

    def _needs_norms(self, group: dict[str, Any]) -> bool:
        return group["rule"] == "scale_invariant"  # whatever its parameters look like now

    def _owns(self, p: Tensor, group: dict[str, Any]) -> bool:
        return self._may_turn(p, group) and not _started_at_zero(self.state.get(p, {}))

    def _trains(self, p: Tensor) -> bool:
        # As in torch, state begins with the first gradient; but a sharded weight may have that on
        # other ranks.
        wanted = p.grad is not None or bool(self.state.get(p))
        wanted = wanted or (is_sharded(p) and p.requires_grad)
        return wanted and not p.is_meta and not is_lazy(p)

    def _backend(self, p: Tensor, group: dict[str, Any], name: str) -> tuple[str, str]:
        if group["differentiable"]:
            refuse_differentiable_shards(p, name)
            return "differentiable", ""
        if group["fused"] is False or (group["fused"] is None and group["foreach"] is not None):
            return "torch calls", ""
        note = why_not_fused(local(p))
        return ("torch calls", note) if note else ("fused", "")

    def _populate(self) -> None:
        """State for the weights that begin to turn, and for those that no longer do."""
        new = []
        for p, _, group, _ in self._parameters():
            state = self.state.get(p, {})
            if is_lazy(p):
                continue
            if is_sharded(p):
                for key in state.keys() & {"exp_avg", "exp_avg_sq"}:
                    state[key] = place_like(state[key], p)  # of a checkpoint of one process
            if not self._may_turn(p, group):
                if "mean_square" in state:
                    turning.end(state, p, bool(group["capturable"] or _fuses(group, [p])))
            elif "mean_square" in state:
                turning.begin(state, p)  # after loading: device and dtype
            elif self._trains(p) and not _started_at_zero(state):
                new.append((p, group))
        for p, group, zero, squares in _beginnings(new, self.state):
            state = self.state[p]
            if not zero or not state:
                turning.begin(state, p, squares)
            if zero:  # AdamW's, with a mark
                if "mean_square" in state:
                    turning.end(state, p, bool(group["capturable"] or _fuses(group, [p])))
                state["initial_norm"] = torch.zeros((), device=p.device)

    def _lay_out(self) -> AngularLayout:
        return AngularLayout(self)

    def _describe(self, p: Tensor, name: str, group: dict[str, Any]) -> tuple[str, str, str, str]:
        rule, reason = rule_of(p, group)
        if self._owns(p, group):
            if not self.state.get(p) and not is_sharded(p) and not p.is_meta and not bool(p.any()):
                reason = f"its norm is 0 and no step was taken (otherwise {rule}: {reason})"
            else:
                backend, note = ("none", "on the meta device") if p.is_meta else self._backend(p, group, name)  # fmt: skip
                return rule, f"turns: {reason}", backend, note
        elif rule == "scale_invariant" and real_numel(p) <= 1:
            reason = "AdamW: one entry, which has no direction"
        elif rule == "scale_invariant":
            reason = f"AdamW: its norm was 0 at its first step (otherwise {rule}: {reason})"
        else:
            return rule, f"AdamW: {reason}", self._form(group), ""
        return "general", reason, self._form(group), ""

    def _form(self, group: dict[str, Any]) -> str:
        """Which of torch's forms of AdamW a group takes."""
        others = [p for p in group["params"] if is_lazy(p) or not self._owns(p, group)]
        if _fuses(group, others):
            return "torch fused"
        native = all(type(p) in (Tensor, torch.nn.Parameter) for p in others)
        devices = _get_foreach_kernels_supported_devices()
        default = native and all(p.device.type in devices for p in others)
        foreach = (
            default if group["foreach"] is None and group["fused"] is None else group["foreach"]
        )
        return "torch foreach" if foreach and not group["differentiable"] else "torch for-loop"

    # ---- checkpoints ----------------------------------------------------------------------

    def _adapted(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """AdamW's checkpoint, or Adam's, in our groups; our own as it is."""
        groups = state_dict["param_groups"]
        if any(group.get("amsgrad") for group in groups):
            raise ValueError(
                "this state_dict has amsgrad=True, and AngularAdamW keeps no maximum of second "
                "moments: continue it with torch.optim.AdamW, or set amsgrad=False in its groups"
            )
        if all("angular_rms" in group for group in groups):
            return state_dict
        for group in groups:
            coupled = group.get("decoupled_weight_decay") is False
            if coupled and float(group.get("weight_decay", 0)) > 0:
                raise ValueError(
                    f"this state_dict is torch.optim.Adam's with weight_decay="
                    f"{group['weight_decay']}, an L2 term in the gradient, which AngularAdamW does "
                    "not have: set weight_decay in its groups to 0, load it, and then set what you "
                    "want as AdamW's"
                )
            if "betas" not in group:
                raise ValueError("this state_dict is neither AdamW's, Adam's nor AngularAdamW's")
        return checkpoint.regrouped(state_dict, self)

    def _check_state(self, state: Mapping[str, Any], p: Tensor, name: str) -> None:
        turned = "mean_square" in state
        moments = ("exp_avg",) if turned else ("exp_avg", "exp_avg_sq")
        checkpoint.check_buffers(state, p, name, moments)
        checkpoint.check_numbers(state, p, name, turning.NUMBERS)


class AngularLayout(Layout):
    """The layout of the weights that turn, and for each group those that follow AdamW."""

    def __init__(self, optimizer: AngularAdamW) -> None:
        super().__init__(optimizer)
        turning_ids = {id(member.p) for bucket in self.buckets for member in bucket.members}
        self.following: list[tuple[list[Tensor], bool | None]] = []
        for group in optimizer.param_groups:
            params = [p for p in group["params"] if id(p) not in turning_ids]
            fused = _fuses(group, params)
            if fused and group["fused"] is None:
                moments = [optimizer.state.get(p, {}).get("exp_avg", p) for p in params]
                alike = all(map(is_dense, map(local, params)))
                fused = True if alike and _laid_out_alike(params, moments) else None
            for p in params:
                step = optimizer.state.get(p, {}).get("step")
                if fused and isinstance(step, Tensor) and step.device != p.device:
                    optimizer.state[p]["step"] = step.to(p.device)  # loaded from another form
            self.following.append((params, fused))


def _fuses(group: dict[str, Any], params: list[Tensor]) -> bool | None:
    """Whether torch's fused form updates these: where nothing else is asked for and it exists."""
    if group["fused"] is not None or group["foreach"] is not None or group["differentiable"]:
        return group["fused"]
    devices = _get_fused_kernels_supported_devices()
    able = all(
        not is_lazy(p)
        and p.device.type in devices
        and p.is_floating_point()
        and type(local(p)) in (Tensor, torch.nn.Parameter)  # fmt: skip
        for p in params
    )
    # torch's fused and foreach forms take no lists of both kinds, or of several meshes
    return True if params and able and len({mesh_of(p) for p in params}) == 1 else None


def _laid_out_alike(params: list[Tensor], others: list[Tensor]) -> bool:
    """Whether they have the same strides.

    torch's fused kernels go over memory without looking: on CUDA they raise, on a CPU they are
    wrong in silence.
    """
    return list(map(Tensor.stride, params)) == list(map(Tensor.stride, others))


def _started_at_zero(state: Mapping[str, Any]) -> bool:
    """Its state is AdamW's, with a mark: it has no direction to turn, and follows AdamW for good."""
    return "initial_norm" in state and "exp_avg_sq" in state


def _declares(group: Mapping[str, Any]) -> bool:
    return group.get("rule", "auto") != "auto" or "found" in group


@torch.no_grad()
def _beginnings(
    new: list[tuple[Tensor, dict[str, Any]]], states: Mapping[Tensor, Any]
) -> list[tuple[Tensor, dict[str, Any], bool, float | Tensor]]:
    """Of weights that may turn: is its norm 0, and what do its second moments add up to?

    Reads the devices once, in the first step; one collective a mesh.
    """
    params = [p for p, _ in new]
    capturing = any(p.is_cuda for p in params) and torch.cuda.is_current_stream_capturing()
    asked = [] if capturing else params
    filled = [torch.count_nonzero(local(p)).to(scalar_dtype(p.device)) for p in asked]
    loaded = [p for p in params if "exp_avg_sq" in states.get(p, {})]
    squares = [as_real(local(states[p]["exp_avg_sq"])) for p in loaded]
    added = [x.sum(dtype=scalar_dtype(x.device)) for x in squares]
    sums = whole_sums([*filled, *added], [*asked, *loaded])
    counts = torch.stack([x.cpu() for x in sums[: len(asked)]]).tolist() if asked else []
    zero = {p: not count for p, count in zip(asked, counts, strict=True)}
    totals = dict(zip(loaded, sums[len(asked) :], strict=True))
    return [(p, group, zero.get(p, False), totals.get(p, 0.0)) for p, group in new]
