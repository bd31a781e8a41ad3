"""How much memory there is under the limits of containers and jobs."""

from __future__ import annotations

from pathlib import Path

import pytest

from selfcon import memory


@pytest.mark.parametrize("version", [1, 2])
def test_limits_of_all_groups_above_count(version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit, used, files = {
        1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        2: ("memory.max", "memory.current", "inactive_file"),
    }[version]
    top = tmp_path / "memory" if version == 1 else tmp_path

    def write(group: Path, most: str, taken: int, cached: int) -> None:
        group.mkdir(parents=True, exist_ok=True)
        for name, text in ((limit, most), (used, str(taken)), ("memory.stat", f"anon 1\n{files} {cached}\n")):
            (group / name).write_text(text + "\n")

    write(top / "slurm" / "job", "1000000", 900_000, 300_000)
    write(top / "slurm", "5000000", 100_000, 0)
    write(top, "max", 0, 0)
    own = tmp_path / "own"
    own.write_text("7:cpu,cpuacct:/elsewhere\n" + ("3:memory" if version == 1 else "0:") + ":/slurm/job/step\n")
    monkeypatch.setattr(memory, "_ROOT", tmp_path)
    monkeypatch.setattr(memory, "_OWN_GROUPS", own)
    assert memory.free_memory() == 400_000
    own.write_text("0::/nowhere\n")
    assert memory.free_memory() > 400_000
