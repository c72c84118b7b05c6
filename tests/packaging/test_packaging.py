"""The wheel and the sdist: what is in them, and that they work where there is no source tree."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import weightvc
from tests.cli.conftest import checkpoint, weights

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "weightvc": "weightvc",
    "weightvc_cli": "cli/weightvc_cli",
    "weightvc_kernels": "kernels/weightvc_kernels",
}
FOLDERS = ("benchmarks", "cli", "docs", "examples", "kernels", "tests", "weightvc")
FILES = (
    *("CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "MANIFEST.in", "Makefile", "README.md", "SECURITY.md"),
    "pyproject.toml",
)
MADE = {"PKG-INFO", "setup.cfg"}
"""What setuptools adds to an sdist, beside an egg-info."""
THEIRS = {"bokeh", "ml_dtypes", "sglang", "transformers", "vllm"}
"""What is imported only for who has it: what draws reports, dtypes of numpy, models, and the engines that it plugs
into."""
WITH = {"botocore": "boto3", "llvmlite": "numba"}
"""What a dependency brings along, by necessity."""


def tree() -> set[str]:
    """The paths that belong to the project, as far as an sdist has them."""
    found = {
        str(path.relative_to(ROOT))
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and ".egg-info" not in str(path)
    }
    return found | set(FILES)


def run(*command: str | Path, cwd: Path, **env: str) -> str:
    """Run a command to which no source tree is named; what it printed."""
    kept = {k: v for k, v in os.environ.items() if k != "PYTHONPATH" and not k.startswith(("WEIGHTVC_", "COV_"))}
    done = subprocess.run(
        [*map(str, command)],
        cwd=cwd,
        env=kept | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def build(source: Path, out: Path, *kinds: str) -> list[Path]:
    """Build without a network: what it needs is installed, as pyproject.toml says for tests."""
    run(sys.executable, "-m", "build", "--no-isolation", *kinds, "--outdir", out, source, cwd=source.parent)
    return sorted(out.iterdir())


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree, which builds may write to."""
    copy = tmp_path_factory.mktemp("source") / "weightvc"
    for path in tree():
        (copy / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / path, copy / path)
    return copy


@pytest.fixture(scope="session")
def built(source: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The sdist, and the wheel made from it: what `python -m build` makes."""
    wheel, sdist = build(source, tmp_path_factory.mktemp("dist"))
    return sdist, wheel


@pytest.fixture(scope="session")
def installed(built: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a new environment with the wheel in it. Its dependencies are those of this one."""
    home = tmp_path_factory.mktemp("installed")
    run(sys.executable, "-m", "venv", "--without-pip", home / "env", cwd=home)
    python = home / "env" / "bin" / "python"
    (purelib,) = (home / "env").glob("lib/python3*/site-packages")
    # Paths in such a file are searched last, and .pth files in them not read: an editable install is not seen.
    (purelib / "dependencies.pth").write_text(str(Path(pytest.__file__).parents[1]))
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index")
    run(*pip, built[1], cwd=home)
    return python


def names(wheel: Path) -> dict[str, bytes]:
    """What a wheel holds, by path."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_a_wheel_has_every_module_and_nothing_beside(built: tuple[Path, Path]) -> None:
    info = f"weightvc-{weightvc.__version__}.dist-info/"
    found = {name for name in names(built[1]) if not name.startswith(info)}
    wanted = set()
    for package, folder in PACKAGES.items():
        wanted |= {package + path.removeprefix(folder) for path in tree() if path.startswith(folder + "/")}
        assert f"{package}/py.typed" in found
    assert found == wanted
    assert built[1].name == f"weightvc-{weightvc.__version__}-py3-none-any.whl"


def test_an_sdist_has_the_project(built: tuple[Path, Path]) -> None:
    with tarfile.open(built[0]) as archive:
        inside = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    assert {name for name in inside if not name.startswith("weightvc.egg-info/")} - MADE == tree()


def test_a_wheel_of_the_tree_is_that_of_the_sdist(built: tuple[Path, Path], source: Path, tmp_path: Path) -> None:
    (wheel,) = build(source, tmp_path, "--wheel")
    assert names(wheel) == names(built[1])


def test_it_works_outside_the_source_tree(installed: Path, tmp_path: Path) -> None:
    for package in PACKAGES:
        place = run(installed, "-c", f"import {package}; print({package}.__file__)", cwd=tmp_path)
        assert Path(place).is_relative_to(installed.parents[1])
    command = installed.parent / "weightvc"
    env = {"HOME": str(tmp_path), "WEIGHTVC_CACHE": str(tmp_path / "cache")}
    assert run(command, "--version", cwd=tmp_path, **env) == f"weightvc {weightvc.__version__}\n"
    run(command, "init", cwd=tmp_path, **env)
    for step in (0, 1):
        path = checkpoint(tmp_path / f"{step}.safetensors", **weights(step))
        run(command, "commit", path, "--step", str(step), cwd=tmp_path, **env)
    run(command, "checkout", "main@{step=0}", "out", cwd=tmp_path, **env)
    run(command, "pull", "main", "--into", "out", cwd=tmp_path, **env)
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == path.read_bytes()
    run(installed, "-m", "weightvc_cli", "verify", "out", cwd=tmp_path, **env)


def test_it_is_found_by_those_who_look_for_it(installed: Path, tmp_path: Path) -> None:
    code = (
        "from importlib.metadata import entry_points as e\n"
        "print(e(group='fsspec.specs')['weightvc'].load().protocol)\n"
        "print(e(group='vllm.general_plugins')['weightvc'].load().__name__)\n"
    )
    assert run(installed, "-c", code, cwd=tmp_path) == "weightvc\nregister\n"


def test_its_types_are_complete(installed: Path, tmp_path: Path) -> None:
    shutil.copyfile(Path(__file__).with_name("client.py"), tmp_path / "client.py")
    mypy = (sys.executable, "-m", "mypy", "--strict", "--python-executable", installed)
    assert "no issues found" in run(*mypy, "--cache-dir", tmp_path / "cache", "client.py", cwd=tmp_path)
    # And it is the wheel's types that are read: a mistake is seen.
    (tmp_path / "wrong.py").write_text("import weightvc\nprint(weightvc.open('policy').log().step)\n")
    done = subprocess.run(
        [*map(str, mypy), "--cache-dir", tmp_path / "cache", "wrong.py"], cwd=tmp_path, capture_output=True, text=True
    )
    assert '"Iterator[Version]" has no attribute "step"' in done.stdout


def imports() -> Iterator[tuple[str, Path]]:
    """What the packages import, anywhere in them."""
    for folder in PACKAGES.values():
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Import):
                    yield from ((alias.name.partition(".")[0], path) for alias in node.names)
                elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                    yield node.module.partition(".")[0], path


def test_what_is_imported_is_a_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {re.split(r"[^\w.-]", one)[0].replace("-", "_") for one in project["dependencies"]}
    seen = set()
    for name, path in imports():
        name = WITH.get(name, name)
        seen.add(name)
        assert name in declared | THEIRS | set(PACKAGES) | sys.stdlib_module_names, (name, path)
    # s3fs is fsspec's, for s3:// URLs.
    assert seen >= THEIRS | declared - {"s3fs"}
