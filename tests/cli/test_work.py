import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tests.cli.conftest import Shell, checkpoint, weights

Follow = Callable[[str, int], None]


def test_init_commit_checkout(shell: Shell) -> None:
    place = shell.cwd / "repo"
    assert shell.out("init", place) == f"made an empty repository at {place}\n"
    shell.fails(4, "init", place)
    path = checkpoint(shell.cwd / "x.safetensors", **weights(1))
    line = shell.out("commit", "-r", place, path, "-m", "hello")
    assert line.startswith("[main ")
    assert "] hello  (base " in line
    checkpoint(path, **weights(2))
    line = shell.out("-r", place, "commit", path, "-m", "again\nmore")
    assert "] again  (patch " in line
    assert "% changed" in line
    shell.run("checkout", "-r", place, "HEAD", "out")
    assert (shell.cwd / "out/model.safetensors").read_bytes() == path.read_bytes()
    shell.run("checkout", "-r", place, "HEAD", "one.safetensors")
    assert (shell.cwd / "one.safetensors").read_bytes() == path.read_bytes()


def test_commit_json(shell: Shell) -> None:
    assert shell.json("init", "repo", "-b", "trunk") == {"url": str(shell.cwd / "repo"), "default": "trunk"}
    path = checkpoint(shell.cwd / "x.safetensors", **weights(0))
    args = ["-r", "repo", "commit", path, "--step", "7", "--run", "r1", "--meta", "lr=1e-5", "--meta", "note=a=b"]
    first = shell.json(*args, "--meta", "shape=[1, 2]", "--meta", "loss=NaN")
    assert first["branch"] == "trunk"
    assert first["parents"] == []
    assert first["elements"] == first["changed"] == 68
    checkpoint(path, **weights(1))
    second = shell.json("-r", "repo", "commit", path)
    assert second["parents"] == [first["id"]]
    assert (second["changed"], second["density"]) == (1, 1 / 68)
    assert second["bytes"] > 0
    assert second["seconds"] > 0
    shown = shell.json("-r", "repo", "show", "trunk@{step=7,run=r1}")
    assert shown["id"] == first["id"]
    assert shown["metadata"] == {"lr": 1e-5, "note": "a=b", "shape": [1, 2], "loss": "NaN"}


def test_bad_options_write_nothing(shell: Shell, history: dict[str, str]) -> None:
    for args in (
        ["--meta", "x"],
        ["--meta", "x=1", "--meta", "x=2"],
        ["--step", "-1"],
        ["--step", "1.5"],
        ["--detach", "-b", "main"],
        ["--rebase", "--expect", "main"],
    ):
        shell.fails(2, "commit", "1.safetensors", *args)
    shell.fails(8, "commit", "1.safetensors", "--dtype", "int3")
    shell.fails(8, "commit", "1.safetensors", "--codec", "zip")
    shell.fails(8, "commit", "1.safetensors", "--name", "../x.safetensors")
    shell.fails(3, "commit", "1.safetensors", "--parent", "nothing")
    shell.fails(2, "-r", "", "log")
    assert len(shell.json("reflog")) == 3


def test_name_dtype_exclude_and_base(shell: Shell, history: dict[str, str]) -> None:
    shell.run("commit", "1.safetensors", "--name", "policy.safetensors")
    assert shell.json("ls", "--files")[0]["path"] == "policy.safetensors"
    shell.run("commit", "1.safetensors", "--dtype", "fp32", "--base")
    assert {t["dtype"] for t in shell.json("ls")} == {"F32"}
    assert None in [edge["from"] for edge in shell.json("show")["edges"]]
    folder = shell.cwd / "folder"
    checkpoint(folder / "model.safetensors", **weights(1))
    (folder / "config.json").write_text("{}")
    (folder / "optimizer.bin").write_bytes(b"x")
    shell.run("commit", folder, "--exclude", "*.bin", "--exclude", "*.pt")
    assert [file["path"] for file in shell.json("ls", "--files")] == ["config.json", "model.safetensors"]


def test_detached_commit_is_on_no_branch(shell: Shell, history: dict[str, str]) -> None:
    made = shell.json("commit", "1.safetensors", "--detach", "--parent", "exp", "-m", "side")
    assert made["branch"] is None
    assert made["parents"] == [history["exp1"]]
    assert [branch["id"] for branch in shell.json("branch")] == [history["exp1"], history["merge"]]
    assert shell.json("show", made["id"][:12])["message"] == "side"


def test_a_repository_is_found_upwards(shell: Shell, history: dict[str, str]) -> None:
    deep = shell.cwd / "a" / "b"
    deep.mkdir(parents=True)
    assert shell.json("show", cwd=deep)["id"] == history["merge"]
    # A checkout elsewhere says where it came from.
    away = shell.cwd.parent / "away"
    shell.run("checkout", "main", away)
    (away / "deep").mkdir()
    assert shell.json("show", cwd=away / "deep")["id"] == history["merge"]
    assert shell.json("status", cwd=away / "deep")["version"] == history["merge"]
    assert shell.json("status", away, cwd=shell.cwd.parent)["version"] == history["merge"]


def test_which_repository_is_named(shell: Shell, history: dict[str, str]) -> None:
    for name in ("one", "two"):
        shell.run("init", name, "-b", name)
        shell.run("-r", name, "commit", "0.safetensors", "-m", name)
    env = {"WEIGHTVC_REPO": str(shell.cwd / "one")}
    assert shell.json("show", env=env)["message"] == "one"
    assert shell.json("-r", "two", "show", env=env)["message"] == "two"
    assert shell.json("show", "-r", "two", env=env)["message"] == "two"
    assert shell.json("show", "--repo", "two")["message"] == "two"
    assert shell.json("show", env={"WEIGHTVC_REPO": ""})["id"] == history["merge"]
    assert shell.json("init", env={"WEIGHTVC_REPO": str(shell.cwd / "three")})["url"] == str(shell.cwd / "three")


def test_no_repository(shell: Shell) -> None:
    assert "weightvc init" in shell.fails(3, "log")
    assert "weightvc init" in shell.fails(3, "log", "-r", "nowhere")
    (shell.cwd / ".weightvc").write_text("{}")
    assert ".weightvc" in shell.fails(8, "log")


def test_pull_uses_what_the_directory_holds(shell: Shell, history: dict[str, str]) -> None:
    shell.run("checkout", "main~1", "out")
    done = shell.run("pull", "main", "--into", "out", "--stats", "--json", "--no-cache")
    assert json.loads(done.stdout)["id"] == history["merge"]
    stats = json.loads(done.stderr)["stats"]
    entry = shell.json("show", "main")
    assert stats["writes"] == 0
    # The root (twice), the schema, the layout, and the manifests of both versions; not the base's.
    assert stats["reads"] <= 6
    assert entry["edges"][0]["from"] == history["main1"]
    assert (shell.cwd / "out/model.safetensors").read_bytes() == (shell.cwd / "3.safetensors").read_bytes()
    shell.fails(2, "pull", "main")


WATCHED = """
import sys
from weightvc.protocol import pins
from weightvc.repository import Repository
from weightvc_cli.main import main

real = Repository.checkout

def checkout(self, *given, **options):
    for pin in pins.read(self.store, 0).held:
        print(*pin.versions, round(pin.until - next(self.store.list(pin.name)).modified))
    return real(self, *given, **options)

Repository.checkout = checkout
main()
"""


def test_a_lease_is_held_while_a_version_is_written(shell: Shell, history: dict[str, str]) -> None:
    def held(*args: str) -> list[str]:
        done = subprocess.run(
            [sys.executable, "-c", WATCHED, *args],
            cwd=shell.cwd, env=shell.env, capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert not list((shell.cwd / ".weightvc").glob("pin/*"))
        return done.stdout.splitlines()[:-1]

    assert held("checkout", "main~1", "out") == []
    assert held("checkout", "main~1", "out", "--lease", "90s") == [f"{history['main1']} 90"]
    assert held("pull", "main", "--into", "out", "--lease", "1h") == [f"{history['merge']} 3600"]
    assert shell.json("status", "out")["branch"] == "main"
    assert shell.json("verify", "out")["ok"]
    assert "604800" in shell.fails(8, "pull", "main", "--into", "out", "--lease", "8d")
    shell.fails(2, "pull", "main", "--into", "out", "--lease", "soon")
    # It cannot be had: nothing is written without it.
    (shell.cwd / ".weightvc" / "pin").rmdir()
    (shell.cwd / ".weightvc" / "pin").write_text("in the way")
    assert "pin/" in shell.fails(8, "checkout", "main", "new", "--lease", "1h")
    assert not (shell.cwd / "new").exists()


def test_files_that_no_checkout_put_there_are_named(shell: Shell, history: dict[str, str]) -> None:
    (shell.cwd / "out").mkdir()
    (shell.cwd / "out/mine.txt").write_text("mine")
    assert "mine.txt" in shell.fails(8, "checkout", "main", "out")
    assert os.listdir(shell.cwd / "out") == ["mine.txt"]
    shell.run("checkout", "main", "out", "--force")
    assert (shell.cwd / "out/mine.txt").read_text() == "mine"
    assert shell.json("status", "out")["foreign"] == ["mine.txt"]
    assert "move them away" in shell.run("verify", "out", code=7).stderr


def test_modes_follow_umask_then_the_files(shell: Shell, history: dict[str, str]) -> None:
    shell.run("checkout", "main~1", "out", umask=0o002)
    file = shell.cwd / "out/model.safetensors"
    assert file.stat().st_mode & 0o777 == 0o664
    assert (shell.cwd / "out").stat().st_mode & 0o777 == 0o775
    file.chmod(0o640)
    shell.run("pull", "main", "--into", "out", umask=0o002)
    assert file.stat().st_mode & 0o777 == 0o640
    shell.run("init", "shared", umask=0o002)
    modes = {path.stat().st_mode & 0o777 for path in (shell.cwd / "shared").rglob("*") if path.is_file()}
    assert modes == {0o664}


def test_status_and_verify(shell: Shell, history: dict[str, str], follow: Follow) -> None:
    shell.run("checkout", "main", "out")
    assert shell.out("verify", "out") == f"out is version {history['merge'][:12]}, bit for bit\n"
    assert shell.json("status", "out") == {
        "version": history["merge"],
        "branch": "main",
        "head": history["merge"],
        "behind": 0,
        "changed": [],
        "missing": [],
        "foreign": [],
        "clean": True,
    }
    newest = shell.commit(4)
    follow("out", 9)
    status = shell.json("status", "out")
    assert (status["head"], status["behind"], status["changed"]) == (newest, 1, ["model.safetensors"])
    assert not status["clean"]
    assert "branch main, 1 behind\nchanged: model.safetensors\n" in shell.out("status", "out")
    done = shell.run("verify", "out", code=7)
    assert done.stdout == "tensor: w\n"
    assert done.stderr.startswith("weightvc: out is not version ")
    done = shell.run("verify", "out", "--json", code=7)
    found = json.loads(done.stdout)
    assert (found["ok"], found["tensors"], found["files"]) == (False, ["w"], [])
    assert json.loads(done.stderr)["exit_code"] == 7
    assert shell.json("verify", "2.safetensors", "v1")["ok"]
    shell.fails(8, "verify", "2.safetensors")
    shell.fails(3, "verify", "nothing", "main")
    assert "does not exist" in shell.fails(3, "status", "nothing")
    assert "`weightvc log`" in shell.fails(8, "status")
    assert "`weightvc log`" in shell.fails(8, "status", ".weightvc")
    (shell.cwd / "empty").mkdir()
    assert "holds" in shell.fails(8, "status", "empty")


def test_a_checkout_follows_its_branch(shell: Shell, history: dict[str, str], follow: Follow) -> None:
    shell.run("checkout", "main", "out")
    follow("out", 5)
    first = shell.json("commit", "out")
    assert first["parents"] == [history["merge"]]
    assert shell.json("status", "out")["version"] == first["id"]
    assert shell.json("status", "out")["clean"]
    follow("out", 6)
    second = shell.json("commit", "out")
    assert second["parents"] == [first["id"]]
    shell.run("pull", "main~1", "--into", "out")
    assert (shell.cwd / "out/model.safetensors").read_bytes() == (
        checkpoint(shell.cwd / "five", **weights(5)).read_bytes()
    )


def test_a_moved_branch_is_a_conflict(shell: Shell, history: dict[str, str], follow: Follow) -> None:
    shell.run("checkout", "main", "out")
    newest = shell.commit(4)
    follow("out", 5)
    assert "moved" in shell.fails(4, "commit", "out")
    assert shell.json("branch")[1]["id"] == newest
    # Another branch is not the one that the directory follows.
    assert shell.json("commit", "out", "-b", "exp")["parents"] == [history["exp1"]]
    shell.fails(4, "commit", "out", "--expect", "main~1")
    done = shell.run("commit", "out", "--rebase", "--json")
    made = json.loads(done.stdout)
    assert made["parents"] == [newest]
    said = f'on top of {newest[:12]} (by tester@host, "message 4"), whose weights these replace'
    assert json.loads(done.stderr) == {"note": said}
    # Nobody was there in between, this time.
    assert "same weights as its parent" in shell.out("commit", "out", "--rebase")
    made = shell.json("status", "out") | {"id": shell.json("show", "main")["id"]}
    assert shell.json("status", "out")["version"] == made["id"]
    follow("out", 6)
    shell.run("commit", "out", "--expect", "main")


def test_of_two_trainers_by_command_one_goes_on(shell: Shell, history: dict[str, str]) -> None:
    one = other = shell.json("show", "main")["id"]
    for step in range(2):
        one = shell.json("commit", "1.safetensors", "--expect", one, "--step", step)["id"]
    shell.fails(4, "commit", "2.safetensors", "--expect", other, "--step", "7")
    shell.run("branch", "newer", "main")
    shell.run("reset", "main", "main@{step=0}", "--rewind")
    back = shell.json("show", "main")["id"]
    shell.json("commit", "2.safetensors", "--expect", back, "--step", "1")
    shell.fails(4, "commit", "1.safetensors", "--expect", one, "--step", "2")
    assert [version["step"] for version in shell.json("log", "-n", "2")] == [1, 0]
    assert shell.json("show", "newer")["id"] == one


def test_expect(shell: Shell, history: dict[str, str]) -> None:
    shell.fails(4, "commit", "1.safetensors", "--expect", "main~1")
    shell.fails(4, "commit", "1.safetensors", "--expect", "")
    assert shell.json("commit", "1.safetensors", "--expect", "", "-b", "new")["parents"] == []
    shell.run("commit", "1.safetensors", "--expect", history["merge"])


def test_a_cast_directory_is_not_called_clean(shell: Shell, history: dict[str, str]) -> None:
    shell.run("checkout", "main", "out")
    made = shell.json("commit", "out", "--dtype", "fp16")
    status = shell.json("status", "out")
    assert status["version"] == made["id"]
    assert status["changed"] == ["model.safetensors"]
    shell.run("commit", "out", "--dtype", "fp16")


def test_cache_can_be_elsewhere_or_nowhere(shell: Shell, history: dict[str, str], tmp_path: Path) -> None:
    shell.run("checkout", "main", "a", env={"WEIGHTVC_CACHE": str(tmp_path / "there")})
    assert any((tmp_path / "there").rglob("*"))
    bare = {"WEIGHTVC_CACHE": "", "HOME": str(tmp_path / "bare")}
    shell.run("checkout", "main", "b", env=bare)
    shell.run("checkout", "main", "c", "--no-cache", env=bare | {"WEIGHTVC_CACHE": str(tmp_path / "bare")})
    assert not (tmp_path / "bare").exists()
    assert not (shell.cwd / "none").exists()
    assert (shell.cwd / "a/model.safetensors").read_bytes() == (shell.cwd / "b/model.safetensors").read_bytes()


def test_a_checkout_is_committed_to_its_branch(shell: Shell, history: dict[str, str], follow: Follow) -> None:
    shell.run("checkout", "exp", "out")
    follow("out", 5)
    made = shell.json("commit", "out")
    assert (made["branch"], made["parents"]) == ("exp", [history["exp1"]])
    assert shell.json("status", "out")["branch"] == "exp"
    # HEAD by name is the default branch, which this directory does not follow.
    assert shell.json("commit", "out", "-b", "HEAD")["branch"] == "main"
    # A version's bare id is on no branch.
    shell.run("checkout", history["exp1"], "away")
    assert shell.json("commit", "away")["branch"] == "main"


def test_edits_while_a_commit_runs_are_seen(shell: Shell, history: dict[str, str], follow: Follow) -> None:
    shell.run("checkout", "main", "out")
    follow("out", 5)
    code = (
        "import sys\n"
        "from weightvc.protocol import commit\n"
        "real = commit.publish\n"
        "def publish(*args, **options):\n"
        "    open('out/model.safetensors', 'r+b').write(open('1.safetensors', 'rb').read())\n"
        "    return real(*args, **options)\n"
        "commit.publish = publish\n"
        "from weightvc_cli.main import main\n"
        "sys.argv = ['weightvc', 'commit', 'out']\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=shell.cwd, env=shell.env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert shell.json("status", "out")["changed"] == ["model.safetensors"]
    shell.fails(8, "checkout", "main", "out")


def test_the_working_directory_is_not_pulled_away(shell: Shell, history: dict[str, str]) -> None:
    shell.run("checkout", "main~1", "out")
    here = shell.cwd / "out"
    assert "cd .." in shell.fails(8, "pull", "main", "--into", ".", cwd=here)
    assert "cd .." in shell.fails(8, "checkout", "main", here, cwd=here)
    assert shell.json("status", cwd=here)["version"] == history["main1"]


def test_a_single_file_is_replaced_when_told(shell: Shell, history: dict[str, str]) -> None:
    file = shell.cwd / "0.safetensors"
    before = file.read_bytes()
    assert "--force" in shell.fails(8, "checkout", "main", file)
    assert file.read_bytes() == before
    shell.run("checkout", "main", file, "--force")
    assert file.read_bytes() == (shell.cwd / "3.safetensors").read_bytes()
    shell.run("pull", "main~1", "--into", file)
    assert file.read_bytes() == (shell.cwd / "1.safetensors").read_bytes()


def test_what_verify_says_mends_it(shell: Shell, history: dict[str, str], follow: Follow) -> None:
    shell.run("checkout", "main", "out")
    follow("out", 9)
    advice = shell.run("verify", "out", code=7).stderr.rpartition("`weightvc ")[2].rstrip("`\n")
    shell.run(*advice.split())
    assert shell.json("verify", "out")["ok"]


def test_a_checkout_of_another_repository_is_not_committed_here(shell: Shell, history: dict[str, str]) -> None:
    shell.run("init", "other")
    shell.run("-r", "other", "commit", "1.safetensors", "-m", "other")
    shell.run("-r", "other", "checkout", "main", "out")
    for options in ([], ["--detach"], ["-b", "new"]):
        message = shell.fails(8, "commit", "out", *options)
        for word in (str(shell.cwd / "other"), str(shell.cwd / ".weightvc"), "`-r ", "remove out/.weightvc"):
            assert word in message
    assert shell.json("show")["id"] == history["merge"]
    shell.run("-r", "other", "commit", "out")
    # A repository that was moved is still the one that it came from.
    (shell.cwd / "other").rename(shell.cwd / "moved")
    shell.run("-r", "moved", "commit", "out")
    (shell.cwd / "out/.weightvc").unlink()
    shell.run("commit", "out")


def test_a_new_branch_grows_out_of_what_a_checkout_holds(
    shell: Shell, history: dict[str, str], follow: Follow
) -> None:
    for ref in ("main~1", history["exp1"]):
        shell.run("checkout", ref, "out", "--force")
        follow("out", 5)
        name = f"new{ref[:4]}"
        made = shell.json("commit", "out", "-b", name)
        held = shell.json("show", ref)["id"]
        assert (made["branch"], made["parents"]) == (name, [held])
        assert [edge["from"] for edge in shell.json("show", name)["edges"]] == [held]
        status = shell.json("status", "out")
        assert (status["version"], status["branch"], status["clean"]) == (made["id"], name, True)


def test_verify_lists_all_that_differs_without_a_shard(shell: Shell) -> None:
    shell.run("init")
    folder = shell.cwd / "model"
    names = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    checkpoint(folder / names[0], w=bytes(64))
    checkpoint(folder / names[1], b=bytes(64))
    index = {"metadata": {"total_size": 128}, "weight_map": {"w": names[0], "b": names[1]}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text("{}")
    first = shell.json("commit", folder)["id"]
    shell.run("commit", checkpoint(shell.cwd / "x.safetensors", w=bytes(64)))
    shell.run("checkout", "main~1", "out")
    (shell.cwd / "out" / names[1]).unlink()
    (shell.cwd / "out/config.json").write_text("[]")
    done = shell.run("verify", "out", "--json", code=7)
    found = json.loads(done.stdout)
    assert (found["files"], found["foreign"]) == (["config.json", names[1]], [])
    # Another version is not what this directory ought to be.
    advice = shell.run("verify", "out", "main", code=7).stderr
    assert "mend" not in advice
    assert first[:12] in advice
    (shell.cwd / "out/mine.txt").write_text("mine")
    done = shell.run("verify", "out", code=7)
    assert "foreign: mine.txt\n" in done.stdout
    shell.run(*done.stderr.rpartition("`weightvc ")[2].rstrip("`\n").split())
    assert (shell.cwd / "out" / names[1]).read_bytes() == (folder / names[1]).read_bytes()
    assert "move them away" in shell.run("verify", "out", code=7).stderr


def test_every_command_tells_its_requests(shell: Shell, history: dict[str, str]) -> None:
    shell.run("checkout", "main", "out")
    for args in (
        ["init", "more"],
        ["status", "out"],
        ["verify", "out"],
        ["show"],
        ["ls"],
        ["cat", "main", "--tensor", "b"],
        ["reflog"],
        ["branch"],
        ["tag"],
        ["reset", "main", "main"],
        ["diff", "main~1", "main"],
    ):
        assert " reads, " in shell.run(*args, "--stats").stderr
        assert " reads, " in shell.run("--stats", *args[:1], *[a.replace("more", "most") for a in args[1:]]).stderr
