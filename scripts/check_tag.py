"""Is a tag the version that the files state? python scripts/check_tag.py v0.2.0"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
STATED = {
    "pyproject.toml": r'^version = "(.+)"$',
    "src/adamo_optim/__init__.py": r'^__version__ = "(.+)"$',
    "CITATION.cff": r"^version: (.+)$",
}


def stated(root: Path) -> dict[str, str]:
    """The version in each of the files that state one."""
    found = {}
    for name, pattern in STATED.items():
        match = re.search(pattern, (root / name).read_text(), re.MULTILINE)
        found[name] = match[1] if match else "none"
    return found


def problems(tag: str, root: Path = ROOT) -> list[str]:
    """One sentence for each file that states another version, and for one not yet dated."""
    version = tag.removeprefix("v")
    result = [
        f"{name} states version {found}, the tag {tag} means {version}: mend one of them"
        for name, found in stated(root).items()
        if found != version
    ]
    dated = rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d$"
    if not re.search(dated, (root / "CHANGELOG.md").read_text(), re.MULTILINE):
        result.append(f"CHANGELOG.md has no line `## [{version}] - YYYY-MM-DD`: date the release")
    return result


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python scripts/check_tag.py v0.2.0")
    if found := problems(sys.argv[1]):
        sys.exit("\n".join(found))
