"""Commands that read history: log, show, ls, cat, reflog."""

import re
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import click

from weightvc_cli import terminal
from weightvc_cli.completion import branches_of, refs_of
from weightvc_cli.output import (
    as_json,
    entry_json,
    first_line,
    iso,
    labels,
    local,
    shape,
    shown,
    size,
    table,
    weight,
)
from weightvc_cli.settings import Settings, json_option, pager_option, repository_option

if TYPE_CHECKING:
    from weightvc.objects.catalogue import Entry
    from weightvc.objects.root import Root
    from weightvc.repository import Repository

PIECE: Final = 64 << 20
"""Bytes of a tensor or file that are written at once."""


class _Counted(click.Command):
    """A command with -n, for which -3 is -n 3."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, [re.sub(r"^-([0-9]+)$", r"-n\1", arg) for arg in args])


@click.command(cls=_Counted)
@click.argument("refs", nargs=-1, metavar="[REF]...", shell_complete=refs_of)
@click.option("-n", "--max-count", metavar="N", type=click.IntRange(min=0), help="At most so many versions; or -N.")
@click.option("--oneline", is_flag=True, help="One line a version.")
@click.option("--graph", is_flag=True, help="Draw the history's lanes.")
@click.option("--all", "all_branches", is_flag=True, help="All branches.")
@pager_option
@json_option
@repository_option
@click.pass_obj
def log(
    settings: Settings, refs: tuple[str, ...], max_count: int | None, oneline: bool, graph: bool, all_branches: bool
) -> None:
    """Show versions, newest first.

    REF (HEAD unless given) and all that it descends from. Versions that retention let go of are among them, marked
    as expired.

    \b
    Examples:
      weightvc log --oneline -5
      weightvc log --graph --oneline --all
      weightvc log main --json
    """
    with settings.open() as repository, repository.snapshot() as root:
        names = _names(repository, root)
        if all_branches:
            refs = (*refs, *root.branches)
            if not refs:
                refs = ("HEAD",)
        entries = repository.entries(refs or "HEAD", max_count)
        if settings.json:
            click.echo(as_json([entry_json(entry) | _named(names, entry) for entry in entries]))
            return
        make = _one_line if oneline else _lines
        lines: Iterator[str]
        if graph:
            from weightvc_cli.graph import draw

            lines = draw(
                ((entry.new or "", _parents(entry), make(entry, names)) for entry in entries), terminal.lanes
            )
        else:
            lines = (line for entry in entries for line in make(entry, names))
        terminal.write(lines, pager=not settings.no_pager)


def _parents(entry: "Entry") -> Sequence[str]:
    return entry.version.parents if entry.version else ()


def _names(repository: "Repository", root: "Root") -> dict[str, list[str]]:
    """What points at versions, by id, as git writes it."""
    names: dict[str, list[str]] = {}
    for branch, ident in root.branches.items():
        if branch == root.default:
            names.setdefault(ident, []).insert(0, f"HEAD -> {branch}")
        else:
            names.setdefault(ident, []).append(branch)
    # Most repositories have no tags, and then there is no page to read.
    for tag, ident in repository.tags().items() if root.tags is not None else ():
        names.setdefault(ident, []).append(f"tag: {tag}")
    return names


def _named(names: dict[str, list[str]], entry: "Entry") -> dict[str, list[str]]:
    found = [name.removeprefix("HEAD -> ") for name in names.get(entry.new or "", [])]
    return {
        "branches": [name for name in found if not name.startswith("tag: ")],
        "tags": [name.removeprefix("tag: ") for name in found if name.startswith("tag: ")],
    }


def _one_line(entry: "Entry", names: dict[str, list[str]]) -> list[str]:
    version = entry.version
    assert version is not None
    parts = [terminal.ident(version.short)]
    if entry.new in names:
        parts.append(terminal.pointers(names[entry.new]))
    if version.step is not None:
        parts.append(f"[step {version.step}]")
    if entry.gone:
        parts.append("(expired)")
    return [" ".join([*parts, first_line(version.message)]).rstrip()]


def _lines(entry: "Entry", names: dict[str, list[str]]) -> list[str]:
    version = entry.version
    assert version is not None
    lines = [terminal.ident(f"version {version.id}")]
    if entry.new in names:
        lines[0] += f" {terminal.pointers(names[entry.new])}"
    if entry.gone:
        lines[0] += " (expired)"
    if len(version.parents) > 1:
        lines.append(f"Merge:  {' '.join(parent[:12] for parent in version.parents)}")
    lines += [f"Author: {shown(version.author)}", f"Date:   {local(version.time)}"]
    if said := labels(version):
        lines.append(f"Labels: {said}")
    lines += [f"Stored: {weight(entry)}", ""]
    if version.message:
        lines += [f"    {shown(line)}".rstrip() for line in version.message.strip().splitlines()]
        lines.append("")
    return lines


@click.command()
@click.argument("ref", default="HEAD", shell_complete=refs_of)
@pager_option
@json_option
@repository_option
@click.pass_obj
def show(settings: Settings, ref: str) -> None:
    """Show one version in full; of one that has expired, its record.

    \b
    Examples:
      weightvc show main~1
    """
    with settings.open() as repository, repository.snapshot() as root:
        names = _names(repository, root)
        entry = repository.entry(ref)
        version, place = entry.version, entry.place
        assert version is not None
        files = None if entry.gone else repository.files(version.id)
        if settings.json:
            more: dict[str, Any] = {"manifest": None, "files": None}
            if place is not None and files is not None:
                more = {"manifest": place.manifest, "files": [{"path": p, "bytes": n} for p, n in files.items()]}
            click.echo(as_json(entry_json(entry) | _named(names, entry) | more))
            return
        terminal.write([*_lines(entry, names), *_rest(entry, files)], pager=not settings.no_pager)


def _rest(entry: "Entry", files: dict[str, int] | None) -> Iterator[str]:
    """What show has beside log."""
    version, place = entry.version, entry.place
    assert version is not None
    for key, value in version.metadata.items():
        yield f"Meta:     {shown(key)} = {as_json(value)}"
    yield f"Tree:     {version.tree}  ({version.elements} elements, {size(version.nbytes)})"
    yield f"Layout:   {version.layout or 'none: it came from memory'}"
    for parent in version.parents:
        yield f"Parent:   {parent}"
    if place is None or files is None:
        return
    yield f"Manifest: {place.manifest}  ({size(place.nbytes)} stored in all)"
    for edge in (edge for way in place.all_ways for edge in way.edges):
        kind = f"patch from {edge.source[:12]}" if edge.source else "base"
        yield f"Edge:     {kind}, {size(edge.nbytes)}, {edge.changed} elements"
    for path, nbytes in files.items():
        yield f"File:     {shown(path)}  ({size(nbytes)})"


@click.command()
@click.argument("ref", default="HEAD", shell_complete=refs_of)
@click.option("--files", is_flag=True, help="List the files that a checkout writes, not the tensors.")
@pager_option
@json_option
@repository_option
@click.pass_obj
def ls(settings: Settings, ref: str, files: bool) -> None:
    """List a version's tensors, or its files.

    A tensor has a line of dtype, shape, digest and name.

    \b
    Examples:
      weightvc ls main
      weightvc ls v1 --files
    """
    with settings.open() as repository:
        if files:
            found = repository.files(ref)
            if settings.json:
                click.echo(as_json([{"path": path, "bytes": nbytes} for path, nbytes in found.items()]))
                return
            lines = table([(str(nbytes), shown(path)) for path, nbytes in found.items()], "rl")
            terminal.write(lines, pager=not settings.no_pager)
            return
        with repository.source(ref) as source:
            tensors = list(zip(source.tensors, source.tree.tensors, strict=True))
        if settings.json:
            click.echo(
                as_json(
                    [
                        {
                            "component": t.component,
                            "name": t.name,
                            "dtype": t.dtype,
                            "shape": list(t.shape),
                            "bytes": t.nbytes,
                            "digest": digest.hex(),
                        }
                        for t, digest in tensors
                    ]
                )
            )
            return
        rows = [(t.dtype, shape(t.shape), digest.hex()[:12], _called(t.component, t.name)) for t, digest in tensors]
        terminal.write(table(rows, "llll"), pager=not settings.no_pager)


def _called(component: str, name: str) -> str:
    return shown(f"{component}/{name}" if component else name)


@click.command()
@click.argument("ref", shell_complete=refs_of)
@click.argument("file", required=False)
@click.option("--tensor", metavar="NAME", help="A tensor's raw bytes instead of a file.")
@click.option("--component", default="", metavar="FOLDER", help="The component that the tensor belongs to.")
@repository_option
@click.pass_obj
def cat(settings: Settings, ref: str, file: str | None, tensor: str | None, component: str) -> None:
    """Write a file of a version to stdout.

    FILE is one of `weightvc ls --files`.

    \b
    Examples:
      weightvc cat main config.json
      weightvc cat main --tensor lm_head.weight > lm_head.bin
    """
    if (file is None) == (tensor is None):
        raise click.UsageError("name either a FILE or a --tensor")
    with settings.open() as repository:
        if file is not None:
            pieces = repository.file_bytes(ref, file, piece=PIECE)
        else:
            assert tensor is not None
            pieces = repository.tensor_bytes(ref, tensor, component=component, piece=PIECE)
        for piece in pieces:
            _write(piece)


def _write(data: bytes) -> None:
    # Under PYTHONUNBUFFERED stdout writes only as much as the pipe takes at once, and says how much that was.
    view = memoryview(data)
    while view:
        view = view[sys.stdout.buffer.write(view) :]


@click.command(cls=_Counted)
@click.argument("branch", default="HEAD", shell_complete=branches_of)
@click.option("-n", "--max-count", metavar="N", type=click.IntRange(min=0), help="At most so many moves; or -N.")
@pager_option
@json_option
@repository_option
@click.pass_obj
def reflog(settings: Settings, branch: str, max_count: int | None) -> None:
    """Show every move of a branch.

    \b
    Examples:
      weightvc reflog main -5
    """
    with settings.open() as repository:
        moves = []
        for i, entry in enumerate(repository.reflog(branch)):
            if max_count is not None and i >= max_count:
                break
            moves.append(entry)
        if settings.json:
            click.echo(
                as_json(
                    [
                        {
                            "branch": entry.name,
                            "index": i,
                            "op": entry.op,
                            "old": entry.old,
                            "new": entry.new,
                            "time": iso(entry.time),
                            "author": entry.author,
                            "message": entry.message,
                        }
                        for i, entry in enumerate(moves)
                    ]
                )
            )
            return
        terminal.write((_move(i, entry) for i, entry in enumerate(moves)), pager=not settings.no_pager)


def _move(index: int, entry: "Entry") -> str:
    to = terminal.ident(entry.new[:12]) if entry.new else "gone"
    text = f"{to} {entry.name}@{{{index}}} {local(entry.time)} {shown(entry.author)} {entry.op}"
    return f"{text}: {first_line(entry.message)}" if entry.message else text
