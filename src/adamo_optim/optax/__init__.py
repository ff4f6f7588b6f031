"""Both optimizers for JAX, as ``optax.GradientTransformation``. Nothing here imports torch."""

from .scale_invariance import find_rules
from .three_passes import AdamOState, adamo
from .turning import TurnState, angular_adamw

__all__ = ["AdamOState", "TurnState", "adamo", "angular_adamw", "find_rules"]
