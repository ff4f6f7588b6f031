"""Where data come from: a folder of the user's, or a download that the user asked for.

Nothing here trusts a file before it is checked: archives and downloads by their published
checksums, images by their number and labels, texts by their checksum or number of tokens.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import http.client
import os
import tarfile
import tempfile
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import LabError, writing

if TYPE_CHECKING:
    import torch
    from torch import Tensor

IMAGES = {"train": 50_000, "test": 10_000}
IMAGE = 3 * 32 * 32  # bytes: planes of red, green and blue
CLASSES, SUPERCLASSES = 100, 20
# With one <eos> for every line end: 2,051,910 words and 36,718 line ends are 2,088,628 tokens.
TOKENS = {"train": 2_088_628, "valid": 217_646, "test": 245_569}
VOCABULARY = 33_278  # of the training text, <eos> and <unk> among them
CHUNK = 1 << 20
TIMEOUT = 30.0  # seconds without a byte
NETWORK = (OSError, http.client.HTTPException)


@dataclass(frozen=True)
class Remote:
    """A file on the network, and how to know that it is the right one."""

    url: str
    file: str  # its name in the data folder
    algorithm: str
    checksum: str


CIFAR100 = Remote(
    "https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
    "cifar-100-binary.tar.gz",
    "md5",
    "03b5dce01913d631647c71ecec9e9cb8",
)
SHAKESPEARE = Remote(
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
    "tinyshakespeare.txt",
    "sha256",
    "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
)
ENWIK8 = Remote(
    "http://mattmahoney.net/dc/enwik8.zip",
    "enwik8.zip",
    "sha256",
    "547994d9980ebed1288380d652999f38a14fe291a6247c157c3d33d4932534bc",
)
ENWIK8_MD5 = "a1fa5ffddb56f4953e226637dabbb36a"  # of the text itself
DOWNLOADS = ("cifar100", "enwik8", "shakespeare")


def folder(data_dir: Path | None) -> Path:
    """The user's folder: the argument, else ``$ADAMO_DATA``, else ``~/.cache/adamo-lab``."""
    chosen = data_dir or os.environ.get("ADAMO_DATA") or "~/.cache/adamo-lab"
    return Path(chosen).expanduser()


def missing(title: str, name: str, where: Path) -> LabError:
    return LabError(
        f"{title} is not in {where}; run `adamo-lab data {name}` to download it, "
        f"or point --data-dir at your copy"
    )


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Name the file and the cause when it cannot be read."""
    try:
        yield
    except (OSError, EOFError, UnicodeError, zipfile.BadZipFile, zlib.error) as error:
        cause = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise LabError(f"cannot read {path} ({cause}); put a new copy there") from error


# --- CIFAR-100


def read_cifar100(split: str, data_dir: Path | None) -> tuple[np.ndarray, np.ndarray]:
    """Images [n, 32, 32, 3] of bytes and fine labels [n] of int64; "train" or "test"."""
    pixels, labels = read_records(find_cifar100(data_dir) / f"{split}.bin", IMAGES[split])
    images = pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(images), labels.astype(np.int64)


def find_cifar100(data_dir: Path | None) -> Path:
    """The folder of CIFAR-100's two files: the user's, its subfolder, or from an archive there."""
    where = folder(data_dir)
    if found := unpacked_cifar100(where):
        return found
    archive = where / CIFAR100.file
    if archive.is_file():
        verify(archive, CIFAR100)
        extract(archive)
        return find_cifar100(where)
    raise missing("CIFAR-100", "cifar100", where)


def unpacked_cifar100(where: Path) -> Path | None:
    places = (where, where / "cifar-100-binary")
    return next((p for p in places if all((p / f"{s}.bin").is_file() for s in IMAGES)), None)


def read_records(path: Path, count: int) -> tuple[np.ndarray, np.ndarray]:
    """A record is a byte of coarse label, a byte of fine label and the image."""
    size, expected = path.stat().st_size, count * (2 + IMAGE)
    if size != expected:
        raise LabError(f"{path} has {size} bytes, not {expected}; put a new copy there")
    with reading(path):
        records = np.fromfile(path, np.uint8).reshape(count, 2 + IMAGE)
    checked_labels(path, records[:, 0], SUPERCLASSES)
    return records[:, 2:], checked_labels(path, records[:, 1], CLASSES)


def checked_labels(path: Path, labels: np.ndarray, classes: int) -> np.ndarray:
    if len(labels) and not 0 <= labels.min() <= labels.max() < classes:
        raise LabError(f"{path} has labels outside 0 to {classes - 1}; put a new copy there")
    return labels


@lru_cache(maxsize=8)
def cifar100(split: str, where: Path, device: torch.device) -> tuple[Tensor, Tensor]:
    """Images [n, 32, 32, 3] uint8 and labels [n] on a device; all runs of a process share them."""
    import torch

    images, labels = read_cifar100(split, where)
    return torch.from_numpy(images).to(device), torch.from_numpy(labels).to(device)


# --- texts


def shakespeare(data_dir: Path | None) -> str:
    """Tiny Shakespeare: 1,115,394 characters."""
    where = folder(data_dir)
    for name in (SHAKESPEARE.file, "tinyshakespeare/input.txt", "input.txt"):
        path = where / name
        if path.is_file():
            verify(path, SHAKESPEARE)
            with reading(path):
                return path.read_bytes().decode()
    raise missing("Tiny Shakespeare", "shakespeare", where)


def enwik8(data_dir: Path | None) -> bytes:
    """The first 100,000,000 bytes of Wikipedia as of 2006, whole or packed."""
    where = folder(data_dir)
    readers: dict[str, Callable[[Path], bytes]] = {
        "enwik8": Path.read_bytes,
        "enwik8.gz": lambda path: gzip.decompress(path.read_bytes()),
        ENWIK8.file: lambda path: read_member(path, "enwik8"),
    }
    for path, read in ((where / name, read) for name, read in readers.items()):
        if path.is_file():
            with reading(path):
                text = read(path)
            found = hashlib.md5(text, usedforsecurity=False).hexdigest()
            if found != ENWIK8_MD5:
                raise LabError(
                    f"{path} holds a text with the md5 checksum {found} in place of {ENWIK8_MD5}; "
                    f"delete it or put a new copy there"
                )
            return text
    raise missing("enwik8", "enwik8", where)


def wikitext2(split: str, data_dir: Path | None) -> list[str]:
    """The words of a split ("train", "valid" or "test"), with ``<eos>`` for every line end."""
    where = folder(data_dir)
    for path, read in wikitext2_files(split, where).items():
        if path.is_file():
            with reading(path):
                words = read(path).decode().replace("\n", " <eos> ").split()
            if len(words) != TOKENS[split]:
                raise LabError(
                    f"{path} has {len(words)} tokens, WikiText-2's {split} text has "
                    f"{TOKENS[split]}; put a new copy there"
                )
            return words
    names = ", ".join(str(path.relative_to(where)) for path in wikitext2_files(split, where))
    raise LabError(
        f"WikiText-2 is not in {where}, and no official download exists any more; "
        f"put one of these files there: {names}"
    )


def wikitext2_files(split: str, where: Path) -> dict[Path, Callable[[Path], bytes]]:
    """Where a split may lie, and how each is read."""
    member = f"wikitext-2/wiki.{split}.tokens"
    return {
        where / f"wikitext-2.{split}.txt": Path.read_bytes,
        where / f"wikitext-2.{split}.txt.gz": lambda path: gzip.decompress(path.read_bytes()),
        where / member: Path.read_bytes,
        where / f"wiki.{split}.tokens": Path.read_bytes,
        where / "wikitext-2-v1.zip": lambda path: read_member(path, member),
    }


def read_member(path: Path, name: str) -> bytes:
    with zipfile.ZipFile(path) as archive:
        if name not in archive.namelist():
            raise zipfile.BadZipFile(f"no {name} in it")
        return archive.read(name)


# --- archives and downloads


def checksum(path: Path, algorithm: str) -> str:
    found = hashlib.new(algorithm, usedforsecurity=False)
    with reading(path), open(path, "rb") as file:
        while block := file.read(CHUNK):
            found.update(block)
    return found.hexdigest()


def verify(path: Path, remote: Remote) -> None:
    """Refuse a file that is not the published one."""
    found = checksum(path, remote.algorithm)
    if found != remote.checksum:
        raise LabError(
            f"{path} has the {remote.algorithm} checksum {found} in place of "
            f"{remote.checksum}; delete it or put a new copy there"
        )


def extract(archive: Path) -> None:
    """Unpack beside the archive; its folder appears whole or not at all."""
    if not hasattr(tarfile, "data_filter"):
        raise LabError(f"this Python is too old to unpack {archive} safely; use 3.10.12 or newer")
    with (
        writing(archive.parent),
        tempfile.TemporaryDirectory(dir=archive.parent, prefix=".unpacking-") as room,
    ):
        try:
            with tarfile.open(archive) as tar:
                tar.extractall(room, filter="data")
        except (tarfile.TarError, EOFError) as error:
            raise LabError(f"cannot unpack {archive}: {error}") from error
        target = archive.parent / archive.name.removesuffix(".tar.gz")
        unpacked = Path(room, target.name)
        if not unpacked_cifar100(unpacked):
            raise LabError(f"{archive} does not hold CIFAR-100; put a new copy there")
        if not target.exists():
            unpacked.rename(target)
        elif not unpacked_cifar100(target):  # else another process was faster
            raise LabError(f"{target} is incomplete; delete it, and {archive} will be unpacked")


def download(name: str, data_dir: Path | None = None) -> Path:
    """Fetch a data set from its official address, check it, and say where it lies."""
    where = folder(data_dir)
    if name == "cifar100":
        if not unpacked_cifar100(where):
            fetch(CIFAR100, where)
        return find_cifar100(where)
    for remote in {"enwik8": [ENWIK8], "shakespeare": [SHAKESPEARE]}.get(name, []):
        fetch(remote, where)
        return where / remote.file
    if name == "wikitext2":
        check(name, where)  # says which files it looks for
        return where
    raise LabError(f"unknown data set {name!r}; known are {', '.join(DOWNLOADS)} and wikitext2")


def check(name: str, data_dir: Path | None) -> None:
    """Raise what a run would when its data set is missing or damaged; others need no files."""
    if name == "cifar100":
        find_cifar100(data_dir)
    elif name in ("enwik8", "shakespeare"):
        {"enwik8": enwik8, "shakespeare": shakespeare}[name](data_dir)
    elif name == "wikitext2":
        wikitext2("train", data_dir)
        wikitext2("valid", data_dir)


def fetch(remote: Remote, where: Path) -> None:
    """A file whole and checked under its name, or nothing."""
    target, part = where / remote.file, where / f"{remote.file}.part"
    if target.is_file():
        return verify(target, remote)
    with writing(part):
        where.mkdir(parents=True, exist_ok=True)
    by_hand = f"fetch {remote.url} by hand and put it in {where} as {remote.file}"
    try:
        response = urllib.request.urlopen(remote.url, timeout=TIMEOUT)
    except NETWORK as error:  # a refusal of the server's is one, too
        cause = getattr(error, "reason", error)
        raise LabError(f"cannot fetch {remote.url} ({cause}); {by_hand}") from error
    with (
        response,
        progress(remote.file, response.length) as advance,
        writing(part),
        open(part, "wb") as file,
    ):
        for block in blocks(response, remote.url):
            file.write(block)
            advance(len(block))
    found = checksum(part, remote.algorithm)
    if found != remote.checksum:
        part.unlink()
        raise LabError(
            f"{remote.url} gave a file with the {remote.algorithm} checksum {found} in place of "
            f"{remote.checksum}, so {part} was removed; try again, or {by_hand}"
        )
    with writing(target):
        os.replace(part, target)


def blocks(response: Any, url: str) -> Iterator[bytes]:
    """What a server sends; a network's error is not the disk's."""
    try:
        while block := response.read(CHUNK):
            yield block
    except NETWORK as error:
        cause = error or type(error).__name__
        raise LabError(f"{url} broke off ({cause}); run the command again") from error


@contextlib.contextmanager
def progress(label: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """A bar on the terminal, where there is one."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn(label), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(label, total=total)
        yield lambda size: bar.advance(task, size)
