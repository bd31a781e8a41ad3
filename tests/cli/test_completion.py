"""Completion as a shell does it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.cli.calling import call


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes_verbs_options_and_names(tmp_path: Path) -> None:
    done = call("completion", "bash", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (tmp_path / "selfcon.bash").write_text(done.stdout)
    for words, expected in (
        ("selfcon cal", {"calibrate"}),
        ("selfcon analyze inf", {"information"}),
        ("selfcon fit --val", {"--val-fraction"}),
        ("selfcon fit --method selfcon-m", {"selfcon-m", "selfcon-m-star", "selfcon-mu", "selfcon-mu-star"}),
        ("selfcon fit --recipe cifar100-resnet18-supcon", {"cifar100-resnet18-supcon", "cifar100-resnet18-supcon-s"}),
    ):
        script = (
            f"source selfcon.bash; COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); "
            'COMPREPLY=(); _shtab_selfcon; printf "%s\\n" "${COMPREPLY[@]}"'
        )
        found = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
        assert {word.strip() for word in found.stdout.split("\n") if word.strip()} == expected, words


def test_other_shells(tmp_path: Path) -> None:
    assert "#compdef selfcon" in call("completion", "zsh", cwd=tmp_path).stdout
    assert call("completion", "dos", cwd=tmp_path).returncode == 64
