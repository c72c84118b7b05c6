"""The code blocks of README.md and docs/, and how a page is run: its blocks in order, as a reader would type them.

- Blocks of `python` share one process and one namespace; those of `sh` share their directory and exported variables.
- A block that begins with `# in a second terminal` goes on behind the others until the page ends, or until one
  begins with `# with the second terminal stopped`.
- One that begins with `# not run by the tests: WHY` is only looked at; so is what is not `python` or `sh`.
- What is indented, or fenced as `text`, is no code: layouts, formulas, what was printed.

This module, run as a program, is that one process.
"""

import configparser
import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import click

from weightvc_cli.main import COMMANDS, cli
from weightvc_cli.settings import Settings

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^( *)```([\w-]*)[^\n]*\n(.*?)^\1```$", re.M | re.S)
HERE = re.compile(r"^cat > (\S+) <<'END'\n(.*?)^END$", re.M | re.S)
"""A file that a block writes."""
NOT_RUN = "# not run by the tests: "
BEHIND = "# in a second terminal"
STOPPED = "# with the second terminal stopped"
PRELUDE = """
weightvc() { "$PAGES_PYTHON" -m weightvc_cli "$@"; }
python() { "$PAGES_PYTHON" "$@"; }
pip() { :; }
"""
"""Commands of a page: ours, by this Python; packages are there already."""


BEFORE = {"if": 1, "while": 1, "until": 1, "do": 1, "then": 1, "!": 1, "flock": 3, "timeout": 2}
"""What may stand before a command, and how many words of it."""


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def runs(self) -> bool:
        return self.language in ("python", "sh") and not self.text.startswith(NOT_RUN)


def pages() -> list[str]:
    """The pages with code for a user, as paths from the root."""
    return [
        "README.md",
        "CONTRIBUTING.md",
        "SECURITY.md",
        *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))),
    ]


def blocks(page: str, language: str | None = None) -> list[Block]:
    """The fenced blocks of a page."""
    text = (ROOT / page).read_text()
    found = []
    for fence in FENCE.finditer(text):
        indent, kind, body = fence.groups()
        if language in (None, kind):
            body = re.sub(rf"^{indent}", "", body, flags=re.M)
            found.append(Block(page, text[: fence.start()].count("\n") + 1, kind, body))
    return found


def indented(page: str) -> Iterator[str]:
    """The lines of what is indented, and so shown as a block that has no language."""
    text = FENCE.sub("", (ROOT / page).read_text())
    for run in re.findall(r"(?:\A|\n)\n((?: {4}.*\n|\n)+)", text):
        yield from (line[4:] for line in run.splitlines() if line)


def check(block: Block) -> None:
    """Whether a block can be read as what it says that it is, with commands and options that there are."""
    if block.language == "python":
        compile(block.text, str(block), "exec")
    elif block.language == "sh":
        subprocess.run(["bash", "-n", "-c", block.text], check=True)
        for name, script in HERE.findall(block.text):
            if name.endswith(".py"):
                compile(script, str(block), "exec")
        for words in simple_commands(HERE.sub("", block.text)):
            check_command(words)
    elif block.language == "ini":
        unit = configparser.ConfigParser(strict=False, interpolation=None)
        unit.read_string(block.text)
        for section in unit.values():
            if "ExecStart" in section:
                check_command(shlex.split(section["ExecStart"]))
    elif block.language == "yaml":
        import yaml

        for document in yaml.safe_load_all(block.text):
            for words in listed(document):
                check_command(words)
    elif block.language == "cron":
        for line in block.text.splitlines():
            *when, command = line.split(maxsplit=5)
            assert [re.fullmatch(r"[\d*/,-]+", one) is not None for one in when] == [True] * 5, line
            check(Block(block.page, block.line, "sh", command))
    else:
        assert block.language in ("text", "json"), f"{block}: no language that is known: {block.language!r}"


def listed(document: object) -> Iterator[list[str]]:
    """The command lines in a manifest of Kubernetes: lists of texts."""
    if isinstance(document, dict):
        for value in document.values():
            yield from listed(value)
    elif isinstance(document, list):
        if document and all(isinstance(one, str) for one in document):
            yield document
        else:
            for one in document:
                yield from listed(one)


def simple_commands(text: str) -> Iterator[list[str]]:
    """The words of each simple command of a script, as far as shlex sees them; also of those within $(…)."""
    text = re.sub(r"\\\n", " ", text)
    for line in text.splitlines():
        if line.lstrip().startswith("#"):
            continue
        lexer = shlex.shlex(
            re.sub(r"(\d?>>?&?\d?)", r" \1 ", re.sub(r"\$\(", " ; ", line)), posix=True, punctuation_chars=";()|&<>"
        )
        words: list[str] = []
        for word in [*lexer, ";"]:
            if set(word) <= set(";()|&"):
                yield words
                words = []
            elif set(word) & set("<>") and not word.strip("<>&"):
                words.append("\0")
            else:
                words.append(word)


def check_command(words: list[str]) -> None:
    """Whether a command of ours, or of pip, has these options and arguments."""
    words = words[: words.index("\0")] if "\0" in words else words
    while words and (re.match(r"\w+=", words[0]) or words[0] in BEFORE):
        words = words[BEFORE.get(words[0], 1) :]
    if not words:
        return
    name, args = words[0].rpartition("/")[2], words[1:]
    if name == "weightvc":
        settings = Settings()
        context = click.Context(cli, info_name="weightvc", obj=settings)
        _, rest, _ = cli.make_parser(context).parse_args(list(args))
        if rest and rest[0] == "help":
            rest = [*rest[1:2], "--help"]
        if rest:
            assert rest[0] in COMMANDS, words
            command = cli.get_command(context, rest[0])
            assert command is not None
            command.make_parser(click.Context(command, parent=context, info_name=rest[0])).parse_args(list(rest[1:]))
    elif name == "pip":
        known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        for extras in re.findall(r"(?:weightvc|\.)\[([\w,]+)\]", " ".join(args)):
            assert set(extras.split(",")) <= set(known), words
    elif name in ("python", "python3") and args and args[0].endswith(".py") and "/" in args[0]:
        assert (ROOT / args[0]).exists(), words


def run(page: str, words: Mapping[str, str], elsewhere: tuple[str, ...]) -> None:
    """Run a page's blocks in the working directory, with some words of theirs replaced."""
    namespace: dict[str, object] = {"__name__": "__main__"}
    behind: list[subprocess.Popen[bytes]] = []
    started = time.monotonic()
    try:
        for block in blocks(page):
            if not block.runs or any(one in block.text for one in elsewhere):
                continue
            text = block.text
            for word, meant in words.items():
                text = re.sub(word, meant, text)
            print(f"--- {block}, {time.monotonic() - started:.1f} s", flush=True)
            if block.language == "python":
                exec(compile("\n" * block.line + text, page, "exec"), namespace)
                continue
            if text.startswith(STOPPED):
                stop(behind)
            if text.startswith(BEHIND):
                behind.append(
                    subprocess.Popen(["bash", "-euo", "pipefail", "-c", PRELUDE + text], start_new_session=True)
                )
            else:
                shell(text)
            sys.stdout.flush()
    finally:
        stop(behind)
    print(f"--- {page} took {time.monotonic() - started:.1f} s", flush=True)


def stop(behind: "list[subprocess.Popen[bytes]]") -> None:
    """End what goes on, each with what it started."""
    while behind:
        process = behind.pop()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        process.wait(30)


def shell(text: str) -> None:
    """Run a block in bash, and take over the directory and the variables that it leaves."""
    after = "\nenv -0 >&9; printf '\\0PWD_AFTER=%s\\0' \"$PWD\" >&9"
    reader, writer = os.pipe()
    os.dup2(writer, 9)
    os.close(writer)
    os.set_inheritable(9, True)
    done = subprocess.run(["bash", "-euo", "pipefail", "-c", PRELUDE + text + after], pass_fds=(9,))
    os.close(9)
    with os.fdopen(reader, "rb") as file:
        left = dict(one.split("=", 1) for one in file.read().decode().split("\0") if "=" in one)
    if done.returncode:
        sys.exit(f"exit status {done.returncode}")
    os.chdir(left.pop("PWD_AFTER"))
    os.environ.update(
        {name: value for name, value in left.items() if not name.startswith(("_", "BASH_FUNC", "SHLVL"))}
    )


if __name__ == "__main__":
    import json

    os.environ["PAGES_PYTHON"] = sys.executable
    run(sys.argv[1], json.loads(sys.argv[2]), tuple(json.loads(sys.argv[3])))
