"""Everything is in pyproject.toml; this file only lets ADAMO_PURE=1 leave the native kernel out.

A Python without the global lock gets none either: it has no stable ABI. ADAMO_NATIVE=1 is the
opposite: where the kernel does not compile, the build fails.
"""

from __future__ import annotations

import os
import sysconfig
from typing import Any

from setuptools import Distribution, setup


class Chosen(Distribution):
    def parse_config_files(self, *args: Any, **options: Any) -> None:
        super().parse_config_files(*args, **options)
        if os.environ.get("ADAMO_PURE") == "1" or sysconfig.get_config_var("Py_GIL_DISABLED"):
            self.ext_modules = []
            self.command_options.get("bdist_wheel", {}).pop("py_limited_api", None)
        if os.environ.get("ADAMO_NATIVE") == "1":
            for extension in self.ext_modules or ():
                extension.optional = False


setup(distclass=Chosen)
