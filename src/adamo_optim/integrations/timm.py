"""Both optimizers by name in timm: ``register()``, then ``create_optimizer_v2(model, "adamo")``."""

# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from ..adamo import AdamO
from ..angular import AngularAdamW
from .trainer_groups import with_rules

NAMES = {
    "adamo": (AdamO, "a weight's norm and direction, each with a step size of its own"),
    "angularadamw": (AngularAdamW, "AdamW; weights whose scale cannot matter only turn"),
}


def register() -> None:
    """Make "adamo" and "angularadamw" known to timm's optimizer factory, as often as you like.

    timm makes groups of its own: no decay for biases and for the model's ``no_weight_decay()``,
    and ``lr_scale`` by depth, which timm's schedulers apply. Its ``weight_decay`` is 0 unless
    given. Rules then go by shape alone, so that no weight counts as scale-invariant;
    :func:`param_group_fn` adds the rules of the architecture.

    Example:
        >>> register()
        >>> optimizer = timm.optim.create_optimizer_v2(
        ...     model, opt="adamo", lr=1e-3, weight_decay=0.1
        ... )
    """
    from timm.optim import _optim_factory as factory

    registry = factory.default_registry
    for name, (optimizer, about) in NAMES.items():
        known = registry.list_optimizers(name)
        if not known or registry.get_optimizer_info(name).opt_class is not optimizer:
            registry.register(factory.OptimInfo(name, optimizer, about, has_betas=True))


def param_group_fn(
    example_batch: Any,
    weight_decay: float = 0.01,
    layer_decay: float | None = None,
    **options: Any,
) -> Callable[[nn.Module], list[dict[str, Any]]]:
    """What timm's ``param_group_fn`` takes: timm's own groups, split further by the rules.

    Args:
        example_batch: what the model takes, as in :func:`adamo_optim.param_groups`.
        weight_decay: λ of the groups that decay.
        layer_decay: timm's factor on the learning rate from layer to layer; ``None``: none.
        options: the other arguments of ``adamo_optim.param_groups``.

    Example:
        >>> fn = param_group_fn(images[:8], layer_decay=0.8)
        >>> optimizer = timm.optim.create_optimizer_v2(
        ...     model, "angularadamw", lr=1e-3, param_group_fn=fn
        ... )
    """

    def groups(model: nn.Module) -> list[dict[str, Any]]:
        from timm.optim import param_groups_layer_decay, param_groups_weight_decay

        no_decay: Any = getattr(model, "no_weight_decay", set)()
        if layer_decay is None:
            made = param_groups_weight_decay(model, weight_decay, no_weight_decay_list=no_decay)
        else:
            made = param_groups_layer_decay(
                model, weight_decay, no_weight_decay_list=no_decay, layer_decay=layer_decay
            )
        return with_rules(made, model, example_batch, **options)

    return groups
