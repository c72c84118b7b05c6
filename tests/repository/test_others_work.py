"""What else lies in a target, or changes there while a checkout runs, is somebody's work and is not lost."""

import errno
import json
import os
import shutil

import pytest

import weightvc
from tests.kit.weights import Bits, file_bytes, files_below, flipped, held, lying, tensor
from weightvc.errors import BadFile, BadName, Refused, Unavailable
from weightvc.protocol import checkout, workspace

OLD = {("", name): tensor("BF16", (50,), i) for i, name in enumerate("abcd")}
NEW = {key: flipped(value, 0.5, 1) for key, value in OLD.items()}


@pytest.fixture
def repository(memory_url, tmp_path):
    """Two versions of a directory with a config.json."""
    repository = weightvc.init(memory_url, cache=None, author="test")
    folder = tmp_path / "source"
    folder.mkdir()
    for i, weights in enumerate((OLD, NEW)):
        (folder / "model.safetensors").write_bytes(file_bytes(weights))
        (folder / "config.json").write_text(str(i) * 9)
        repository.commit(folder)
    return repository


def beside(target):
    """Leftovers of checkouts."""
    return [name for name in os.listdir(target.parent) if "weightvc" in name]


def meanwhile(repository, work):
    """The repository, with `work` done once while a checkout writes."""
    left = [work]

    def progress(done, total):
        if left:
            left.pop()()

    return weightvc.open(repository.url, cache=None, progress=progress)


@pytest.fixture(params=["exchange", "rename"])
def swap(request, monkeypatch):
    """Both ways to swap: with an exchange, and where the file system has none."""
    if request.param == "rename":
        monkeypatch.setattr(checkout, "_rename_exchange", lambda one, other: False)
    return request.param


@pytest.mark.parametrize("options", [{}, {"replace": True}, {"force": True}])
def test_a_file_that_appears_while_it_runs(repository, tmp_path, options):
    target = tmp_path / "out"
    repository.checkout("main~1", target)
    busy = meanwhile(repository, lambda: (target / "notes.txt").write_text("mine"))
    with pytest.raises(Refused, match=r"notes\.txt"):
        busy.checkout("main", target, **options)
    assert (target / "notes.txt").read_text() == "mine"
    assert lying(target) == OLD
    assert beside(target) == []


def test_a_file_that_is_edited_while_it_runs(repository, tmp_path):
    target = tmp_path / "out"
    repository.checkout("main~1", target)
    busy = meanwhile(repository, lambda: (target / "config.json").write_text("x" * 9))
    with pytest.raises(Refused, match=r"config\.json"):
        busy.checkout("main", target)
    assert (target / "config.json").read_text() == "x" * 9
    busy.checkout("main", target, replace=True)
    assert (target / "config.json").read_text() == "1" * 9


def test_what_appears_in_the_instant_of_the_swap(repository, tmp_path, swap, monkeypatch):
    """Found in what was swapped out, which is then put back."""
    target = tmp_path / "out"
    repository.checkout("main~1", target)
    look, times = checkout.Directory._look, []

    def late(self, going, coming, carried):
        look(self, going, coming, carried)
        if not times:
            times.append(1)
            (target / "notes.txt").write_text("mine")

    monkeypatch.setattr(checkout.Directory, "_look", late)
    with pytest.raises(Refused, match=r"notes\.txt"):
        repository.checkout("main", target)
    assert files_below(target)["notes.txt"] == b"mine"
    assert lying(target) == OLD
    assert beside(target) == []


@pytest.mark.parametrize("first", ["checkout", "somebody"])
def test_what_is_first_where_nothing_was(repository, tmp_path, swap, monkeypatch, first):
    """Between the look at a free name and the rename: another checkout is replaced, other files are kept."""
    target, rename, left = tmp_path / "out", os.rename, [1]

    def late(source, aim, **options):
        if left and os.fspath(aim) == str(target):
            left.clear()
            if first == "checkout":
                repository.checkout("main~1", target)
            else:
                target.mkdir()
                (target / "notes.txt").write_text("mine")
        return rename(source, aim, **options)

    monkeypatch.setattr(os, "rename", late)
    if first == "checkout":
        repository.checkout("main", target)
        assert lying(target) == NEW
    else:
        with pytest.raises(Refused, match=r"notes\.txt"):
            repository.checkout("main", target)
        assert files_below(target) == {"notes.txt": b"mine"}
    assert not left
    assert beside(target) == []


def test_a_foreign_file_that_is_replaced_after_it_was_carried(repository, tmp_path, monkeypatch):
    target = tmp_path / "out"
    repository.checkout("main~1", target)
    (target / "notes.txt").write_text("old")
    keep = checkout.Directory._keep_modes

    def edited(self, new, plan):
        (target / "other").write_text("new")
        (target / "other").rename(target / "notes.txt")
        keep(self, new, plan)

    with monkeypatch.context() as patch:
        patch.setattr(checkout.Directory, "_keep_modes", edited)
        with pytest.raises(Refused, match=r"notes\.txt"):
            repository.checkout("main", target, force=True)
    assert (target / "notes.txt").read_text() == "new"
    repository.checkout("main", target, force=True)
    assert (target / "notes.txt").read_text() == "new"
    assert lying(target) == NEW


def test_two_checkouts_at_once_are_not_each_others_foreigners(repository, tmp_path):
    target = tmp_path / "out"
    repository.checkout("main~1", target)
    repository.commit(Bits({("part", "a"): OLD["", "a"]}))
    busy = meanwhile(repository, lambda: repository.checkout("main", target))
    busy.checkout("main~1", target)
    assert lying(target) == NEW


def test_an_existing_file_is_not_overwritten(repository, tmp_path):
    repository = weightvc.open(repository.url, cache=None)
    target = tmp_path / "mine.safetensors"
    target.write_bytes(b"precious")
    with pytest.raises(Refused, match="--force"):
        repository.checkout("main", target)
    assert target.read_bytes() == b"precious"
    repository.checkout("main", target, replace=True)
    assert lying(target) == NEW
    repository.checkout("main~1", target, force=True)
    assert lying(target) == OLD
    other = tmp_path / "other.safetensors"
    with pytest.raises(Refused, match="exists"):
        meanwhile(repository, lambda: other.write_bytes(b"precious")).checkout("main", other)
    assert other.read_bytes() == b"precious"
    assert beside(target) == []


def test_a_directory_of_another_repository(repository, tmp_path, memory_url):
    """Its version is not known here, so a file that does not look as it was written counts as changed."""
    other = weightvc.init(f"{memory_url}-other", cache=None)
    other.commit(tmp_path / "source")
    target = tmp_path / "out"
    other.checkout("main", target)
    (target / "config.json").write_text("edited")
    with pytest.raises(Refused, match=r"config\.json"):
        repository.checkout("main", target)
    assert (target / "config.json").read_text() == "edited"
    other.checkout("main", target, replace=True)
    repository.checkout("main~1", target)  # untouched: nothing is lost
    assert lying(target) == OLD


def test_an_edit_that_keeps_size_and_time_is_seen(repository, tmp_path):
    target = tmp_path / "out"
    repository.checkout("main~1", target)
    file = target / "config.json"
    times = file.stat()
    file.write_text("x" * 9)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert repository.status(target).changed == ["config.json"]
    with pytest.raises(Refused, match=r"config\.json"):
        repository.checkout("main", target)


def test_a_touched_file_beside_a_missing_one_is_not_changed(repository, tmp_path):
    target = tmp_path / "out"
    repository.checkout("main~1", target)
    (target / "model.safetensors").unlink()
    (target / "config.json").touch()
    found = repository.status(target)
    assert (found.changed, found.missing) == ([], ["model.safetensors"])
    repository.checkout("main", target)
    assert lying(target) == NEW


def test_empty_folders_stay(repository, tmp_path):
    target = tmp_path / "out"
    repository.checkout("main~1", target)
    (target / "logs" / "today").mkdir(parents=True)
    (target / "logs").chmod(0o700)
    repository.checkout("main", target)
    assert (target / "logs" / "today").is_dir()
    assert (target / "logs").stat().st_mode & 0o777 == 0o700
    assert repository.status(target).foreign == []


def test_a_folder_of_the_version_before_goes(repository, tmp_path):
    repository.commit(Bits({("text", "w"): OLD["", "a"]}))
    target = tmp_path / "out"
    repository.checkout("main", target)
    (target / "text" / "model.safetensors").unlink()
    repository.checkout("main~1", target)
    assert not (target / "text").exists()


@pytest.mark.parametrize("path", ["config.json/x", "text"])
def test_foreign_files_in_the_way_of_folders_and_the_other_way_round(repository, tmp_path, path):
    repository.commit(Bits({("text", "w"): OLD["", "a"]}), message="folder")
    ref = "main" if path == "text" else "main~1"
    target = tmp_path / "out"
    file = target / path
    file.parent.mkdir(parents=True)
    file.write_text("mine")
    with pytest.raises(Refused, match=f"{path} is in the way"):
        repository.checkout(ref, target, force=True)
    assert file.read_text() == "mine"


def test_a_second_rename_that_fails(repository, tmp_path, monkeypatch):
    """Without an exchange the old directory stands aside for an instant: it comes back."""
    monkeypatch.setattr(checkout, "_rename_exchange", lambda one, other: False)
    target = tmp_path / "out"
    repository.checkout("main~1", target)
    rename, calls = os.rename, []

    def failing(old, new):
        calls.append(old)
        if len(calls) == 2:
            raise OSError(5, "Input/output error")
        rename(old, new)

    with monkeypatch.context() as patch:
        patch.setattr(checkout.os, "rename", failing)
        with pytest.raises(Unavailable):
            repository.checkout("main", target)
    assert len(calls) == 3
    assert lying(target) == OLD
    assert beside(target) == []


KILLED = """
import os, signal, sys
import weightvc
from weightvc.protocol import checkout
checkout._rename_exchange = lambda one, other: False
rename, calls = os.rename, []
def dying(old, new):
    calls.append(old)
    if len(calls) == int(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)
    rename(old, new)
os.rename = dying
weightvc.open(sys.argv[1], cache=None).checkout("main", sys.argv[2])
"""


def killed_in_hand(tmp_path):
    """A target whose checkout was killed after the first of two renames, and its repository."""
    import subprocess
    import sys

    repository = weightvc.init(tmp_path / "repository", cache=None)
    for weights in (OLD, NEW):
        repository.commit(Bits(weights))
    target = tmp_path / "here" / "out"
    repository.checkout("main~1", target)
    done = subprocess.run([sys.executable, "-c", KILLED, repository.url, target, "2"])
    assert done.returncode == -9
    assert not target.exists()
    return repository, target


@pytest.mark.parametrize("look", ["status", "verify", "client", "command"])
def test_who_looks_first_puts_it_back_and_says_so(tmp_path, caplog, look):
    repository, target = killed_in_hand(tmp_path)
    if look == "status":
        assert repository.status(target).changed == []
    elif look == "verify":
        assert repository.verify(target).ok
    elif look == "client":
        assert weightvc.Client(repository, into=target).current() == repository.resolve("main~1")
    else:
        from weightvc_cli.settings import Settings

        assert Settings().find(str(target)) == repository.url
    assert "was put back" in caplog.text
    assert lying(target) == OLD
    assert beside(target) == []


@pytest.mark.parametrize("locks", ["no-op", "ENOLCK"])
def test_without_locks_time_tells_who_is_gone(repository, tmp_path, monkeypatch, locks):
    def flock(file, how):
        if locks == "ENOLCK":
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(workspace.fcntl, "flock", flock)
    target = tmp_path / "out"
    repository.checkout("main~1", target)
    with workspace.Workspace(target) as living:
        (living.new / "model.safetensors").write_bytes(b"half")
        repository.checkout("main", target)
        assert (living.new / "model.safetensors").exists()
        for path in (living.new / "model.safetensors", living.new, living.path / "lock", living.path):
            os.utime(path, (0, 0))
        repository.checkout("main~1", target)
        assert not living.path.exists()
    # With the old target in hand, it is not waited for that long.
    with workspace.Workspace(target) as dead:
        target.rename(dead.old)
        workspace.recover(target)
        assert not target.exists()
        monkeypatch.setattr(workspace, "IN_HAND", 0.0)
        workspace.recover(target)
    assert lying(target) == OLD
    assert beside(target) == []


@pytest.mark.parametrize("call", [1, 2])
def test_killed_with_the_old_directory_in_hand(tmp_path, call):
    """The next checkout puts it back first, and clears up."""
    import subprocess
    import sys

    repository = weightvc.init(tmp_path / "repository", cache=None)
    for weights in (OLD, NEW):
        repository.commit(Bits(weights))
    target = tmp_path / "here" / "out"
    repository.checkout("main~1", target)
    (target / "notes.txt").write_text("mine")
    (target / "notes.txt").rename(tmp_path / "notes.txt")
    done = subprocess.run([sys.executable, "-c", KILLED, repository.url, target, str(call)])
    assert done.returncode == -9
    assert len(beside(target)) == 1
    if call == 2:
        assert not target.exists()
        (old,) = (target.parent / beside(target)[0]).glob("old")
        (tmp_path / "notes.txt").rename(old / "notes.txt")
        with pytest.raises(Refused, match=r"notes\.txt"):
            repository.checkout("main", target)
        (target / "notes.txt").unlink()
    assert lying(target) == OLD
    repository.checkout("main", target)
    assert lying(target) == NEW
    assert beside(target) == []


def test_a_running_checkout_is_not_cleared_away(repository, tmp_path):
    """Not even by one that cannot see its process: the lock says that it lives."""
    target = tmp_path / "out"

    def another():
        assert len(beside(target)) == 1
        repository.checkout("main~1", target)
        assert len(beside(target)) == 1

    meanwhile(repository, another).checkout("main", target, replace=True)
    assert lying(target) == NEW
    assert beside(target) == []


def test_a_workspace_is_taken_by_one(tmp_path):
    target = tmp_path / "out"
    with workspace.Workspace(target) as work:
        assert workspace._lock(work.path) is None
        checkout.clear(target)
        assert work.new.is_dir()
    assert not work.path.exists()
    assert workspace._lock(work.path) is None


def test_the_working_directory_is_not_replaced(repository, tmp_path, monkeypatch):
    target = tmp_path / "out"
    repository.checkout("main~1", target)
    (target / "deep").mkdir()
    for here, name in ((target, "."), (target / "deep", target)):
        monkeypatch.chdir(here)
        with pytest.raises(Refused, match="working directory"):
            repository.checkout("main", name, replace=True)
    assert lying(target) == OLD


def test_targets_that_cannot_be_are_told_before_anything_is_fetched(repository, tmp_path):
    fetched = []
    reader = weightvc.open(repository.url, cache=None, progress=lambda done, total: fetched.append(done))
    (tmp_path / "x.safetensors").mkdir()
    with pytest.raises(BadFile, match="is no file"):
        reader.checkout("main", tmp_path / "x.safetensors")
    (tmp_path / "has" / ".weightvc").mkdir(parents=True)
    with pytest.raises(Refused, match="repository"):
        reader.checkout("main", tmp_path / "has", force=True)
    with pytest.raises(Refused, match="mount point"):
        reader.checkout("main", "/", force=True)
    (tmp_path / "file").write_text("x")
    with pytest.raises(Refused, match="in the way"):
        reader.checkout("main", tmp_path / "file" / "out")
    assert fetched == []


def test_names_as_long_as_a_system_takes(repository, tmp_path):
    for name in ("名" * 80, "x" * 255):
        repository.checkout("main", tmp_path / name)
        assert lying(tmp_path / name) == NEW
    with pytest.raises(Refused, match="choose another path"):
        repository.checkout("main", tmp_path / ("x" * 256))


@pytest.mark.parametrize(
    "text",
    [
        "[" * 200_000 + "]" * 200_000,
        '{"repository":"x","version":"%s","branch":null,"files":{"a":[1e999,0,0,0]}}' % ("0" * 64),
        '{"repository":"x","version":"%s","branch":{},"files":{}}' % ("0" * 64),
        '{"repository":"x","version":5,"branch":null,"files":{}}',
        '{"repository":"x","version":"main","branch":null,"files":{}}',
        '{"repository":5,"version":"%s","branch":null,"files":{}}' % ("0" * 64),
        '{"repository":"x","version":"%s","branch":null,"files":[]}' % ("0" * 64),
        "5",
        "",
    ],
)
def test_a_marker_that_cannot_be_read_is_none(repository, tmp_path, text):
    target = tmp_path / "out"
    repository.checkout("main~1", target)
    (target / ".weightvc").write_text(text)
    assert checkout.read_marker(target) is None
    with pytest.raises(Refused, match="does not say"):
        repository.status(target)
    with pytest.raises(Refused, match=r"\.weightvc"):
        repository.checkout("main", target)
    repository.checkout("main", target, force=True)
    assert repository.status(target).changed == []


def test_a_pipe_in_the_markers_place_hangs_nobody(repository, tmp_path):
    (tmp_path / "out").mkdir()
    os.mkfifo(tmp_path / "out" / ".weightvc")
    assert checkout.read_marker(tmp_path / "out") is None


def test_edits_while_a_commit_runs_are_not_called_clean(repository, tmp_path):
    target = tmp_path / "out"
    repository.checkout("main", target)
    found = checkout.scan(target)
    made = repository.commit(target)
    (target / "config.json").write_text("x" * 9)
    repository.mark(target, made, branch="main", found=found)
    assert repository.status(target).changed == ["config.json"]
    assert (target / "model.safetensors").exists()
    assert json.loads((target / ".weightvc").read_text())["version"] == made.id


def test_a_nested_checkout_is_committed_without_its_marker(repository, tmp_path):
    target = tmp_path / "out"
    repository.checkout("main", target)
    repository.checkout("main", target / "sub")
    repository.commit(target)
    assert sorted(repository.files()) == [
        "config.json",
        "model.safetensors",
        "sub/config.json",
        "sub/model.safetensors",
    ]


@pytest.mark.parametrize(
    "components",
    [
        [".weightvc"],
        [".weightvc/x"],
        ["a/.WeightVC/b"],
        ["", "model.safetensors"],
        ["x", "x/model.safetensors"],
        ["A", "a"],
        ["/".join(["d" * 250] * 16) + "/" + "e" * 60],
        ["a/"],
        ["../a"],
    ],
)
def test_components_that_could_never_be_checked_out_are_refused(repository, components):
    import numpy as np

    with pytest.raises(BadName, match="component"):
        repository.commit({name: {"w": np.zeros(4, np.float32)} for name in components})


def test_components_of_a_version_that_was_committed_otherwise(repository, tmp_path):
    """Whatever wrote it: a checkout writes no path that would hide a file or a marker."""
    for components in ([".weightvc"], ["A", "a"], ["", "model.safetensors"]):
        repository.commit(Bits({(name, "w"): OLD["", "a"] for name in components}))
        with pytest.raises(Refused):
            repository.checkout("main", tmp_path / "out")
        assert not (tmp_path / "out").exists()


def test_cat_in_pieces(repository):
    whole = repository.cat("main", "model.safetensors")
    pieces = list(repository.file_bytes("main", "model.safetensors", piece=30))
    assert b"".join(pieces) == whole == file_bytes(NEW)
    assert max(map(len, pieces)) == 30
    assert held(repository) == NEW


def test_many_side_files_need_few_descriptors(repository, tmp_path):
    import resource

    folder = tmp_path / "source"
    for i in range(60):
        (folder / f"{i}.txt").write_text(str(i))
    repository.commit(folder)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 60
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 30, hard))
    try:
        repository.checkout("main", tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    shutil.rmtree(folder)
    assert len(files_below(tmp_path / "out")) == 62
