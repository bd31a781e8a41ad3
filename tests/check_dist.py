"""What `make dist` built, as somebody meets it who has nothing else: an empty environment outside the repository.

    python tests/check_dist.py dist

The wheel is installed with its dependencies as they are locked, trains on the digits, and passes the tests of the
source distribution that need no other package.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTS = ("tests/losses", "tests/cli/test_completion.py", "tests/test_config.py", "tests/evaluation")
NEEDED = ("pytest", "hypothesis", "pytest-xdist")


def run(*words: str | Path, cwd: Path) -> str:
    sys.stdout.write("+ " + " ".join(map(str, words)) + "\n")
    sys.stdout.flush()
    done = subprocess.run([str(word) for word in words], cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}\nfailed with {done.returncode}")
    return done.stdout


def main() -> None:
    built = Path(sys.argv[1]).resolve()
    (wheel,), (source,) = built.glob("*.whl"), built.glob("*.tar.gz")
    place = Path(tempfile.mkdtemp(prefix="selfcon-dist-"))
    try:
        run(sys.executable, "-m", "venv", place / "env", cwd=place)
        python = place / "env" / "bin" / "python"
        quiet = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check")
        lines = (ROOT / "requirements.lock").read_text(encoding="utf-8").splitlines()
        locked = [line.rstrip(" \\") for line in lines if "==" in line]  # with what each is for: ; python_version ...
        (place / "constraints.txt").write_text("\n".join(locked) + "\n")
        run(python, *quiet, "--constraint", place / "constraints.txt", wheel, *NEEDED, cwd=place)
        said = run(place / "env" / "bin" / "selfcon", "--version", cwd=place).strip()
        assert said in wheel.name, (said, wheel.name)
        small = ("--epochs", "2", "--probe.epochs", "2", "--width", "0.25", "--out", "run")
        sys.stdout.write(run(place / "env" / "bin" / "selfcon", "fit", *small, cwd=place))
        assert (place / "run" / "report.html").is_file()
        with tarfile.open(source) as archive:
            archive.extractall(place / "source", filter="data")
        (unpacked,) = (place / "source").iterdir()
        shutil.rmtree(unpacked / "src")  # what is tested is what was installed
        found = run(
            python, "-m", "pytest", "-q", "-n", "2", "-m", "not slow", "-p", "no:cacheprovider", *TESTS, cwd=unpacked
        )
        sys.stdout.write(found[-300:])
    finally:
        shutil.rmtree(place)
    sys.stdout.write(f"{wheel.name} and {source.name} are good\n")


if __name__ == "__main__":
    main()
