"""Everything is in pyproject.toml; this file only lets ADAMO_PURE=1 leave the native kernel out.

ADAMO_NATIVE=1 is the opposite: where the kernel does not compile, the build fails.
"""

from __future__ import annotations

import os
from typing import Any

from setuptools import Distribution, setup


class Chosen(Distribution):
    def parse_config_files(self, *args: Any, **options: Any) -> None:
        super().parse_config_files(*args, **options)
        if os.environ.get("ADAMO_PURE") == "1":
            self.ext_modules = []
        if os.environ.get("ADAMO_NATIVE") == "1":
            for extension in self.ext_modules or ():
                extension.optional = False


setup(distclass=Chosen)
