#!/usr/bin/env python3
"""Create .venv from the hashed lock file, with uv if possible and with pip otherwise.

`make setup` and `make test-slow` run it. It needs Python alone. Its syntax is that of Python 3.6, so that an older
Python gets a clear message too.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MIN_PYTHON = (3, 11)
VENV = Path(".venv")
DISK_GB = 8.0  # the environment takes about 7 GB

# A pattern in the errors of uv or pip, and the sentence for the user. The first match counts.
FAILURES = (
    (
        r"(?i)hash mismatch|do not match the hashes|must have a hash|pinned with ==",
        "{package} does not match its hash in {lock}. Run `git checkout {lock}`, and check your package index.",
    ),
    (r"(?i)no space left|os error 28\b", "The disk is full. Free about {disk:.0f} GB and run make setup again."),
    (
        r"(?i)(tcp|tunnel|proxy|connection) \w*|\bdns\b|error sending request|failed to fetch|timed out",
        "Packages cannot be downloaded{proxy}. Check the connection and run make setup again.",
    ),
)


class SetupError(Exception):
    """A problem that the user can fix, in one sentence."""


class InstallError(Exception):
    """An installer failed for an unknown reason."""


def check_python() -> None:
    """Raise if this Python is too old."""
    if sys.version_info < MIN_PYTHON:
        raise SetupError(
            "selfcon needs Python {}.{} or newer, but {} is {}. Try `make setup PYTHON=python3.12`.".format(
                *MIN_PYTHON, os.path.basename(sys.executable), sys.version.split()[0]
            )
        )


def check_disk(path: Path) -> None:
    """Raise if the disk has too little space for the packages."""
    free = shutil.disk_usage(str(path)).free / 1e9
    if free < DISK_GB:
        raise SetupError(
            f"The environment needs about {DISK_GB:.0f} GB, but {path} has {free:.1f} GB free. Free some space first."
        )


def run(command: "list[object]", lock: str) -> None:
    """Run an installer and show its progress; turn a known failure into one sentence."""
    words = [str(word) for word in command]
    errors = []  # type: list[str]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, universal_newlines=True, errors="replace"
    ) as process:
        for line in process.stdout or ():
            if errors or re.match(r"\s*(\u00d7|error:|ERROR:)", line):
                errors.append(line)
            elif not re.match(r" [+~-] |\s*(WARNING|warning|Looking in|Requirement already)", line):
                print("  " + line.strip(), flush=True)
    if process.returncode == 0:
        return
    output = "".join(errors)
    proxy = os.environ.get("HTTPS_PROXY") or os.environ.get("https_proxy") or os.environ.get("ALL_PROXY")
    through = " through the proxy that HTTPS_PROXY names" if proxy else ""
    package = re.search(r"`?([\w.-]+==[\w.]+)", output)
    for pattern, sentence in FAILURES:
        if re.search(pattern, output):
            name = package.group(1) if package else "A package"
            raise SetupError(sentence.format(lock=lock, disk=DISK_GB, proxy=through, package=name))
    raise InstallError(output + f"{words[0]} failed with exit code {process.returncode}.")


def works(venv: Path) -> bool:
    """Return whether the environment has a supported Python and an installer."""
    python = str(venv / "bin" / "python")
    probe = f"import sys; print(sys.version_info >= {MIN_PYTHON})"
    try:
        if subprocess.check_output([python, "-c", probe], universal_newlines=True) != "True\n":
            return False
        if not find_uv(venv):
            subprocess.check_output([python, "-m", "pip", "--version"], stderr=subprocess.STDOUT)
    except (OSError, subprocess.CalledProcessError):
        return False
    return True


def find_uv(venv: Path) -> str:
    """Return the path of a uv that runs, the environment's own first, or an empty string."""
    for candidate in (str(venv / "bin" / "uv"), shutil.which("uv")):
        try:
            if candidate and subprocess.check_output([candidate, "--version"], stderr=subprocess.STDOUT):
                return candidate
        except (OSError, subprocess.CalledProcessError):
            continue
    return ""


def create_venv() -> None:
    """Create an empty environment, with uv if it is installed, otherwise with venv and pip."""
    shutil.rmtree(str(VENV), ignore_errors=True)
    uv = find_uv(VENV)
    command = [uv, "venv", "--quiet", "--python"] if uv else []
    command += [sys.executable] if uv else [sys.executable, "-m", "venv"]
    try:
        subprocess.check_output([*command, str(VENV)], stderr=subprocess.STDOUT, universal_newlines=True)
    except (OSError, subprocess.CalledProcessError) as error:
        shutil.rmtree(str(VENV), ignore_errors=True)
        print(getattr(error, "output", error), file=sys.stderr)
        raise SetupError(
            f"{sys.executable} cannot create an environment. Install uv, or pip and venv, "
            "for example with `apt install python3-venv`."
        ) from None


def read_pin(lock: str, package: str) -> str:
    """Return the lines of the lock file that pin one package and its hashes."""
    pin = re.search(rf"^{package}==(.*\\\n)*.*\n", Path(lock).read_text(encoding="utf-8"), flags=re.MULTILINE)
    if pin is None:
        raise SetupError(f"{lock} does not pin {package}. Run `git checkout {lock}`.")
    return pin.group()


def install_uv(venv: Path, lock: str) -> None:
    """Install the pinned uv with pip."""
    with tempfile.TemporaryDirectory() as folder:
        pin = Path(folder, "uv.txt")
        pin.write_text(read_pin(lock, "uv"), encoding="utf-8")
        pip = [venv / "bin" / "python", "-m", "pip", "--quiet", "--disable-pip-version-check"]
        run([*pip, "install", "--require-hashes", "--requirement", pin], lock)


def install(venv: Path, lock: str) -> None:
    """Install the packages of the lock file, and selfcon itself from this directory."""
    python = venv / "bin" / "python"
    if not find_uv(venv):
        try:
            install_uv(venv, lock)
        except InstallError:
            print("  uv cannot be installed. Using pip, which takes some minutes longer.", flush=True)
    uv = find_uv(venv)
    installer = [uv, "pip", "install", "--python", python] if uv else [python, "-m", "pip", "install"]
    run([*installer, *(["--compile-bytecode"] if uv else []), "--require-hashes", "--requirement", lock], lock)
    run([*installer, "--quiet", "--no-deps", "--no-build-isolation", "--editable", "."], lock)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Create .venv from the hashed lock file.")
    parser.add_argument("--lock", default="requirements.lock", help="lock file to install")
    parser.add_argument("--ready", default=".ready", help="name of the file that marks the environment as complete")
    options = parser.parse_args()
    ready = VENV / options.ready
    start = time.time()
    try:
        check_python()
        if ready.exists():
            ready.unlink()
        if works(VENV):
            print(f"Installing {options.lock} into {VENV} ...", flush=True)
        else:
            check_disk(Path.cwd())
            print("Creating {} with Python {} (7 GB) ...".format(VENV, sys.version.split()[0]), flush=True)
            create_venv()
        install(VENV, options.lock)
    except (SetupError, InstallError) as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit(130)
    ready.touch()
    print(f"{VENV} is ready after {time.time() - start:.0f} s.")


if __name__ == "__main__":
    main()
