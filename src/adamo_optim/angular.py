"""AngularAdamW: torch's AdamW, except for weights whose scale cannot matter, which turn."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import AdamW
from torch.optim.optimizer import ParamsT

from . import checkpoint, torch_adamw, turning
from .backends import refuse_differentiable_shards, rows_are_scattered, why_not_fused
from .blockwise import Blockwise, Layout
from .checkpoint import check_shape
from .dtensor import is_sharded, local, place_like
from .geometry import real_numel
from .options import as_pair, check_options, explain_mistakes, users_level
from .rules import rule_of
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
        second_moment: ``"tensor"``, one s for the whole weight; ``"row"``, one for each row, with n
            its entries: for networks nearly all of whose matrices turn (OLMo 2, Gemma 3).
        max_angle: bounds lr/r, in radians. A step turns by that times the root mean square of the
            tangential u: up to 1 in the first steps, 0.2 to 0.3 in training.
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

    STRUCTURE = (
        "rule",
        "found",
        "second_moment",
        "foreach",
        "fused",
        "capturable",
        "differentiable",
    )
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
        second_moment: str = "tensor",
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
    ) -> None:
        own = {"angular_rms": angular_rms, "max_angle": max_angle}
        own |= {"second_moment": second_moment, "rule": "auto"}
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

    def _update(self) -> None:
        works = self._prepare()
        assert self._layout is not None
        amp = {name: getattr(self, name, None) for name in ("grad_scale", "found_inf")}
        for group, following in zip(self.param_groups, self._layout.following, strict=True):
            if following.params:
                following.step(group, self, **amp)
        self._run(works)

    @torch._disable_dynamo
    def _prepare(self) -> list[Any]:
        works = super()._prepare()
        assert self._layout is not None
        for group, following in zip(self.param_groups, self._layout.following, strict=True):
            following.check(group, type(self).__name__)
        return works

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its options are checked."""
        self.defaults |= getattr(self, "_own_defaults", {})  # a copy has them in its defaults
        super().add_param_group(param_group)

    # ---- what the base class asks ---------------------------------------------------------

    def _bucket(self, device: torch.device, backend: str, mesh: Any) -> TwoPasses:
        return TwoPasses(device, backend, mesh)

    def _rows(self, p: Tensor, group: dict[str, Any], rule: str) -> int | None:
        return turning.rows_of(p, group)

    def _may_turn(self, p: Tensor, group: dict[str, Any]) -> bool:
        return rule_of(p, group).name == "scale_invariant" and real_numel(p) > 1

    def _needs_norms(self, group: dict[str, Any]) -> bool:
        return group["rule"] == "scale_invariant"  # whatever its parameters look like now

    def _owns(self, p: Tensor, group: dict[str, Any]) -> bool:
        return self._may_turn(p, group) and not turning.started_at_zero(self.state.get(p, {}))

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
        if not note and turning.rows_of(p, group) and rows_are_scattered(local(p)):
            note = "the rows that second_moment='row' tells apart are scattered in this layout"
        if note and group["fused"]:
            raise RuntimeError(f"fused=True cannot be honoured for {name}: {note}")
        return ("torch calls", note) if note else ("fused", "")

    def _populate(self) -> None:
        """State for the weights that begin to turn, and for those that no longer do."""
        new = []
        for p, name, group, _ in self._parameters():
            state = self.state.get(p, {})
            if is_lazy(p):
                continue
            check_shape(state.get("exp_avg"), p, name)
            if is_sharded(p):
                for key in state.keys() & {"exp_avg", "exp_avg_sq"}:
                    state[key] = place_like(state[key], p)  # of a checkpoint of one process
            if not self._may_turn(p, group):
                if "mean_square" in state:
                    turning.end(state, p, self._counts_on_device(p, group))
            elif "mean_square" in state:
                turning.begin(state, p, turning.rows_of(p, group))  # after loading, say
            elif self._trains(p) and not turning.started_at_zero(state):
                new.append((p, group))
        for p, group, zero, squares in turning.beginnings(new, self.state):
            state = self.state[p]
            if not zero or not state:
                turning.begin(state, p, turning.rows_of(p, group), squares)
            if zero:  # AdamW's, with a mark
                if "mean_square" in state:
                    turning.end(state, p, self._counts_on_device(p, group))
                state["initial_norm"] = torch.zeros((), device=p.device)

    def _counts_on_device(self, p: Tensor, group: dict[str, Any]) -> bool:
        """Where torch's AdamW keeps its step count."""
        return bool(group["capturable"] or torch_adamw.fuses(group, [p]))

    def _lay_out(self) -> AngularLayout:
        return AngularLayout(self)

    def _describe(self, p: Tensor, name: str, group: dict[str, Any]) -> tuple[str, str, str, str]:
        rule, reason = rule_of(p, group)
        turns, without_state = self._owns(p, group), not self.state.get(p)
        # a sharded weight would need the other ranks, and not all of them may be asking
        is_zero = without_state and not (p.is_meta or is_sharded(p) or bool(p.detach().any()))
        if turns and not is_zero:
            backend, note = "none", "on the meta device"
            if not p.is_meta:
                backend, note = self._backend(p, group, name)
            rows = turning.rows_of(p, group)
            reason += f"; {rows} second moments, one a row" if rows else ""
            return rule, f"turns: {reason}", backend, note
        if rule == "scale_invariant":
            why = "its norm is 0" if turns else "its norm was 0 at its first step"
            why = why if real_numel(p) > 1 else "one entry"
            rule, reason = "general", f"{why}: no direction to turn (otherwise {rule}: {reason})"
        others: Any = [q for q in group["params"] if is_lazy(q) or not self._owns(q, group)]
        return rule, f"AdamW: {reason}", torch_adamw.form(group, others or [p]), ""

    # ---- checkpoints ----------------------------------------------------------------------

    def _adapted(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        ours = all("angular_rms" in group for group in state_dict["param_groups"])
        return state_dict if ours else checkpoint.from_adamw(state_dict, self)

    def _check_state(self, state: Mapping[str, Any], p: Tensor, name: str) -> None:
        turned = "mean_square" in state
        moments = ("exp_avg",) if turned else ("exp_avg", "exp_avg_sq")
        checkpoint.check_buffers(state, p, name, moments)
        checkpoint.check_numbers(state, p, name, turning.NUMBERS, by_row=("mean_square",))


def _declares(group: Mapping[str, Any]) -> bool:
    return group.get("rule", "auto") != "auto" or "found" in group


class AngularLayout(Layout):
    """The layout of the weights that turn, and for each group those that follow AdamW."""

    def __init__(self, optimizer: AngularAdamW) -> None:
        super().__init__(optimizer)
        turning_ids = {id(member.p) for bucket in self.buckets for member in bucket.members}
        names = {id(p): name for p, name, _, _ in optimizer._parameters()}
        self.following: list[torch_adamw.Following] = []  # one for every group
        for group in optimizer.param_groups:
            params = [p for p in group["params"] if id(p) not in turning_ids]
            states = [optimizer.state.get(p, {}) for p in params]
            fused = torch_adamw.fuses(group, params)
            moments = [state.get("exp_avg", p) for state, p in zip(states, params, strict=True)]
            if group["fused"] is None and not torch_adamw.laid_out_alike(params, moments):
                fused = None
            for p, state in zip(params, states, strict=True):
                step = state.get("step")
                if fused and isinstance(step, Tensor) and step.device != p.device:
                    state["step"] = step.to(p.device)  # loaded from another form
            self.following.append(
                torch_adamw.Following(params, [names[id(p)] for p in params], fused)
            )
