"""The demo, with a toy model."""

import os
import re
import subprocess
import sys
from pathlib import Path

DEMO = Path(__file__).parents[1] / "examples" / "demo" / "demo.py"


def test_the_small_demo_ends_with_no_wrong_bit(tmp_path: Path) -> None:
    command = [sys.executable, str(DEMO), str(tmp_path / "demo"), "--small", "--steps", "8"]
    command += ["--kill-at", "3", "--join-at", "5", "--revert-to", "2"]
    environment = {**os.environ, "HOME": str(tmp_path)}
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    assert done.returncode == 0, done.stdout

    rows = re.findall(r"^([0-9a-f]{12}) +(\d+) .*? (\d+\.\d\d) +(\d+\.\d\d|-)(   revert .*)?$", done.stdout, re.M)
    assert [int(step) for _, step, *_ in rows] == [*range(9), 2]
    assert [b == "-" for *_, b, _ in rows[:5]] == [True] * 5
    assert rows[-1][3] != "-"
    assert f"revert to {rows[2][0]}" in rows[-1][4]

    # The kill came between the versions before and after it.
    kill = re.search(
        r"^-- SIGKILL for A, \d+ % through step 3: its directory still is step 2, wrong bits 0", done.stdout, re.M
    )
    assert kill is not None
    assert done.stdout.index(rows[2][0]) < kill.start() < done.stdout.index(rows[3][0])

    *_, moved, split, look, advice = done.stdout.splitlines()
    assert re.match(r"moved .* where full checkpoints are .*; wrong bits 0$", moved)
    assert re.match(r"of that \d.* are the base: .*; \d.* are patches and all the rest$", split)
    assert done.stdout.count("-- B joins late") == 1
    command = look.removeprefix("look at it: ").split()
    log = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=Path.cwd(), env=environment, check=True)
    assert log.stdout.count("\n") == 10
    assert advice == "try yours: weightvc diff ckpt_a/ ckpt_b/ --stat"
    assert not (tmp_path / "demo" / "truth").exists()


def test_the_demo_counts_wrong_bits(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from follower import wrong_bits; "
        "print(wrong_bits(*map(Path, sys.argv[1:])))"
    )

    def wrong(a: bytes, b: bytes) -> int:
        paths = [tmp_path / "a", tmp_path / "b"]
        for path, data in zip(paths, (a, b)):
            path.write_bytes(data)
        done = subprocess.run(
            [sys.executable, "-c", code, *paths], cwd=DEMO.parent, capture_output=True, text=True, check=True
        )
        return int(done.stdout)

    assert wrong(b"same", b"same") == 0
    assert wrong(b"\x00\x00", b"\x80\x03") == 3
    assert wrong(b"same", b"same and more") == 8 * 13
