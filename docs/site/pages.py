"""What the site has beside docs/: files of the top, and pages made of the code. MkDocs calls the functions `on_…`.

Nothing is written twice. The README is the first page as it stands; each command's page is its own help, and the
reference is made of docstrings.
"""

import inspect
import re
from pathlib import Path
from typing import Any, Final

import click
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import weightvc
from weightvc_cli.main import COMMANDS, SECTIONS, cli
from weightvc_cli.settings import Settings

ROOT: Final = Path(__file__).parents[2]
TOP: Final = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
"""Files of the top, and what the site calls them."""
LINK: Final = re.compile(r"(?<!!)\[([^]]*)\]\(([^)\s]+)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    made = {page: (ROOT / name).read_text() for name, page in TOP.items()}
    made |= {"commands.md": commands(), "reference.md": reference()}
    for name, text in made.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Links of one page, from where it lies in the source to where it lies in the site."""
    folder = ROOT if page.file.src_uri in TOP.values() else ROOT / "docs"

    def moved(link: re.Match[str]) -> str:
        text, target = link.groups()
        path, mark, anchor = target.partition("#")
        if "://" in target or not path:
            return link[0]
        place = (folder / path).resolve().relative_to(ROOT)
        if str(place) in TOP:
            return f"[{text}]({TOP[str(place)]}{mark}{anchor})"
        if place.parts[0] == "docs":
            return f"[{text}]({place.relative_to('docs')}{mark}{anchor})"
        return text  # a source file, which the site has not

    return LINK.sub(moved, markdown)


def commands() -> str:
    """The help of each command, as it is typed."""
    top = click.Context(cli, obj=Settings(), info_name="weightvc", terminal_width=80)
    out = [
        "# Help of each command",
        "What `weightvc COMMAND --help` says. [The command line](cli.md) has it in full.",
        "",
    ]
    for heading, modules in SECTIONS.items():
        out.append(f"## {heading}")
        for name in (name for name, module in COMMANDS.items() if module in modules):
            command = cli.get_command(top, name)
            assert command is not None
            said = command.get_help(click.Context(command, parent=top, info_name=name, terminal_width=80))
            out += [f"### {name}", f"```text\n{said}\n```"]
    return "\n\n".join(out)


def reference() -> str:
    """All that is public, as its docstrings have it."""
    things = {name: getattr(weightvc, name) for name in weightvc.__all__}
    errors = [name for name, thing in things.items() if isinstance(thing, type) and issubclass(thing, Exception)]
    modules = [name for name, thing in things.items() if inspect.ismodule(thing)]
    functions = [name for name, thing in things.items() if inspect.isfunction(thing)]
    classes = [name for name in things if name not in {*errors, *modules, *functions}]
    out = [
        "# Docstrings",
        "What `help()` says of all that is public. [The Python library](api.md) tells how it is used.",
        "",
    ]
    for heading, names in (("Functions", functions), ("Classes", classes), ("Errors", errors), ("Modules", modules)):
        out += [f"## {heading}", *(f"::: weightvc.{name}" for name in names)]
    return "\n\n".join(out)
