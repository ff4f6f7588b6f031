"""Helpers for other libraries; each is imported only by the module named after it."""

from .trainer_groups import with_rules

__all__ = ["with_rules"]
