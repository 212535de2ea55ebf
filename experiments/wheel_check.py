"""Wheel and sdist as a user gets them: built, looked into, each installed into a fresh environment, and run.

    make wheel-check        # or: python experiments/wheel_check.py [--keep FOLDER]
    make release            # the same, and what is to be uploaded stays in dist

Needs the packages `build` and `twine`, and an index that pip can reach: all dependencies are installed anew.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ASSETS = (
    "fcljax/assets/vit_micro.safetensors",
    "fcljax/assets/vit_micro_decoder.safetensors",
    "fcljax/assets/archives.tsv",
    "fcljax/assets/papers/fppl.yaml",
    "fcljax/assets/report/page.css",
    "fcljax/assets/report/page.html",
    "fcljax/assets/report/page.js",
)
TINY = ["--tasks", "2", "--clients", "2", "--rounds", "1", "--epochs", "1", "--image-size", "8"]


def main() -> None:
    """Build, look, install and run; ends with an error at the first thing that is not as it should be."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--keep", help="folder for the files and environments; default: one that is removed")
    parser.add_argument("--release", help="folder for wheel and sdist, an empty one; the demo is run too")
    given = parser.parse_args()
    release = Path(given.release).resolve() if given.release else None
    if release and release.exists() and any(release.iterdir()):
        raise SystemExit(f"{release} has files of before: only what was just checked may be uploaded")
    if given.keep:
        checked(Path(given.keep).resolve(), release)
        return
    with tempfile.TemporaryDirectory(prefix="fcljax-wheel-") as folder:
        checked(Path(folder), release)


def checked(folder: Path, release: Path | None) -> None:
    """All checks, with files below `folder`; what passes is copied to `release`."""
    called(sys.executable, "-m", "build", "--outdir", folder / "dist", ROOT)
    (wheel,) = (folder / "dist").glob("*.whl")
    (sdist,) = (folder / "dist").glob("*.tar.gz")
    names = zipfile.ZipFile(wheel).namelist()
    looked_into(names)
    print(
        f"{wheel.name}: {wheel.stat().st_size:,} bytes, {len(names)} files; {sdist.name}: "
        f"{sdist.stat().st_size:,} bytes"
    )
    called(sys.executable, "-m", "twine", "check", "--strict", wheel, sdist)
    for package in (wheel, sdist):
        place = folder / f"from-{'wheel' if package is wheel else 'sdist'}"
        installed(package, place)
        print(f"{package.name}: installed, and runs")
    if release:
        demo(folder / "from-wheel")
        release.mkdir(parents=True, exist_ok=True)
        for package in (wheel, sdist):
            shutil.copy(package, release)
        print(f"ready to be uploaded: {release}")


def demo(folder: Path) -> None:
    """`make demo` with the installed wheel: two methods, and what compares them."""
    program = folder / "env/bin/fcljax"
    for method in ("fppl", "fedavg"):
        called(program, "run", method, "--out", f"demo/{method}", where=folder)
    called(program, "compare", "demo/fppl", "demo/fedavg", where=folder)
    if not (folder / "demo" / "report.html").is_file():
        raise SystemExit("the demo left no page")


def looked_into(names: list[str]) -> None:
    """What a wheel must hold, and what it must not."""
    missing = [name for name in (*ASSETS, "fcljax/py.typed", "fcljax/cli.py") if name not in names]
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "fcljax").rglob("*.py")}
    missing += sorted(modules - set(names))
    stray = [
        name for name in names if name.partition("/")[0] not in ("fcljax",) and ".dist-info/" not in name
    ]
    if missing or stray:
        raise SystemExit(f"the wheel lacks {missing} and should not have {stray}")


def installed(package: Path, folder: Path) -> None:
    """Install a file into a fresh environment, and run the program from a folder outside the checkout."""
    called(sys.executable, "-m", "venv", folder / "env")
    python = folder / "env/bin/python"
    program = folder / "env/bin/fcljax"
    called(python, "-m", "pip", "install", "--quiet", package)
    called(program, "doctor", where=folder)
    called(program, "run", "linear", *TINY, "--out", "run", where=folder)
    if not (folder / "run" / "summary.json").is_file():
        raise SystemExit("the run left no summary")
    called(program, "completion", "bash", where=folder, quiet=True)


def called(*command: object, where: Path = ROOT, quiet: bool = False) -> None:
    """Run a command without this process's PYTHONPATH; an error ends the check."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    out = subprocess.DEVNULL if quiet else None
    subprocess.run([str(part) for part in command], check=True, cwd=where, env=environment, stdout=out)


if __name__ == "__main__":
    main()
