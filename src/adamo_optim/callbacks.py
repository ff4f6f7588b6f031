"""Diagnostics in your logger, in one line: TensorBoard, W&B, Accelerate, Lightning, transformers.

log_diagnostics(optimizer, writer, step)                          # in a loop of your own
print_diagnostics(optimizer, step)                                # a table in the terminal
add_panel(optimizer, writer)                                      # once: what turns, and why
trainer.add_callback(transformers_callback(trainer))              # transformers
Trainer(callbacks=[lightning_callback()])                         # Lightning
"""

from __future__ import annotations

import importlib
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

from . import panels
from .blockwise import Blockwise

# what is logged by default, as far as the optimizer has it
QUANTITIES = ("norm", "gradient_norm", "eta_radial", "angle", "at_max_angle")


def log_diagnostics(
    optimizer: Any,
    log: Any,
    step: int,
    every: int = 100,
    prefix: str = "adamo",
    quantities: Sequence[str] | None = None,
) -> bool:
    """Hand the diagnostics of the last step to a logger, in one step out of ``every``.

    In the other steps nothing is computed and nothing waits for the device.

    Args:
        optimizer: an AdamO or AngularAdamW that has taken a step, as it is or wrapped by Accelerate
            or Lightning.
        log: a TensorBoard ``SummaryWriter``; whatever has ``log_metrics(values, step=...)``
            (Lightning's loggers) or ``log(values, step=...)`` (``wandb``, its runs, Accelerate's
            ``Accelerator``); or a function of (values, step).
        step: the number of the step; it is logged where ``every`` divides it.
        every: one step in how many is logged.
        prefix: the values are called ``prefix/quantity/parameter``, and ``prefix/guard_…/total``
            for the number of parameters in which a part of AdamO's guard acted.
        quantities: which columns of ``optimizer.diagnostics()`` are logged for every parameter;
            ``None``: norm, gradient_norm, angle, and eta_radial or at_max_angle.

    Returns:
        Whether this step was logged.

    Example:
        >>> for step, batch in enumerate(loader, 1):
        ...     ...
        ...     log_diagnostics(optimizer, writer, step)
    """
    if not is_due(step, every):
        return False
    values = logged_values(find_optimizer(optimizer), prefix, quantities)
    if values:
        sink(log)(values, step)
    return bool(values)


def print_diagnostics(optimizer: Any, step: int, every: int = 100) -> bool:
    """Print a table of every layer's angle and norm over time, in one step out of ``every``.

    The curves hold the last 16 values that were printed. Needs ``rich``.

    Args:
        optimizer: an AdamO or AngularAdamW that has taken a step, as it is or wrapped.
        step: the number of the step; the table is printed where ``every`` divides it.
        every: one step in how many is printed.

    Returns:
        Whether this step was printed.

    Example:
        >>> for step, batch in enumerate(loader, 1):
        ...     ...
        ...     print_diagnostics(optimizer, step)
    """
    if not is_due(step, every):
        return False
    try:
        from rich.console import Console
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("print_diagnostics needs rich: pip install rich") from error
    found = find_optimizer(optimizer)
    history = panels.record(found)
    if not history["norm"]:
        return False
    Console().print(panels.table(history, f"{type(found).__name__}, step {step}"))
    return True


def add_panel(optimizer: Any, log: Any, prefix: str = "adamo") -> None:
    """Say in TensorBoard or W&B, once, which weights turn, why, and what the curves mean.

    TensorBoard gets a text ``prefix/rules``, and under *Custom Scalars* one chart a quantity with a
    line for every parameter (it replaces another layout of the same writer). W&B gets the tables
    ``prefix/rules`` and ``prefix/curves``.

    Args:
        optimizer: an AdamO or AngularAdamW, as it is or wrapped.
        log: a TensorBoard ``SummaryWriter``, ``wandb`` or a run of it.
        prefix: as in :func:`log_diagnostics`.

    Example:
        >>> add_panel(optimizer, writer)
    """
    found = find_optimizer(optimizer)
    if hasattr(log, "add_custom_scalars"):
        log.add_text(f"{prefix}/rules", panels.markdown(found))
        log.add_custom_scalars(panels.layout(prefix))
    elif getattr(log, "__name__", type(log).__module__).split(".")[0] == "wandb":
        make = importlib.import_module("wandb").Table
        meanings = [[*pair] for pair in panels.MEANINGS.items()]
        tables = {
            f"{prefix}/rules": make(columns=[*panels.COLUMNS], data=panels.rules(found)),
            f"{prefix}/curves": make(columns=["curve", "meaning"], data=meanings),
        }
        log.log(tables, commit=False)  # with the first values, whatever their step
    else:
        kind = type(log).__name__
        raise ValueError(f"log must be a SummaryWriter, wandb or a run of it; got {kind}")


def is_due(step: Any, every: Any) -> bool:
    if not hasattr(every, "__index__") or every < 1:
        raise ValueError(f"every must be an integer >= 1, got {every!r}")
    if not hasattr(step, "__index__"):
        raise ValueError(f"step must be an integer, got {step!r}")
    return step % every == 0


def logged_values(
    optimizer: Blockwise, prefix: str, quantities: Sequence[str] | None
) -> dict[str, float]:
    """One number per parameter and quantity, and the sums of the guard's flags; synchronizes."""
    rows = optimizer.diagnostics(synchronize=True)
    known = list(next(iter(rows.values()), {}))
    if quantities is None:
        quantities = [name for name in QUANTITIES if name in known]
    if isinstance(quantities, str):
        raise ValueError(f"quantities must be a list of names, got {quantities!r}")
    if rows and (unknown := [name for name in quantities if name not in known]):
        raise ValueError(f"quantities must be among {', '.join(known)}; got {unknown[0]!r}")
    values = {}
    for quantity in quantities:
        for name, row in rows.items():
            # η_ρ and τ are NaN where a rule has none; a NaN norm is news.
            if quantity in ("norm", "gradient_norm") or not math.isnan(row[quantity]):
                values[f"{prefix}/{quantity}/{name}"] = row[quantity]
    for quantity in known:
        if quantity.startswith("guard_"):
            values[f"{prefix}/{quantity}/total"] = sum(row[quantity] for row in rows.values())
    return values


def sink(log: Any) -> Callable[[dict[str, float], int], Any]:
    """A function of (values, step) for any of the loggers that ``log_diagnostics`` takes."""
    if isinstance(log, logging.Logger):
        raise ValueError(
            "a logging.Logger takes text: pass a function of (values, step) that makes some"
        )
    if hasattr(log, "add_scalar"):

        def write(values: dict[str, float], step: int) -> None:
            for name, value in values.items():
                log.add_scalar(name, value, step)

        return write
    for method in ("log_metrics", "log"):
        if hasattr(log, method):
            return lambda values, step: getattr(log, method)(values, step=step)
    if not callable(log):
        raise ValueError(
            f"log must be a SummaryWriter, a logger with log_metrics or log, or a function of "
            f"(values, step); got {type(log).__name__}"
        )
    return log


def find_optimizer(optimizer: Any) -> Blockwise:
    """The optimizer of ours inside the wrappers of Accelerate (``.optimizer``) and Lightning."""
    found = optimizer
    for _ in range(8):  # wrappers may stand around wrappers
        if isinstance(found, Blockwise):
            return found
        found = getattr(found, "optimizer", None)
    kind = type(optimizer).__name__
    raise ValueError(f"there is no AdamO and no AngularAdamW in this {kind}")


def transformers_callback(
    trainer: Any, every: int = 100, prefix: str = "adamo", quantities: Sequence[str] | None = None
) -> Any:
    """A ``TrainerCallback`` that sends diagnostics wherever ``report_to`` sends the loss.

    They stay out of the console and of ``trainer_state.json``, which dozens of numbers would flood.
    The options are those of :func:`log_diagnostics`.

    Example:
        >>> trainer.add_callback(transformers_callback(trainer, every=100))
    """
    is_due(0, every)  # a mistake is told now, not in the hundredth step
    from transformers import PrinterCallback, ProgressCallback, TrainerCallback

    def report(values: dict[str, float], step: int) -> None:
        handler, state = trainer.callback_handler, trainer.state
        for callback in handler.callbacks:
            if not isinstance(callback, (PrinterCallback, ProgressCallback)):
                logs = dict(values)
                callback.on_log(
                    trainer.args, state, trainer.control, logs=logs, model=handler.model
                )

    class Diagnostics(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            step = state.global_step
            log_diagnostics(kwargs["optimizer"], report, step, every, prefix, quantities)

    return Diagnostics()


def lightning_callback(
    every: int = 100, prefix: str = "adamo", quantities: Sequence[str] | None = None
) -> Any:
    """A Lightning ``Callback`` that sends diagnostics of our optimizers to the trainer's loggers.

    The options are those of :func:`log_diagnostics`; with several optimizers the prefix is
    followed by the optimizer's number.

    Example:
        >>> trainer = Trainer(callbacks=[lightning_callback(every=100)])
    """
    is_due(0, every)  # a mistake is told now, not in the hundredth step
    try:
        pytorch = importlib.import_module("lightning.pytorch")
    except ModuleNotFoundError:
        pytorch = importlib.import_module("pytorch_lightning")

    class Diagnostics(pytorch.Callback):
        last = 0

        def on_train_batch_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
            # A batch may end several steps (manual optimization) or none (accumulation).
            step, last = trainer.global_step, self.last
            self.last = step
            if step // every == last // every or not trainer.loggers:
                return

            def log(values: dict[str, float], step: int) -> None:
                for logger in trainer.loggers:
                    logger.log_metrics(values, step=step)

            several = len(trainer.optimizers) > 1
            for i, optimizer in enumerate(trainer.optimizers):
                if isinstance(optimizer, Blockwise):
                    name = f"{prefix}{i}" if several else prefix
                    log_diagnostics(optimizer, log, step, 1, name, quantities)

    return Diagnostics()
