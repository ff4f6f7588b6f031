"""What the site's build adds to Markdown; without it the pages still read well on a code host.

- ``$$ … $$`` becomes MathML.
- A link to a file of the repository, such as ``../src/adamo_optim/rules.py``, becomes a link to a
  page that shows that file.
- The laboratory's report of all records goes into the site; links to ``../results`` lead to it.
- The mark ``no-run`` of a code block (see tests/test_docs.py) is taken away.
"""

from __future__ import annotations

import hashlib
import posixpath
import re
import shutil
from pathlib import Path
from typing import Any

import formulas
from mkdocs.structure.files import File, Files

from adamo_lab.report import write_report

ROOT = Path(__file__).parents[1]
REPORT = ROOT / "build" / "docs-report"
SHOWN = ("examples/*.py", "src/adamo_optim/*.py", "src/adamo_lab/*.py", "docs/*.py")
LINK = re.compile(r"\]\(\.\./(?P<path>[\w./-]+\.py)\)")


def on_files(files: Files, config: Any) -> Files:
    for path in sorted(path for pattern in SHOWN for path in ROOT.glob(pattern)):
        name = path.relative_to(ROOT).as_posix()
        code = path.read_text()
        title = f"---\ntitle: {name}\nsearch:\n  exclude: true\nhide: [navigation, toc]\n---\n"
        fence = "`" * max(3, 1 + max(map(len, re.findall("`+", code)), default=0))
        page = f'{title}# {name}\n\n{fence}python linenums="1"\n{code}{fence}\n'
        files.append(File.generated(config, page_of(name), content=page))
    made = report(REPORT)
    for path in (made, *sorted((made.parent / "figures").glob("*.svg"))):
        name = f"report/{path.relative_to(made.parent).as_posix()}"
        files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def report(out: Path) -> Path:
    """The page of all records, drawn anew if records or the laboratory have changed."""
    parts = [path for folder in ("results", "src/adamo_lab") for path in (ROOT / folder).rglob("*")]
    digest = hashlib.sha256()
    for path in sorted(path for path in parts if path.is_file() and path.suffix != ".pyc"):
        digest.update(f"{path.relative_to(ROOT)} {path.stat().st_mtime_ns}\n".encode())
    page, stamp = out / "index.html", out / "made-from.txt"
    if not page.exists() or not stamp.exists() or stamp.read_text() != digest.hexdigest():
        shutil.rmtree(out, ignore_errors=True)  # figures of records that are gone
        write_report(ROOT / "results", out)
        stamp.write_text(digest.hexdigest())
    return page


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    if page.file.src_uri.startswith("source/"):
        return markdown
    here = posixpath.dirname(page.file.src_uri)

    def link(found: re.Match[str]) -> str:
        return f"]({posixpath.relpath(page_of(found['path']), here or '.')})"

    markdown = LINK.sub(link, markdown).replace("](../results)", "](report/index.html)")
    markdown = re.sub(r"^(\s*```python) no-run.*$", r"\1", markdown, flags=re.MULTILINE)
    display = re.compile(r"^\$\$\s*(.+?)\s*\$\$$", re.MULTILINE | re.DOTALL)
    return display.sub(lambda found: formulas.block(found[1]), markdown)


def page_of(path: str) -> str:
    return f"source/{path}.md"
