"""Where the laboratory's data come from: formats, checksums, archives and downloads."""

from __future__ import annotations

import contextlib
import errno
import gzip
import hashlib
import io
import os
import subprocess
import sys
import tarfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch

from adamo_lab import data
from adamo_lab.errors import LabError

SHARED = Path(__file__).parents[2] / "shared" / "data"
REAL = Path(os.environ.get("ADAMO_DATA") or SHARED)
COUNTS = {"train": 6, "test": 4}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Made files have a few images."""
    monkeypatch.setattr(data, "IMAGES", COUNTS)
    monkeypatch.setenv("no_proxy", "127.0.0.1")


# --- made files in the official formats


def made(split: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Pixels [n, 3072] as planes, fine and coarse labels."""
    chance = np.random.default_rng(len(split))
    pixels = chance.integers(256, size=(COUNTS[split], 3072), dtype=np.uint8)
    fine = chance.integers(100, size=COUNTS[split], dtype=np.uint8)
    return pixels, fine, chance.integers(20, size=COUNTS[split], dtype=np.uint8)


def records(split: str) -> bytes:
    pixels, fine, coarse = made(split)
    return np.concatenate((coarse[:, None], fine[:, None], pixels), 1).tobytes()


def write_binary(where: Path) -> None:
    where.mkdir(parents=True, exist_ok=True)
    for split in COUNTS:
        (where / f"{split}.bin").write_bytes(records(split))


def archive(files: dict[str, bytes], *special: tarfile.TarInfo) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
        for member in special:
            tar.addfile(member)
    return buffer.getvalue()


def official_archive() -> bytes:
    return archive({f"cifar-100-binary/{split}.bin": records(split) for split in COUNTS})


def trust(monkeypatch: pytest.MonkeyPatch, content: bytes, url: str = "") -> None:
    """Make a made archive the published one."""
    checksum = hashlib.md5(content, usedforsecurity=False).hexdigest()
    source = data.SOURCES["cifar100"]
    changed = replace(source, checksum=checksum, url=url or source.url)
    monkeypatch.setitem(data.SOURCES, "cifar100", changed)


def check_images(where: Path) -> None:
    for split in COUNTS:
        images, labels = data.read_cifar100(split, where)
        pixels, fine, _ = made(split)
        assert images.dtype == np.uint8
        assert images.flags.c_contiguous
        np.testing.assert_array_equal(images, pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
        np.testing.assert_array_equal(labels, fine)
        assert labels.dtype == np.int64


# --- CIFAR-100 on disk


def test_cifar100_in_the_folder_or_below(tmp_path: Path) -> None:
    write_binary(tmp_path / "cifar-100-binary")
    check_images(tmp_path)
    check_images(tmp_path / "cifar-100-binary")


def test_tensors_are_shared_by_all_runs_of_a_process(tmp_path: Path) -> None:
    write_binary(tmp_path)
    images, labels = data.cifar100("train", tmp_path, torch.device("cpu"))
    assert images.shape == (6, 32, 32, 3)
    assert labels.dtype == torch.int64
    assert data.cifar100("train", tmp_path, torch.device("cpu"))[0] is images


def test_the_default_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("ADAMO_DATA", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert data.folder(None) == tmp_path / ".cache" / "adamo-lab"
    monkeypatch.setenv("ADAMO_DATA", str(tmp_path / "mine"))
    assert data.folder(None) == tmp_path / "mine"
    assert data.folder(tmp_path / "other") == tmp_path / "other"
    with pytest.raises(LabError, match=f"CIFAR-100 is not in {tmp_path / 'mine'}; run `adamo-lab"):
        data.find("cifar100", None, "train")


@pytest.mark.parametrize("change", [lambda x: x[:-1], lambda x: x + b"\0", lambda x: b""])
def test_a_file_of_the_wrong_size(tmp_path: Path, change: Callable[[bytes], bytes]) -> None:
    write_binary(tmp_path)
    (tmp_path / "train.bin").write_bytes(change(records("train")))
    with pytest.raises(LabError, match=r"train\.bin has \d+ bytes, not 18444; put a new copy"):
        data.read_cifar100("train", tmp_path)


@pytest.mark.parametrize(("place", "value"), [(0, 20), (1, 100)], ids=["coarse", "fine"])
def test_labels_that_cannot_be(tmp_path: Path, place: int, value: int) -> None:
    write_binary(tmp_path)
    content = bytearray(records("test"))
    content[place] = value
    (tmp_path / "test.bin").write_bytes(content)
    with pytest.raises(LabError, match=r"test\.bin has labels outside 0 to"):
        data.read_cifar100("test", tmp_path)


# --- archives


def test_an_archive_is_read_where_it_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = official_archive()
    (tmp_path / "cifar-100-binary.tar.gz").write_bytes(content)
    with pytest.raises(LabError, match=r"tar\.gz has the md5 checksum \w{32} in place of 03b5dce"):
        data.check("cifar100", tmp_path)
    trust(monkeypatch, content)
    data.check("cifar100", tmp_path)
    check_images(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["cifar-100-binary.tar.gz"]


def link(name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, target
    return member


MALICIOUS = {
    "parent": archive({"../evil": b"x"}),
    "deep parent": archive({"cifar-100-binary/../../evil": b"x"}),
    "link outside": archive({}, link("cifar-100-binary", "..")),
    "absolute link": archive({}, link("cifar-100-binary/train.bin", "/etc/passwd")),
    "hard link": archive({}, link("cifar-100-binary/train.bin", "../../evil", tarfile.LNKTYPE)),
    "device": archive({}, link("cifar-100-binary/train.bin", "", tarfile.CHRTYPE)),
    "other content": archive({"/evil": b"x", "readme": b"x"}),
    "not an archive": b"x" * 1000,
}


@pytest.mark.parametrize("content", MALICIOUS.values(), ids=MALICIOUS.keys())
def test_malicious_archives_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    """Even if one had the published checksum."""
    where = tmp_path / "data"
    where.mkdir()
    (where / "cifar-100-binary.tar.gz").write_bytes(content)
    trust(monkeypatch, content)
    with pytest.raises(LabError, match=r"cifar-100-binary\.tar\.gz"):
        data.read_cifar100("train", where)
    assert [p.name for p in where.iterdir()] == ["cifar-100-binary.tar.gz"]
    assert [p.name for p in tmp_path.iterdir()] == ["data"]
    assert not Path("/evil").exists()


# --- downloads, from a server on this machine


@dataclass
class Site:
    """What the server does with the next requests, and how many there were."""

    content: bytes = b""
    cut: int | None = None  # close the connection after so many bytes
    status: int = 200
    chunked: bool = False
    asked: int = 0
    url: str = ""

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        self.asked += 1
        if self.status != 200:
            return request.send_error(self.status)
        request.send_response(200)
        if not self.chunked:
            request.send_header("Content-Length", str(len(self.content)))
        request.end_headers()
        request.wfile.write(self.content[: self.cut])


@pytest.fixture
def site() -> Iterator[Site]:
    here = Site()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            here.answer(self)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        here.url = f"http://127.0.0.1:{server.server_port}/cifar-100-binary.tar.gz"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield here
        server.shutdown()
        thread.join()


@pytest.fixture
def official(site: Site, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """The server has the archive that this test calls the published one."""
    site.content = official_archive()
    trust(monkeypatch, site.content, site.url)
    return site.content


@pytest.mark.usefixtures("official")
@pytest.mark.parametrize("chunked", [False, True], ids=["length known", "length unknown"])
def test_download(tmp_path: Path, site: Site, chunked: bool) -> None:
    site.chunked = chunked
    where = tmp_path / "new" / "folder"
    assert data.download("cifar100", where) == where / "cifar-100-binary.tar.gz"
    check_images(where)
    assert [path.name for path in where.iterdir()] == ["cifar-100-binary.tar.gz"]
    data.download("cifar100", where)
    assert site.asked == 1  # nothing is fetched twice


@pytest.mark.usefixtures("official")
@pytest.mark.parametrize("chunked", [False, True], ids=["length known", "length unknown"])
def test_a_broken_transfer_leaves_nothing_to_trust(
    tmp_path: Path, site: Site, chunked: bool
) -> None:
    site.cut, site.chunked = 1000, chunked
    with pytest.raises(LabError, match=r"cannot fetch .*IncompleteRead.* try again|md5 checksum"):
        data.download("cifar100", tmp_path)
    assert not (tmp_path / "cifar-100-binary.tar.gz").exists()
    site.cut = None
    data.download("cifar100", tmp_path)  # what is left of the first is overwritten
    check_images(tmp_path)


@pytest.mark.usefixtures("official")
def test_a_wrong_checksum_removes_the_file(tmp_path: Path, site: Site) -> None:
    site.content += b"!"
    found = hashlib.md5(site.content, usedforsecurity=False).hexdigest()
    with pytest.raises(LabError, match=f"checksum {found} in place of .* by hand"):
        data.download("cifar100", tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("official")
@pytest.mark.parametrize("status", [404, 403, 503])
def test_a_server_that_refuses(tmp_path: Path, site: Site, status: int) -> None:
    site.status = status
    cure = f"fetch {site.url} by hand and put it in {tmp_path} as cifar-100-binary.tar.gz"
    with pytest.raises(LabError, match=f"cannot fetch .*; {cure}"):
        data.download("cifar100", tmp_path)


def test_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trust(monkeypatch, b"", "http://127.0.0.1:9/file")  # port 9, discard: nobody listens
    with pytest.raises(LabError, match=r"cannot fetch .*refused\); fetch .* by hand and put it in"):
        data.download("cifar100", tmp_path)


@pytest.mark.usefixtures("official")
def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(LabError, match=r"cannot write .*\.tar\.gz: the disk is full"):
        data.download("cifar100", tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LabError, match="cannot write"):
        data.download("shakespeare", tmp_path / "file" / "below")


@pytest.mark.parametrize("name", ["cifar10", "", "../cifar100"])
def test_unknown_data_sets(tmp_path: Path, name: str) -> None:
    with pytest.raises(LabError, match=r"unknown data set .* known are cifar100, enwik8, "):
        data.download(name, tmp_path)


# --- texts


@pytest.fixture
def wiki(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(data, "TOKENS", {"train": 9, "valid": 9, "test": 9})
    return " \n = Ōkami = \n \n one <unk> \n"


def test_download_of_shakespeare(
    tmp_path: Path, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.content = b"First Citizen:\nBefore we proceed\n"
    sha = hashlib.sha256(site.content).hexdigest()
    source = replace(data.SOURCES["shakespeare"], url=site.url, checksum=sha)
    monkeypatch.setitem(data.SOURCES, "shakespeare", source)
    with pytest.raises(LabError, match="run `adamo-lab data shakespeare` to download it"):
        data.shakespeare(tmp_path)
    assert data.download("shakespeare", tmp_path) == tmp_path / "tinyshakespeare.txt"
    assert data.shakespeare(tmp_path) == site.content.decode()
    assert data.download("shakespeare", tmp_path) == tmp_path / "tinyshakespeare.txt"
    (tmp_path / "tinyshakespeare.txt").write_text("First Citizen:\r\n")
    for attempt in (data.shakespeare, lambda where: data.download("shakespeare", where)):
        with pytest.raises(LabError, match=r"sha256 checksum .*; delete it or put a new copy"):
            attempt(tmp_path)


def write_zip(path: Path, content: bytes) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for split in ("train", "valid"):
            archive.writestr(f"wikitext-2/wiki.{split}.tokens", content)


WIKITEXT = {
    "wikitext-2.train.txt": Path.write_bytes,
    "wikitext-2.train.txt.gz": lambda path, text: path.write_bytes(gzip.compress(text)),
    "wikitext-2/wiki.train.tokens": Path.write_bytes,
    "wiki.train.tokens": Path.write_bytes,
    "wikitext-2-v1.zip": write_zip,
}


@pytest.mark.parametrize("name", WIKITEXT)
def test_wikitext2_in_every_form(tmp_path: Path, wiki: str, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    WIKITEXT[name](tmp_path / name, wiki.encode())
    words = data.wikitext2("train", tmp_path)
    assert words == ["<eos>", "=", "Ōkami", "=", "<eos>", "<eos>", "one", "<unk>", "<eos>"]
    if not name.endswith("zip"):  # which has all of it
        with pytest.raises(LabError, match=r"put one of these files there: wikitext-2\.valid\.txt"):
            data.download("wikitext2", tmp_path)
        valid = name.replace("train", "valid")
        WIKITEXT[name](tmp_path / valid, wiki.encode())
    assert data.download("wikitext2", tmp_path) == tmp_path / name


BROKEN = {
    "wikitext-2.train.txt": "Ōkami".encode("utf-16"),
    "wikitext-2.train.txt.gz": gzip.compress(b"one\n" * 99)[:-12],
    "wikitext-2-v1.zip": b"PK",
}


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.usefixtures("wiki")
def test_damaged_texts(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(BROKEN[name])
    with pytest.raises(LabError, match=f"cannot read .*{name} .*put a new copy there"):
        data.wikitext2("train", tmp_path)


@pytest.mark.usefixtures("wiki")
def test_a_zip_without_the_text(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "wikitext-2-v1.zip", "w") as archive:
        archive.writestr("other", "")
    with pytest.raises(
        LabError, match=r"no item named 'wikitext-2/wiki\.train\.tokens' in the archive"
    ):
        data.wikitext2("train", tmp_path)


def test_another_wikitext(tmp_path: Path, wiki: str) -> None:
    (tmp_path / "wiki.valid.tokens").write_text(wiki + "more\n", encoding="utf-8")
    with pytest.raises(LabError, match=r"has 11 tokens, WikiText-2's valid text has 9"):
        data.wikitext2("valid", tmp_path)


@pytest.mark.parametrize("ask", [data.download, lambda _, where: data.wikitext2("train", where)])
def test_wikitext2_cannot_be_downloaded(tmp_path: Path, ask: Callable[..., object]) -> None:
    with pytest.raises(LabError, match=r"no official download .*wikitext-2\.train\.txt\.gz"):
        ask("wikitext2", tmp_path)


# --- the real data


@contextlib.contextmanager
def real_or_skip() -> Iterator[None]:
    try:
        yield
    except LabError as error:
        if " is not in " in str(error):
            pytest.skip(f"no real data: {error}")
        raise


def test_the_real_texts() -> None:
    with real_or_skip():
        assert len(data.shakespeare(REAL)) == 1_115_394
        train = data.wikitext2("train", REAL)
    assert len(set(train)) == data.VOCABULARY
    for split in ("valid", "test"):
        assert set(data.wikitext2(split, REAL)) <= set(train)


@pytest.mark.slow
def test_the_real_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "IMAGES", {"train": 50_000, "test": 10_000})
    where = REAL
    if (REAL / "cifar100" / "labels.npz").exists():
        where = tmp_path
        command = [sys.executable, str(REAL / "unpack_cifar100"), str(where)]
        subprocess.run(command, check=True, capture_output=True)
    with real_or_skip():
        data.check("cifar100", where)
    for split, each in (("train", 500), ("test", 100)):
        images, labels = data.read_cifar100(split, where)
        assert images.shape == (each * 100, 32, 32, 3)
        assert set(np.bincount(labels, minlength=100)) == {each}
        if split == "train":
            pixels = images.reshape(-1, 3)
            mean = pixels.mean(0, dtype=np.float64) / 255
            deviation = pixels.std(0, dtype=np.float64) / 255
            np.testing.assert_allclose(mean, (0.5071, 0.4865, 0.4409), atol=1e-4)
            np.testing.assert_allclose(deviation, (0.2673, 0.2564, 0.2762), atol=1e-4)
