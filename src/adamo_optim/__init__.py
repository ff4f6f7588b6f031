"""Two optimizers for PyTorch, each one idea: AdamO, and AngularAdamW."""

from .adamo import AdamO
from .angular import AngularAdamW
from .diagnostics import flatten_diagnostics
from .groups import param_groups
from .rules import rebind

__all__ = ["AdamO", "AngularAdamW", "flatten_diagnostics", "param_groups", "rebind"]
__version__ = "0.2.0"
