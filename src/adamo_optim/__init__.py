"""Two optimizers, each one idea: AdamO, and AngularAdamW.

The names below are PyTorch's, and are imported when they are first asked for: ``adamo_optim.optax``
has both optimizers for JAX and works where torch is not installed.
"""

import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .adamo import AdamO
    from .angular import AngularAdamW
    from .diagnostics import flatten_diagnostics
    from .groups import param_groups
    from .rules import rebind

__all__ = ["AdamO", "AngularAdamW", "flatten_diagnostics", "param_groups", "rebind"]
__version__ = "0.2.0"

_HOMES = {
    "AdamO": "adamo",
    "AngularAdamW": "angular",
    "flatten_diagnostics": "diagnostics",
    "param_groups": "groups",
    "rebind": "rules",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        try:
            value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            text = f"{name} needs torch: pip install torch. JAX's optimizers: adamo_optim.optax"
            raise ModuleNotFoundError(text, name="torch") from error
    elif not name.startswith("_") and importlib.util.find_spec(f"{__name__}.{name}"):
        value = importlib.import_module(f"{__name__}.{name}")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__} - {"Any", "TYPE_CHECKING", "importlib"})
