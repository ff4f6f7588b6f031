"""Where data come from: a folder of the user's, or a download that the user asked for.

Nothing here trusts a file before it is checked: downloads, archives and texts by their published
checksums or number of tokens, images by their number and labels. Archives are read where they lie.
"""

from __future__ import annotations

import gzip
import hashlib
import http.client
import os
import tarfile
import urllib.request
import zipfile
import zlib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from .disk import write_atomically
from .errors import LabError, lookup, require, writing

if TYPE_CHECKING:
    import torch
    from torch import Tensor

IMAGES = {"train": 50_000, "test": 10_000}
IMAGE = 3 * 32 * 32  # bytes: planes of red, green and blue
CLASSES, SUPERCLASSES = 100, 20
# With one <eos> for every line end: 2,051,910 words and 36,718 line ends are 2,088,628 tokens.
TOKENS = {"train": 2_088_628, "valid": 217_646, "test": 245_569}
VOCABULARY = 33_278  # of the training text, <eos> and <unk> among them
ENWIK8_MD5 = "a1fa5ffddb56f4953e226637dabbb36a"  # of the text itself
CHUNK = 1 << 20
TIMEOUT = 30.0  # seconds without a byte
NETWORK = (OSError, http.client.HTTPException)
DAMAGE = (OSError, EOFError, KeyError, zipfile.BadZipFile, zlib.error, tarfile.TarError)


@dataclass(frozen=True)
class Source:
    """A data set: its files, where to fetch it, and how to know that it is the right one."""

    title: str
    places: tuple[str, ...]  # below the folder, the first that is there; * is the split
    file: str = ""  # its name once it is fetched
    url: str = ""  # none: it cannot be fetched
    algorithm: str = "sha256"
    checksum: str = ""


SOURCES = {
    "cifar100": Source(
        "CIFAR-100",
        ("*.bin", "cifar-100-binary/*.bin", "cifar-100-binary.tar.gz"),
        "cifar-100-binary.tar.gz",
        "https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
        "md5",
        "03b5dce01913d631647c71ecec9e9cb8",
    ),
    "enwik8": Source(
        "enwik8",
        ("enwik8", "enwik8.gz", "enwik8.zip"),
        "enwik8.zip",
        "http://mattmahoney.net/dc/enwik8.zip",
        checksum="547994d9980ebed1288380d652999f38a14fe291a6247c157c3d33d4932534bc",
    ),
    "shakespeare": Source(
        "Tiny Shakespeare",
        ("tinyshakespeare.txt", "tinyshakespeare/input.txt", "input.txt"),
        "tinyshakespeare.txt",
        "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
        checksum="86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
    ),
    "wikitext2": Source(
        "WikiText-2",
        (
            "wikitext-2.*.txt",
            "wikitext-2.*.txt.gz",
            "wikitext-2/wiki.*.tokens",
            "wiki.*.tokens",
            "wikitext-2-v1.zip",
        ),
    ),
}


def folder(data_dir: Path | None) -> Path:
    """The user's folder: the argument, else ``$ADAMO_DATA``, else ``~/.cache/adamo-lab``."""
    chosen = data_dir or os.environ.get("ADAMO_DATA") or "~/.cache/adamo-lab"
    return Path(chosen).expanduser()


def find(name: str, data_dir: Path | None, split: str = "") -> Path:
    """The file of a data set, or of a split of it."""
    source, where = SOURCES[name], folder(data_dir)
    names = [place.replace("*", split) for place in source.places]
    for path in (where / name for name in names):
        if path.is_file():
            return path
    cure = f"run `adamo-lab data {name}` to download it, or point --data-dir at your copy"
    if not source.url:
        files = ", ".join(names)
        cure = f"no official download exists any more; put one of these files there: {files}"
    raise LabError(f"{source.title} is not in {where}; {cure}")


def read(path: Path, member: str = "") -> bytes:
    """What a file holds, or a member of an archive."""
    try:
        if path.name.endswith(".tar.gz"):
            with tarfile.open(path) as tar:
                file = tar.extractfile(member)
                if file is None:
                    raise KeyError(f"no {member} in it")
                return file.read()
        if path.suffix == ".zip":
            with zipfile.ZipFile(path) as archive:
                return archive.read(member)
        content = path.read_bytes()
        return gzip.decompress(content) if path.suffix == ".gz" else content
    except DAMAGE as error:  # what an archive does not hold, a link to nowhere too, is a KeyError
        cause = getattr(error, "strerror", None) or str(error).strip("'\"") or type(error).__name__
        raise LabError(f"cannot read {path} ({cause}); put a new copy there") from error


def verify(what: Path | str, content: bytes, algorithm: str, checksum: str, cure: str = "") -> None:
    """Refuse what is not the published file, or text."""
    found = hashlib.new(algorithm, content, usedforsecurity=False).hexdigest()
    cure = cure or "delete it or put a new copy there"
    wrong = f"{what} has the {algorithm} checksum {found} in place of {checksum}; {cure}"
    require(found == checksum, wrong)


# --- the data sets


def read_cifar100(split: str, data_dir: Path | None) -> tuple[np.ndarray, np.ndarray]:
    """Images [n, 32, 32, 3] of bytes and fine labels [n] of int64; "train" or "test".

    A record is a byte of coarse label, a byte of fine label and the image.
    """
    path, expected = find("cifar100", data_dir, split), IMAGES[split] * (2 + IMAGE)
    content = read(path, f"cifar-100-binary/{split}.bin")
    size = f"{path} has {len(content)} bytes, not {expected}; put a new copy there"
    require(len(content) == expected, size)
    records = np.frombuffer(content, np.uint8).reshape(-1, 2 + IMAGE)
    for labels, classes in ((records[:, 0], SUPERCLASSES), (records[:, 1], CLASSES)):
        odd = f"{path} has labels outside 0 to {classes - 1}; put a new copy there"
        require(labels.max() < classes, odd)
    images = records[:, 2:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(images), records[:, 1].astype(np.int64)


@lru_cache(maxsize=8)
def cifar100(split: str, where: Path, device: torch.device) -> tuple[Tensor, Tensor]:
    """Images [n, 32, 32, 3] uint8 and labels [n] on a device; all runs of a process share them."""
    import torch

    images, labels = read_cifar100(split, where)
    return torch.from_numpy(images).to(device), torch.from_numpy(labels).to(device)


def shakespeare(data_dir: Path | None) -> str:
    """Tiny Shakespeare: 1,115,394 characters."""
    path, source = find("shakespeare", data_dir), SOURCES["shakespeare"]
    verify(path, content := read(path), source.algorithm, source.checksum)
    return content.decode()


def enwik8(data_dir: Path | None) -> bytes:
    """The first 100,000,000 bytes of Wikipedia as of 2006, whole or packed."""
    path = find("enwik8", data_dir)
    verify(f"the text in {path}", content := read(path, "enwik8"), "md5", ENWIK8_MD5)
    return content


def wikitext2(split: str, data_dir: Path | None) -> list[str]:
    """The words of a split ("train", "valid" or "test"), with ``<eos>`` for every line end."""
    path = find("wikitext2", data_dir, split)
    try:
        text = read(path, f"wikitext-2/wiki.{split}.tokens").decode()
    except UnicodeError as error:
        raise LabError(f"cannot read {path} ({error}); put a new copy there") from error
    words = text.replace("\n", " <eos> ").split()
    expected = f"{path} has {len(words)} tokens, WikiText-2's {split} text has {TOKENS[split]}"
    require(len(words) == TOKENS[split], f"{expected}; put a new copy there")
    return words


def check(name: str, data_dir: Path | None) -> None:
    """Raise what a run would when its data set is missing or damaged; others need no files."""
    if name == "cifar100":
        source = SOURCES[name]
        for path in {find(name, data_dir, split) for split in IMAGES}:
            if path.name == source.file:
                verify(path, path.read_bytes(), source.algorithm, source.checksum)
    elif name == "wikitext2":
        wikitext2("train", data_dir)
        wikitext2("valid", data_dir)
    elif name in SOURCES:
        {"enwik8": enwik8, "shakespeare": shakespeare}[name](data_dir)


# --- downloads


def download(name: str, data_dir: Path | None = None) -> Path:
    """Fetch a data set from its official address, check it, and say where it lies."""
    source = lookup("data set", name, SOURCES)
    try:
        find(name, data_dir, "train")
    except LabError:
        if source.url:
            fetch(source, folder(data_dir))
    check(name, data_dir)
    return find(name, data_dir, "train")


def fetch(source: Source, where: Path) -> None:
    """A file whole and checked under its name, or nothing; a bar tells how far it is."""
    from rich.console import Console
    from rich.progress import wrap_file

    target, console = where / source.file, Console(stderr=True)
    with writing(target):  # better known before the download
        where.mkdir(parents=True, exist_ok=True)
    by_hand = f"fetch {source.url} by hand and put it in {where} as {source.file}"
    try:
        with (
            urllib.request.urlopen(source.url, timeout=TIMEOUT) as response,
            wrap_file(
                response,
                response.length or 0,
                description=source.file,
                console=console,
                disable=not console.is_terminal,
            ) as file,
        ):
            content = b"".join(iter(lambda: file.read(CHUNK), b""))
    except NETWORK as error:  # a refusal of the server's is one, too
        cause = getattr(error, "reason", None) or error or type(error).__name__
        raise LabError(f"cannot fetch {source.url} ({cause}); {by_hand}, or try again") from error
    cure = f"try again, or {by_hand}"
    verify(f"what {source.url} gave", content, source.algorithm, source.checksum, cure)
    write_atomically(target, content)
