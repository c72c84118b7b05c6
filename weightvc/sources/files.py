"""Checkpoints as files: one safetensors file or a directory of them, local or at any fsspec URL."""

import os
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from functools import lru_cache
from itertools import pairwise, repeat

from weightvc.errors import BadFile, BadName
from weightvc.pool import Pool
from weightvc.sources.base import Layout, LayoutFile, Source, TensorInfo
from weightvc.sources.header import Header, collector_paused, read_header, shown, strict_json
from weightvc.sources.local import LocalFiles
from weightvc.sources.paths import MARKER, check_files, check_relative
from weightvc.sources.remote import RemoteFiles

WEIGHTS = ".safetensors"
INDEX = ".safetensors.index.json"
PICKLES = (".pt", ".pth", ".bin")
DEFAULT_NAME = "model.safetensors"

MAX_SIDE_FILE = 64 << 20
"""Bytes that one side file may have."""

MAX_SIDE_FILES = 256 << 20
"""Bytes that all side files of a checkpoint may have."""

Files = LocalFiles | RemoteFiles


def is_url(path: str) -> bool:
    """Whether `path` is a URL (or a chain of them) and not a local path; file: URLs are local."""
    return ("://" in path or "::" in path) and not path.startswith("file://")


def open_files(
    path_or_url: str | os.PathLike[str],
    *,
    name: str | None = None,
    exclude: Iterable[str] = (),
    side_files: bool = True,
) -> Source:
    """Open a .safetensors file, a directory of them, or a .pt, .pth or .bin file.

    A single file gets the path `name` in the layout ("model.safetensors" by default). In a directory, all
    files count: *.safetensors as weights (component: their folder), the others as side files, kept byte for
    byte. Left out are what a pattern of `exclude` matches (a path or any of its parts, as in *.pt or
    optimizer), `.weightvc` anywhere, and `.git` at the top. Without `side_files`, for whoever looks at tensors alone,
    the others are not read, however large they are.
    Raises BadFile, BadName, BadTensor; for URLs also AccessDenied, Unavailable.
    """
    location = os.fspath(path_or_url).removeprefix("file://")
    exclude = (exclude,) if isinstance(exclude, str) else tuple(exclude)
    files = RemoteFiles(location) if is_url(location) else LocalFiles(location)
    try:
        if files.is_directory:
            if name is not None:
                raise BadFile(f"{location}: a name ({name!r}) can be given to a single file only: leave it out")
            return _open_directory(files, exclude, side_files)
        if exclude:
            raise BadFile(f"{location}: is one file: leave `exclude` out")
        if location.endswith(PICKLES):
            if name is not None:
                raise BadFile(f"{location}: a pickle has no layout to name: leave `name` out")
            from weightvc.sources.pickled import open_pickled

            files.close()
            return open_pickled(location)
        return _open_single(files, DEFAULT_NAME if name is None else name)
    except BaseException:
        files.close()
        raise


class FileSource:
    """Tensors of one or more safetensors files. Made by open_files()."""

    def __init__(self, files: Files, headers: dict[str, tuple[str, Header]], side: list[LayoutFile]) -> None:
        """`headers` gives each weights file's place in `files` and header by its path in the layout."""
        self._files = files
        weights = [
            LayoutFile(path, files.sizes[place], header.prefix, weights=True)
            for path, (place, header) in headers.items()
        ]
        with collector_paused():
            if len(headers) == 1:
                # The very list that was there before: schemas are then seen to be the same at once.
                ((path, (place, header)),) = headers.items()
                infos, self._begins, self._breaks = header.sorted(path.rpartition("/")[0])
                self._places = [place] * len(infos)
            else:
                found = tuple((path, place, header) for path, (place, header) in headers.items())
                infos, self._places, self._begins, self._breaks = _merged(found)
            self.tensors: Sequence[TensorInfo] = infos
        self.layout: Layout | None = Layout(tuple(sorted(weights + side, key=lambda file: file.path)))

    @property
    def remote(self) -> bool:
        """Whether each read is a request over the network."""
        return self._files.is_remote

    def read(self, index: int, start: int, stop: int) -> bytes:
        """Bytes [start, stop) of `tensors[index]`. Raises BadFile if its file has changed."""
        if not 0 <= start <= stop <= self.tensors[index].nbytes:
            raise IndexError(f"bytes {start} to {stop} of tensor {shown(self.tensors[index].name)}")
        begin = self._begins[index]
        return self._files.read(self._places[index], begin + start, begin + stop)

    def read_run(self, first: int, last: int) -> bytes:
        """Bytes of `tensors[first:last]`, one after the other. Raises BadFile if a file has changed."""
        pieces = []
        for after in [*self._breaks[bisect_right(self._breaks, first) : bisect_left(self._breaks, last)], last]:
            end = self._begins[after - 1] + self.tensors[after - 1].nbytes
            pieces.append(self._files.read(self._places[first], self._begins[first], end))
            first = after
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def check(self) -> None:
        """Raise BadFile if a file is not the one that was opened."""
        self._files.check()

    def close(self) -> None:
        """Close the files; idempotent."""
        self._files.close()


@lru_cache(2)
def _merged(
    headers: tuple[tuple[str, str, Header], ...],
) -> tuple[list[TensorInfo], list[str], list[int], list[int]]:
    """The tensors of several files (path in the layout, place, header) by name, their places, where they begin there,
    and which do not begin where the one before ends. Raises BadFile if one is in two."""
    rows: list[tuple[TensorInfo, str, int]] = []
    for path, place, header in headers:
        infos, begins, _ = header.sorted(path.rpartition("/")[0])
        rows += zip(infos, repeat(place), begins)
    rows.sort()
    for (one, first, _), (two, second, _) in pairwise(rows):
        if one.name == two.name and one.component == two.component:
            raise BadFile(f"tensor {shown(one.name)} is in {first!r} and in {second!r}: keep one, or exclude a file")
    borders = pairwise((place, begin, begin + info.nbytes) for info, place, begin in rows)
    breaks = [i for i, (a, b) in enumerate(borders, 1) if (a[0], a[2]) != b[:2]]
    return [row[0] for row in rows], [row[1] for row in rows], [row[2] for row in rows], breaks


def _open_single(files: Files, name: str) -> FileSource:
    check_relative(name)
    if not name.endswith(WEIGHTS):
        raise BadName(f"name {name!r} must end in {WEIGHTS}")
    files.keep([""])
    return FileSource(files, {name: ("", _read_header(files, ""))}, [])


def _open_directory(files: Files, exclude: tuple[str, ...], side_files: bool) -> FileSource:
    def left_out(path: str) -> bool:
        parts = path.split("/")
        if MARKER in parts or parts[0] == ".git":
            return True
        prefixes = ["/".join(parts[: depth + 1]) for depth in range(len(parts))]
        return any(fnmatchcase(text, pattern) for pattern in exclude for text in (*parts, *prefixes))

    paths = files.walk(left_out)
    check_files(paths)
    files.keep(paths)
    weights = [path for path in paths if path.endswith(WEIGHTS)]
    others = [path for path in paths if not path.endswith(WEIGHTS)]
    if not weights:
        raise BadFile(_nothing_here(files, others))
    if not side_files:
        others = [path for path in others if path.endswith(INDEX)]  # which say that all shards are there
    _check_sizes(files, others)

    def side_file(path: str) -> LayoutFile:
        return LayoutFile(path, files.sizes[path], files.read(path, 0, files.sizes[path]))

    def header(path: str) -> Header:
        return _read_header(files, path)

    if files.is_remote:
        with Pool(8) as pool:
            side = list(pool.map(side_file, others))
            headers = list(pool.map(header, weights))
    else:
        side = list(map(side_file, others))
        headers = list(map(header, weights))
    by_path = dict(zip(weights, headers))
    for file in side:
        if file.path.endswith(INDEX):
            _check_index(file, by_path)
    return FileSource(files, {path: (path, header) for path, header in by_path.items()}, side)


def _read_header(files: Files, path: str) -> Header:
    return read_header(lambda start, stop: files.read(path, start, stop), files.sizes[path], files.where(path))


def _nothing_here(files: Files, others: list[str]) -> str:
    pickles = [path for path in others if path.endswith(PICKLES)]
    if pickles:
        return (
            f"{files.root}: has no {WEIGHTS} file, but {pickles[0]!r}: give that file, or convert it with "
            "safetensors.torch.save_file"
        )
    some = ", ".join(map(repr, others[:5])) or "nothing"
    return f"{files.root}: has no {WEIGHTS} file below it (found: {some}): give the folder that has the weights"


def _check_sizes(files: Files, paths: list[str]) -> None:
    total = 0
    for path in paths:
        size = files.sizes[path]
        total += size
        if size > MAX_SIDE_FILE:
            raise BadFile(
                f"{files.where(path)}: a side file of {size >> 20} MiB (at most {MAX_SIDE_FILE >> 20}): "
                f"leave it out with exclude={path!r}"
            )
        if total > MAX_SIDE_FILES:
            raise BadFile(
                f"{files.where(path)}: with it side files have over {MAX_SIDE_FILES >> 20} MiB: leave "
                "some out with `exclude`"
            )


def _check_index(index: LayoutFile, headers: dict[str, Header]) -> None:
    """Check that a shard map says exactly what the shards beside it hold."""
    where = repr(index.path)
    content = strict_json(index.content, where)
    weight_map = content.get("weight_map") if type(content) is dict else None
    if type(weight_map) is not dict or not all(type(file) is str for file in weight_map.values()):
        raise BadFile(f"{where}: has no weight_map of tensor names to file names: write it again")
    folder = index.path.rpartition("/")[0]
    held: dict[str, set[str]] = {}
    for file in sorted(set(weight_map.values())):
        try:
            check_relative(file)
        except BadName as error:
            raise BadFile(f"{where}: names an unsafe file: {error}") from None
        path = f"{folder}/{file}" if folder else file
        if "/" in file or path not in headers:
            raise BadFile(
                f"{where}: names {file!r}, which is not a {WEIGHTS} file beside it: add it, or mend the map"
            )
        held[file] = {tensor[0] for tensor in headers[path].tensors}
    for name, file in weight_map.items():
        if name not in held[file]:
            raise BadFile(f"{where}: says that tensor {shown(name)} is in {file!r}, but it is not: write it again")
    for file, names in held.items():
        for name in sorted(names):
            if weight_map.get(name) != file:
                raise BadFile(f"{where}: does not say that tensor {shown(name)} is in {file!r}: write it again")
