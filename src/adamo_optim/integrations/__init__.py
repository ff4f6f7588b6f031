"""AdamO with other libraries' helpers; each is imported only by the module named after it."""

from .groups import with_rules

__all__ = ["with_rules"]
