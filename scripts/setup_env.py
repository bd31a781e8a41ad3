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
DISK_GB = 8.0  # the environment takes about 7 GB

# A pattern in the output of uv or pip, and the sentence for the user. The first match counts.
FAILURES = (
    (
        r"(?i)hash mismatch|do not match the hashes|must have a hash|pinned with ==",
        "{lock} has a wrong or missing hash for a package. Run `git checkout {lock}`.",
    ),
    (r"(?i)no space left|os error 28\b", "The disk is full. Free about {disk:.0f} GB and run make setup again."),
    (
        r"(?i)connect|proxy|tunnel|\bdns\b|error sending request|failed to fetch|timed out",
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
    lines = []  # type: list[str]
    failed = []  # type: list[str]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, universal_newlines=True, errors="replace"
    ) as process:
        for line in process.stdout or ():
            lines.append(line)
            if failed or re.match(r"\s*(\u00d7|error:|ERROR:)", line):
                failed.append(line)
            elif not re.match(r" [+~-] |\s*(WARNING|warning|Looking in|Requirement already)", line):
                print("  " + line.strip(), flush=True)
    if process.returncode == 0:
        return
    for pattern, sentence in FAILURES:
        if re.search(pattern, "".join(lines)):
            proxy = os.environ.get("HTTPS_PROXY") or os.environ.get("https_proxy") or os.environ.get("ALL_PROXY")
            through = " through the proxy that HTTPS_PROXY names" if proxy else ""
            raise SetupError(sentence.format(lock=lock, disk=DISK_GB, proxy=through))
    raise InstallError("".join(failed) + f"{words[0]} failed with exit code {process.returncode}.")


def works(venv: Path) -> bool:
    """Return whether the environment runs this version of Python."""
    probe = f"import sys; print(sys.version_info[:3] == {tuple(sys.version_info[:3])})"
    try:
        return subprocess.check_output([str(venv / "bin" / "python"), "-c", probe], universal_newlines=True) == "True\n"
    except (OSError, subprocess.CalledProcessError):
        return False


def find_uv(venv: Path) -> str:
    """Return the path of a uv that runs, the environment's own first, or an empty string."""
    for candidate in (str(venv / "bin" / "uv"), shutil.which("uv")):
        try:
            if candidate and subprocess.check_output([candidate, "--version"], stderr=subprocess.STDOUT):
                return candidate
        except (OSError, subprocess.CalledProcessError):
            continue
    return ""


def create_venv(venv: Path) -> None:
    """Create an empty environment, with uv if it is installed, otherwise with venv and pip."""
    shutil.rmtree(str(venv), ignore_errors=True)
    uv = find_uv(venv)
    command = [uv, "venv", "--quiet", "--python"] if uv else []
    command += [sys.executable] if uv else [sys.executable, "-m", "venv"]
    try:
        subprocess.check_output([*command, str(venv)], stderr=subprocess.STDOUT)
    except subprocess.CalledProcessError:
        raise SetupError(
            f"Neither uv nor pip is available for {sys.executable}. "
            "Install one, for example with `apt install python3-venv`."
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
    parser.add_argument("--venv", type=Path, default=Path(".venv"), help="directory of the environment")
    parser.add_argument("--lock", default="requirements.lock", help="lock file to install")
    parser.add_argument("--ready", default=".ready", help="name of the file that marks the environment as complete")
    options = parser.parse_args()
    ready = options.venv / options.ready
    start = time.time()
    try:
        check_python()
        if ready.exists():
            ready.unlink()
        if works(options.venv):
            print(f"Installing {options.lock} into {options.venv} ...", flush=True)
        else:
            check_disk(options.venv.resolve().parent)
            print("Creating {} with Python {} (7 GB) ...".format(options.venv, sys.version.split()[0]), flush=True)
            create_venv(options.venv)
        install(options.venv, options.lock)
    except (SetupError, InstallError) as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit(130)
    ready.touch()
    print(f"{options.venv} is ready after {time.time() - start:.0f} s.")


if __name__ == "__main__":
    main()
