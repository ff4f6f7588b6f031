"""Where data come from: a folder of the user's, or a download that the user asked for.

Nothing here trusts a file before it is checked: downloads, archives and texts by their published
checksums or number of tokens, images by their number and labels. Archives are read where they lie.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import http.client
import os
import tarfile
import urllib.request
import zipfile
import zlib
from collections.abc import Iterator
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
DAMAGE = (OSError, EOFError, UnicodeError, zipfile.BadZipFile, zlib.error, tarfile.TarError)


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
PLACES = {  # of a data set's files below the folder, the first that is there; * is the split
    "cifar100": ("*.bin", "cifar-100-binary/*.bin", CIFAR100.file),
    "enwik8": ("enwik8", "enwik8.gz", ENWIK8.file),
    "shakespeare": (SHAKESPEARE.file, "tinyshakespeare/input.txt", "input.txt"),
    "wikitext2": (
        *("wikitext-2.*.txt", "wikitext-2.*.txt.gz", "wikitext-2/wiki.*.tokens", "wiki.*.tokens"),
        "wikitext-2-v1.zip",
    ),
}
TITLES = {"cifar100": "CIFAR-100", "enwik8": "enwik8", "shakespeare": "Tiny Shakespeare"}


def folder(data_dir: Path | None) -> Path:
    """The user's folder: the argument, else ``$ADAMO_DATA``, else ``~/.cache/adamo-lab``."""
    chosen = data_dir or os.environ.get("ADAMO_DATA") or "~/.cache/adamo-lab"
    return Path(chosen).expanduser()


def places(name: str, data_dir: Path | None, split: str) -> list[Path]:
    return [folder(data_dir) / place.replace("*", split) for place in PLACES[name]]


def find(name: str, data_dir: Path | None, split: str = "") -> Path:
    """The file of a data set, or of a split of it."""
    possible = places(name, data_dir, split)
    for path in possible:
        if path.is_file():
            return path
    where = folder(data_dir)
    if name == "wikitext2":
        names = ", ".join(str(path.relative_to(where)) for path in possible)
        raise LabError(
            f"WikiText-2 is not in {where}, and no official download exists any more; "
            f"put one of these files there: {names}"
        )
    raise LabError(
        f"{TITLES[name]} is not in {where}; run `adamo-lab data {name}` to download it, "
        f"or point --data-dir at your copy"
    )


def read(path: Path, member: str = "") -> bytes:
    """What a file holds, or a member of an archive."""
    try:
        if path.name.endswith(".tar.gz"):
            with tarfile.open(path) as tar:
                file = tar.extractfile(member) if member in tar.getnames() else None
                if file is None:
                    raise tarfile.TarError(f"no {member} in it")
                return file.read()
        if path.suffix == ".zip":
            with zipfile.ZipFile(path) as archive:
                if member not in archive.namelist():
                    raise zipfile.BadZipFile(f"no {member} in it")
                return archive.read(member)
        content = path.read_bytes()
        return gzip.decompress(content) if path.suffix == ".gz" else content
    except (*DAMAGE, KeyError) as error:  # a link in an archive that leads nowhere is a KeyError
        cause = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise LabError(f"cannot read {path} ({cause}); put a new copy there") from error


def verify(what: Path | str, content: bytes, algorithm: str, checksum: str) -> None:
    """Refuse what is not the published file, or text."""
    found = hashlib.new(algorithm, content, usedforsecurity=False).hexdigest()
    if found != checksum:
        raise LabError(
            f"{what} has the {algorithm} checksum {found} in place of {checksum}; delete it or put "
            f"a new copy there"
        )


# --- the data sets


def read_cifar100(split: str, data_dir: Path | None) -> tuple[np.ndarray, np.ndarray]:
    """Images [n, 32, 32, 3] of bytes and fine labels [n] of int64; "train" or "test".

    A record is a byte of coarse label, a byte of fine label and the image.
    """
    path, count = find("cifar100", data_dir, split), IMAGES[split]
    content = read(path, f"cifar-100-binary/{split}.bin")
    if len(content) != count * (2 + IMAGE):
        expected = count * (2 + IMAGE)
        raise LabError(f"{path} has {len(content)} bytes, not {expected}; put a new copy there")
    records = np.frombuffer(content, np.uint8).reshape(count, 2 + IMAGE)
    for labels, classes in ((records[:, 0], SUPERCLASSES), (records[:, 1], CLASSES)):
        if labels.max() >= classes:
            raise LabError(f"{path} has labels outside 0 to {classes - 1}; put a new copy there")
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
    path = find("shakespeare", data_dir)
    verify(path, content := read(path), SHAKESPEARE.algorithm, SHAKESPEARE.checksum)
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
    if len(words) != TOKENS[split]:
        raise LabError(
            f"{path} has {len(words)} tokens, WikiText-2's {split} text has {TOKENS[split]}; put a "
            f"new copy there"
        )
    return words


def check(name: str, data_dir: Path | None) -> None:
    """Raise what a run would when its data set is missing or damaged; others need no files."""
    if name == "cifar100":
        for path in {find(name, data_dir, split) for split in IMAGES}:
            if path.name == CIFAR100.file:
                verify(path, path.read_bytes(), CIFAR100.algorithm, CIFAR100.checksum)
    elif name == "wikitext2":
        wikitext2("train", data_dir)
        wikitext2("valid", data_dir)
    elif name in PLACES:
        {"enwik8": enwik8, "shakespeare": shakespeare}[name](data_dir)


# --- downloads


def download(name: str, data_dir: Path | None = None) -> Path:
    """Fetch a data set from its official address, check it, and say where it lies."""
    remotes = {"cifar100": CIFAR100, "enwik8": ENWIK8, "shakespeare": SHAKESPEARE}
    if name not in PLACES:
        raise LabError(f"unknown data set {name!r}; known are {', '.join(PLACES)}")
    if name in remotes and not any(path.is_file() for path in places(name, data_dir, "train")):
        fetch(remotes[name], folder(data_dir))
    check(name, data_dir)
    return find(name, data_dir, "train")


def fetch(remote: Remote, where: Path) -> None:
    """A file whole and checked under its name, or nothing."""
    target, part = where / remote.file, where / f"{remote.file}.part"
    with writing(part):
        where.mkdir(parents=True, exist_ok=True)
    by_hand = f"fetch {remote.url} by hand and put it in {where} as {remote.file}"
    found = hashlib.new(remote.algorithm, usedforsecurity=False)
    try:
        response = urllib.request.urlopen(remote.url, timeout=TIMEOUT)
    except NETWORK as error:  # a refusal of the server's is one, too
        cause = getattr(error, "reason", error)
        raise LabError(f"cannot fetch {remote.url} ({cause}); {by_hand}") from error
    with response, writing(part), open(part, "wb") as file:
        for block in blocks(response, remote):
            file.write(block)
            found.update(block)
    if found.hexdigest() != remote.checksum:
        part.unlink()
        raise LabError(
            f"{remote.url} gave a file with the {remote.algorithm} checksum {found.hexdigest()} in "
            f"place of {remote.checksum}, so {part} was removed; try again, or {by_hand}"
        )
    with writing(target):
        os.replace(part, target)


def blocks(response: Any, remote: Remote) -> Iterator[bytes]:
    """What a server sends, under a bar; a network's error is not the disk's."""
    from rich.console import Console
    from rich.progress import wrap_file

    console = Console(stderr=True)
    with contextlib.ExitStack() as bar:
        if console.is_terminal:
            total = response.length or 0
            response = bar.enter_context(
                wrap_file(response, total, description=remote.file, console=console)
            )
        try:
            while block := response.read(CHUNK):
                yield block
        except NETWORK as error:
            cause = error or type(error).__name__
            raise LabError(f"{remote.url} broke off ({cause}); run the command again") from error
