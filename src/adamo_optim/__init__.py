"""AdamO for PyTorch: a weight's norm and its direction as two systems."""

from .diagnostics import flatten_diagnostics
from .optimizer import AdamO
from .rules import rebind
from .scale_invariance import param_groups

__all__ = ["AdamO", "flatten_diagnostics", "param_groups", "rebind"]
__version__ = "0.1.0"
