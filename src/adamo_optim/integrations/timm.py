"""AdamO by name in timm: ``register()``, then ``create_optimizer_v2(model, opt="adamo", ...)``."""

from __future__ import annotations

from ..optimizer import AdamO


def register(name: str = "adamo") -> None:
    """Make AdamO known to timm's optimizer factory; calling it again does no harm.

    timm builds its own groups (none of the decay for biases and the model's ``no_weight_decay()``,
    and ``lr_scale`` for layer decay, which timm's schedulers apply). To add the rules for
    scale-invariant weights, pass ``param_group_fn`` with
    :func:`adamo_optim.integrations.with_rules`. timm's ``weight_decay`` is 0 unless given.

    Example:
        >>> register()
        >>> optimizer = timm.optim.create_optimizer_v2(
        ...     model, opt="adamo", lr=1e-3, weight_decay=1e-3
        ... )
    """
    from timm.optim import _optim_factory as factory

    registry = factory.default_registry
    if registry.list_optimizers(name) and registry.get_optimizer_info(name).opt_class is AdamO:
        return
    description = "Adam for the direction of a weight, SGD for its norm"
    registry.register(factory.OptimInfo(name, AdamO, description, has_betas=True))
