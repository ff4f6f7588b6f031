"""``python -m adamo_lab`` is ``adamo-lab``."""

from __future__ import annotations

import sys


def main() -> None:
    """Start the command line, or say what is missing for it."""
    try:
        from .cli import main as start
    except ImportError as error:
        if not (error.name or "").startswith(("typer", "rich")):
            raise
        sys.exit("adamo-lab needs more than the optimizer: pip install 'adamo-optim[lab]'")
    start()


if __name__ == "__main__":
    main()
