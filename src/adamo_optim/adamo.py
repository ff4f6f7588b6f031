"""AdamO, the paper's optimizer: options and state. The step is in ``three_passes.py``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import ParamsT, StateDict

from .backends import choose
from .blockwise import Blockwise
from .checkpoint import check_buffers, check_numbers, check_shape
from .dtensor import is_sharded, local
from .options import PAPER, as_pair, check_options, explain_mistakes, warn_of_collapse
from .rules import rule_of
from .state import (
    BUFFERS,
    MOMENTS,
    NUMBERS,
    initialize,
    is_previous,
    rows_of,
    sampled_state,
    whole_previous,
)
from .three_passes import ThreePasses

SCHEMA = 2  # of the state and the group options; raised whenever either changes its meaning


class AdamO(Blockwise):
    r"""AdamO: a weight's norm and its direction, each with a step size of its own.

    .. math::
        w^+ = (1 - \eta_{\rho,t}\lambda)\,w
              - \eta_{\rho,t}\,\varphi^\rho_w(\hat m^\rho)
              - \eta_\theta\,\varphi^\theta_w(\hat m^\theta / (\sqrt{\hat v^\theta} + \epsilon)),
        \qquad \eta_{\rho,t} = \eta_\rho / \sqrt{\tau_t/\tau_{target} + \epsilon}

    with :math:`\varphi^\rho_w, \varphi^\theta_w` the projections on and across ``w``: momentum SGD
    with a curvature-adaptive step on the norm, Adam in the tangential subspace. Low-dimensional
    parameters follow Adam without decay, scale-invariant ones take no radial step. With
    ``guard=False`` and a number for ``curvature_target`` this is Algorithm 1 to the letter.

    Args:
        params: parameters, named parameters, or groups; see :func:`adamo_optim.param_groups`.
            Every option may differ per group and may be changed during training, except
            ``differentiable``. A group may also carry ``rule``: ``"auto"`` (by shape),
            ``"general"``, ``"scale_invariant"`` or ``"low_dim"``.
        lr: η_θ, the learning rate of the tangential step, and the unit of the radial one's; a
            number or a tensor with one element.
        betas: (β₁^θ, β₂^θ) of Adam's moments.
        eps: ε, in the denominators of Adam and of the curvature scale.
        weight_decay: λ of the radial decay; the decay per step is λ·η_ρ,t. The radial step is
            SGD's, and so are the usual values: AdamW's divided by ``radial_lr_ratio``.
        radial_lr_ratio: η_ρ = ``radial_lr_ratio``·``lr``, so that schedulers move both.
        radial_lr: an absolute η_ρ in its place, which no scheduler moves.
        radial_beta: β₁^ρ, momentum of the radial step.
        curvature_target: τ_target as a number (the paper), ``"auto"`` (each block's own slow
            average of κ: scale-free), or ``None`` (no curvature adaptation).
        curvature_beta: β_τ.
        previous_gradient: how g⁻ is kept for κ = ‖g − g⁻‖²: ``"exact"``; ``"bfloat16"`` (half the
            memory; adds about 10⁻⁶·‖g‖² to κ); ``"sampled"`` (a fixed slice of about 1/16 of the
            entries, scaled up; off by a fixed factor where rows differ in gradient noise, which
            cancels under ``curvature_target="auto"``).
        decay_lr: λ is multiplied by η_ρ,t (``"radial"``) or by η_θ (``"tangential"``: the paper's
            AdamO-Isotropic).
        low_dim: ``"auto"`` = tensors with dim <= 1, or of one entry, are low-dimensional; an
            integer d_th = also those with numel < d_th; ``None`` = none.
        low_dim_scale: α in (0, 1], on the step of low-dimensional parameters.
        delta: AdamP's online test: a block with \|cos(g, w)\| < delta/√numel takes no radial step.
        wd_ratio: multiplies λ wherever the scale-invariant rule is active, declared or by the test.
        block: what has a norm and a direction: the whole ``"tensor"`` or every ``"row"`` of it
            (dimension 0: a neuron, a filter, a token).
        guard: bounds η_ρ,t/η_ρ to [0.1, 10], a step's factor on w to [0.5, 2] and the root mean
            square of m̂/(√v̂ + ε) to 100, skips decay while ‖w‖ < 0.1·‖w₀‖, takes tangential
            gradients at rounding level as 0, and leaves a block untouched when ‖g‖² or ‖w‖² is not
            finite or larger than v can hold (‖g‖ > 1.8·10¹⁹ in float32). ``False`` is the literal
            paper; non-finite gradients then reach the weights, as in ``torch.optim.AdamW``.
        rounding: how a new bfloat16 weight is rounded: to ``"nearest"``, which loses steps smaller
            than about 0.2 % of an entry (a small decay above all), or ``"stochastic"``, which is
            exact in the mean. Other dtypes are rounded to nearest; float16 with ``"stochastic"``
            is refused.
        maximize, foreach, fused, capturable, differentiable: as in ``torch.optim.AdamW``;
            ``foreach=None, fused=None`` take the fastest form there is.

    Example:
        >>> model = torch.nn.Linear(8, 2)
        >>> optimizer = AdamO(model.named_parameters(), lr=1e-3)
        >>> model(torch.ones(4, 8)).sum().backward()
        >>> optimizer.step()

    References:
        H. Chen, J. Yuan, H. Zhang: Decoupled Orthogonal Dynamics: Regularization for Deep Network
        Optimizers. The equations' numbers in this package are that paper's.
    """

    ROWS_ALONE = True
    STRUCTURE = (
        "rule",
        "found",
        "low_dim",
        "previous_gradient",
        "decay_lr",
        "block",
        "rounding",
        "foreach",
        "fused",
        "capturable",
        "differentiable",
    )
    NUMBERS = (*NUMBERS, *BUFFERS)
    _is_built = True

    @explain_mistakes
    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float | Tensor = 1e-3,
        *,
        radial_lr_ratio: float = 100.0,
        radial_lr: float | Tensor | None = None,
        radial_beta: float = 0.9,
        curvature_target: float | str | None = "auto",
        curvature_beta: float = 0.9,
        previous_gradient: str = "exact",
        decay_lr: str = "radial",
        low_dim: int | str | None = "auto",
        low_dim_scale: float = 1.0,
        delta: float | None = None,
        wd_ratio: float = 1.0,
        block: str = "tensor",
        guard: bool = True,
        rounding: str = "nearest",
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
    ) -> None:
        defaults = {k: v for k, v in locals().items() if k not in ("self", "params", "__class__")}
        defaults |= {"rule": "auto", "schema": SCHEMA}
        check_options(defaults)
        defaults["betas"] = as_pair(betas)
        self._is_built = False
        super().__init__(params, defaults)
        self._populate()
        self._warn_of_collapse(self.param_groups)
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

    def _update(self) -> None:
        self._run(self._prepare())

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """As in torch, a scaler leaves gradients to ``step()`` where ``fused=True`` was asked for.

        Not where the fused backend is merely the default: trainers then refuse to clip gradients.
        """
        asked = all(group["fused"] for group in self.param_groups)
        return asked and all(b.backend == "fused" and not b.holds_shards for b in self._buckets())

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its options are checked and its state is laid out at once."""
        super().add_param_group(param_group)
        if self._is_built:
            self._populate()
            self._warn_of_collapse(self.param_groups[-1:])

    def _written(self, result: StateDict) -> None:
        super()._written(result)
        keys = [key for group in result["param_groups"] for key in group["params"]]
        for p, _, _, number in self._parameters():
            previous = self.state.get(p, {}).get("previous_grad")
            if previous is not None and is_sharded(p) and sampled_state(previous, p):
                state = result["state"][keys[number]]
                whole = whole_previous(previous, p, number)
                result["state"][keys[number]] = {**state, "previous_grad": whole}

    def _adapted(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        for group in state_dict["param_groups"]:
            schema = group.get("schema")
            if schema is None:
                raise ValueError(
                    "this state_dict was not written by AdamO, whose moments are others than "
                    "AdamW's: start afresh, or take AngularAdamW, which loads AdamW's checkpoints"
                )
            if not isinstance(schema, int) or schema != SCHEMA:
                raise ValueError(
                    f"this state_dict has schema {schema!r}, and this version of adamo-optim reads "
                    f"{SCHEMA}: load it with the version that wrote it"
                )
        return state_dict

    def _check_state(self, state: Mapping[str, Any], p: Tensor, name: str) -> None:
        check_buffers(state, p, name, MOMENTS)
        check_numbers(state, p, name, NUMBERS, by_row=NUMBERS)
        previous = state.get("previous_grad")
        if previous is not None and not is_lazy(p) and not is_previous(previous, p):
            raise ValueError(
                f"{name} of shape {tuple(p.shape)} needs a dense previous_grad of that shape or of "
                'its rows that "sampled" keeps, and this state_dict has another: it is damaged.'
            )

    # ---- what the base class asks ---------------------------------------------------------

    def _bucket(self, device: torch.device, backend: str, mesh: Any) -> ThreePasses:
        return ThreePasses(device, backend, mesh)

    def _owns(self, p: Tensor, group: dict[str, Any]) -> bool:
        return True

    def _rows(self, p: Tensor, group: dict[str, Any], rule: str) -> int | None:
        return rows_of(p, group, rule)

    def _backend(self, p: Tensor, group: dict[str, Any], name: str) -> tuple[str, str]:
        by_row = rows_of(p, group, rule_of(p, group).name) is not None
        return choose(p, group, name, by_row)

    def _populate(self) -> None:
        """State exists before the first step, so that saving a fresh optimizer changes nothing."""
        for p, name, group, number in self._parameters():
            if self._trains(p):
                check_shape(self.state[p].get("exp_avg"), p, name)
                initialize(self.state[p], p, group, number)

    def _describe(self, p: Tensor, name: str, group: dict[str, Any]) -> tuple[str, str, str, str]:
        rule, reason = self._refined(p, *rule_of(p, group))
        if rows := rows_of(p, group, rule):
            reason += f"; {rows} blocks, one a row"
        if p.is_meta:
            return rule, reason, "none", "on the meta device"
        backend, note = self._backend(p, group, name)
        return rule, reason, backend, note

    def _refined(self, p: Tensor, rule: str, reason: str) -> tuple[str, str]:
        """What the first step decides: a block that starts at zero follows Adam for good."""
        state = self.state.get(p, {})
        if "initial_norm" not in state:
            return rule, f"{reason}; {'' if p.requires_grad else 'frozen, '}no state yet"
        if rule == "low_dim":
            return rule, reason
        initial = local(state["initial_norm"])
        if bool((initial == 0).all()) and initial.numel():
            return "low_dim", f"its norm was 0 at its first step (otherwise {rule}: {reason})"
        # a sharded one would need the other ranks, and not all of them may be asking
        if bool((initial < 0).all()) and not is_sharded(p) and not bool(p.detach().any()):
            return "low_dim", f"its norm is 0 and no step was taken (otherwise {rule}: {reason})"
        return rule, reason

    def _warn_of_collapse(self, groups: list[dict[str, Any]]) -> None:
        decaying = [
            group
            for group in groups
            if any(not is_lazy(p) and rule_of(p, group).name != "low_dim" for p in group["params"])
        ]
        warn_of_collapse(decaying)
