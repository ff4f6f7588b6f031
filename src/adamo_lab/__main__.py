"""``python -m adamo_lab`` is ``adamo-lab``."""

from .cli import main

main()
