"""The report as a page: one HTML file of pictures, what they say in words, and tables. It loads nothing.

Whatever comes from a repository goes through escape(), or into JSON inside a compressed script. The browser is told
to fetch nothing (Content-Security-Policy), whatever stands there.
"""

import base64
import gzip
import json
from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING, Any, Final

from weightvc import __version__
from weightvc.history import version_of
from weightvc_cli.output import counted, first_line, iso, share, size, times

if TYPE_CHECKING:
    from weightvc.report.facts import Facts, Row
    from weightvc_cli.pictures import Pictures

ROWS: Final = 100
"""Rows of a table of versions or pulls at most; the newest."""
COLUMNS: Final = 8
"""Versions in a table of layers, at most; the newest."""

Cells = Sequence[str]


def render(facts: "Facts") -> str:
    """The page."""
    from weightvc_cli.pictures import DARK, LIGHT, draw

    pictures = draw(facts)
    script, places = pictures.script()
    body = "".join(_body(facts, pictures, places))
    variables = {
        name: ";".join(f"--{key}:{theme[key]}" for key in ("paper", "ink", "faint", "grid"))
        + f";--link:{theme['series'][0]}"
        for name, theme in (("light", LIGHT), ("dark", DARK))
    }
    style = _STYLE.replace("LIGHT", variables["light"]).replace("DARK", variables["dark"])
    title = escape(f"{facts.url}: weightvc report")
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width,initial-scale=1">\n'
        f"<title>{title}</title>\n<style>{style}</style></head>\n<body>\n{body}\n"
        f'<script type="text/plain" id="library">{_packed(pictures.library())}</script>\n'
        f'<script type="text/plain" id="drawing">{_packed(script)}</script>\n'
        f'<script type="text/plain" id="themes">{_packed(json.dumps(pictures.themes))}</script>\n'
        f"<script>{_SCRIPT}</script>\n</body></html>\n"
    )


def _packed(text: str) -> str:
    """A text for a browser to unpack: a quarter of its bytes, and nothing in it that HTML could take for a tag."""
    return base64.b64encode(gzip.compress(text.encode(), 9, mtime=0)).decode()


_POLICY: Final = (
    "default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; img-src data: blob:; "
    "font-src data:"
)

_STYLE: Final = """
:root{color-scheme:light;LIGHT}
@media (prefers-color-scheme:dark){:root{color-scheme:dark;DARK}}
:root[data-theme=light]{color-scheme:light;LIGHT}
:root[data-theme=dark]{color-scheme:dark;DARK}
body{margin:0 auto;padding:1rem 1.5rem 4rem;max-width:1180px;background:var(--paper);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Helvetica,Arial,"DejaVu Sans",sans-serif}
h1{font-size:1.35rem;margin:0;overflow-wrap:anywhere}h2{font-size:1.1rem;margin:2.6rem 0 .3rem}
header{display:flex;gap:1rem;align-items:start;justify-content:space-between}
p{margin:.3rem 0 .6rem;max-width:78ch}.faint{color:var(--faint)}
button{font:inherit;color:var(--ink);background:var(--paper);border:1px solid var(--faint);border-radius:6px;
padding:.25rem .7rem;cursor:pointer;white-space:nowrap}
.tiles{display:grid;grid-template-columns:repeat(auto-fill,minmax(170px,1fr));gap:.7rem;margin:1.2rem 0}
.tiles div{border:1px solid var(--grid);border-radius:8px;padding:.5rem .8rem}
.tiles b{display:block;font-size:1.2rem;font-weight:600;overflow-wrap:anywhere}
.tiles span{color:var(--faint);font-size:.85rem}
details{margin:.3rem 0}summary{cursor:pointer;color:var(--link)}
.scroll{overflow:auto;max-height:26rem;border:1px solid var(--grid);border-radius:6px}
table{border-collapse:collapse;font-size:13px;width:100%}
th,td{padding:.15rem .6rem;text-align:right;border-bottom:1px solid var(--grid);white-space:nowrap}
th{position:sticky;top:0;background:var(--paper);font-weight:600}
.left{text-align:left}td.wide{white-space:normal;overflow-wrap:anywhere;min-width:14rem}
.notes li{overflow-wrap:anywhere}
"""

_SCRIPT: Final = r"""
(async () => {
  const root = document.documentElement, button = document.getElementById("theme");
  const system = matchMedia("(prefers-color-scheme: dark)");
  const dark = () => (root.dataset.theme || (system.matches ? "dark" : "light")) == "dark";
  const unpack = async (id) => {
    const bytes = Uint8Array.from(atob(document.getElementById(id).textContent), (c) => c.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return await new Response(stream).text();
  };
  let themes = [];
  const paint = () => {
    button.textContent = dark() ? "light colours" : "dark colours";
    const changes = new Map();
    for (const [id, name, light, night] of themes) {
      if (!changes.has(id)) changes.set(id, {});
      changes.get(id)[name] = dark() ? night : light;
    }
    for (const doc of window.Bokeh ? Bokeh.documents : [])
      for (const [id, values] of changes) {
        const model = doc.get_model_by_id(id);
        if (model) model.setv(values);
      }
  };
  button.addEventListener("click", () => { root.dataset.theme = dark() ? "light" : "dark"; paint(); });
  system.addEventListener("change", paint);
  paint();
  const run = (code) => {
    const script = document.createElement("script");
    script.textContent = code;
    document.head.append(script);
  };
  try {
    run(await unpack("library"));
    themes = JSON.parse(await unpack("themes"));
    run(await unpack("drawing"));
    const wait = () => Bokeh.documents.length ? (paint(), root.dataset.drawn = "yes") : setTimeout(wait, 20);
    wait();
  } catch (error) {
    document.getElementById("undrawn").hidden = false;
    throw error;
  }
})();
"""


# What stands there


def _body(facts: "Facts", pictures: "Pictures", places: dict[str, str]) -> Iterable[str]:
    made = iso(int(facts.made * 1e6))[:19] + "Z"
    yield (
        f"<header><div><h1>{escape(facts.url)}</h1>"
        f'<p class="faint">made {made} by weightvc {escape(__version__)}, of operation {facts.sequence}</p></div>'
        '<button id="theme" type="button">colours</button></header>\n'
        '<p id="undrawn" hidden>The pictures need a browser that unpacks gzip (any of 2023 or later); the tables '
        "do not.</p>\n<noscript><p>The pictures need JavaScript; the tables do not.</p></noscript>\n"
    )
    yield _tiles(facts)
    if facts.notes:
        items = "".join(f"<li>{escape(note)}</li>" for note in facts.notes)
        yield f'<h2>What is missing here</h2><ul class="notes">{items}</ul>\n'

    def section(title: str, text: str, names: Sequence[str], table: str) -> str:
        drawn = "".join(places[name] for name in names if name in places)
        return f"<section><h2>{escape(title)}</h2><p>{escape(text)}</p>{drawn}{table}</section>\n"

    if facts.rows:
        yield from _versions(facts, section)
    yield from _layers(facts, section)
    yield section(
        "What is stored",
        "All that the catalogue names, whatever branch it is on: bases are versions stored whole; patches of commits "
        "are on the first parent; longer patches were added by compaction. The rest of a version is its digests, "
        "block indexes, layout and small files. "
        + (
            "Garbage is what nothing names: killed commits, expired versions, what writers upload just now."
            if facts.listed
            else "Objects could not be listed, so garbage is not known."
        ),
        ["storage"],
        _table(
            "storage by kind",
            ("kind", "bytes", "size", "number"),
            [(one.kind, str(one.nbytes), size(one.nbytes), str(one.count)) for one in facts.stored],
            left=(0,),
        ),
    )
    yield from _told(facts, section)


def _tiles(facts: "Facts") -> str:
    tiles: list[tuple[str, str]] = [
        (str(len(facts.rows) + facts.older), "versions of branches and tags"),
        (f"{len(facts.branches)} / {len(facts.tags)}", "branches / tags"),
    ]
    if (head := facts.head) is not None:
        version = version_of(head.entry)
        step = f"step {version.step}" if version.step is not None else version.short
        tiles.append(
            (step, f"newest of {facts.default}: {version.short}, {iso(version.time)[:16].replace('T', ' ')} UTC")
        )
        tiles.append((size(version.nbytes), f"whole, {version.elements:,} elements"))
        if (cold := head.cold) is not None:
            way = f"{counted(cold.patches, 'patch', 'patches')}, {counted(cold.requests, 'object')}"
            tiles.append((size(cold.nbytes), f"a cold pull of it: {way}"))
    kept = [row for row in facts.rows if row.entry.place is not None]
    stored = sum(row.entry.place.nbytes for row in kept if row.entry.place is not None)
    whole = sum(version_of(row.entry).nbytes for row in kept)
    if stored:
        tiles.append((times(whole / stored), f"smaller than whole: {size(stored)} for {size(whole)}"))
    garbage = sum(one.nbytes for one in facts.stored if one.garbage)
    tiles.append((size(garbage) if facts.listed else "not known", "garbage"))
    shown = "".join(f"<div><b>{escape(value)}</b><span>{escape(what)}</span></div>" for value, what in tiles)
    return f'<div class="tiles">{shown}</div>\n'


def _table(caption: str, head: Cells, rows: Iterable[Cells], left: Sequence[int] = (), wide: int = -1) -> str:
    """A table that can be opened below a picture: the same in words."""

    def cells(tag: str, row: Cells) -> str:
        out = []
        for i, text in enumerate(row):
            kind = ' class="left wide"' if i == wide else ' class="left"' if i in left else ""
            scope = ' scope="col"' if tag == "th" else ""
            out.append(f"<{tag}{scope}{kind}>{escape(text)}</{tag}>")
        return f"<tr>{''.join(out)}</tr>"

    body = "".join(cells("td", row) for row in rows)
    return (
        f"<details><summary>as a table: {escape(caption)}</summary>"
        f'<div class="scroll" tabindex="0"><table><thead>{cells("th", head)}</thead>'
        f"<tbody>{body}</tbody></table></div>"
        "</details>"
    )


# Versions


def _versions(facts: "Facts", section: Any) -> Iterable[str]:
    newest = list(reversed(facts.rows[-ROWS:]))
    some = f", the newest {len(newest)} (all: weightvc log --all --json)" if len(facts.rows) > len(newest) else ""
    named: dict[str, list[str]] = {}
    for what, names in (("branch", facts.branches), ("tag", facts.tags)):
        for name, ident in names.items():
            named.setdefault(ident, []).append(f"{what} {name}")
    left_out = f" {facts.older:,} older versions are not drawn." if facts.older else ""

    def table(caption: str, head: Cells, of: Any, wide: bool = False) -> str:
        rows = [(*_who(row), *of(row)) for row in newest]
        count = 3 + len(head)
        return _table(
            caption + some,
            ("version", "step", "branch", *head),
            rows,
            left=(0, 2, *((3, 4) if wide else ())),
            wide=count - 1 if wide else -1,
        )

    yield section(
        "Versions",
        "Each version, its parents, and what points at it: [branches] in brackets, tags without. Point at one to "
        "read it; drag, or choose a box or the wheel to zoom: the pictures of versions move together." + left_out,
        ["graph"],
        table(
            "versions",
            ("made (UTC)", "points here", "message"),
            lambda row: (
                iso(version_of(row.entry).time)[:19].replace("T", " "),
                ", ".join(named.get(row.ident, [])),
                first_line(version_of(row.entry).message)[:200] + (" (expired)" if row.entry.gone else ""),
            ),
            wide=True,
        ),
    )
    same = sum(row.entry.changed == 0 for row in facts.rows)
    none = (
        f" {counted(same, 'version')} changed nothing, and {'is' if same == 1 else 'are'} not drawn." if same else ""
    )
    yield section(
        "How much changed",
        "Elements that differ from the first parent's, of all. A version that was only stored whole counts as "
        "changed in all." + none,
        ["density"],
        table(
            "density",
            ("elements changed", "of", "share"),
            lambda row: (
                str(row.entry.changed),
                str(version_of(row.entry).elements),
                share(row.entry.density),
            ),
        ),
    )
    yield section(
        "What commits stored",
        "All objects of a commit together: its patch, its base if it has one, digests, indexes, layout.",
        ["stored"],
        table(
            "bytes",
            ("stored, bytes", "patch, bytes", "base, bytes"),
            lambda row: (
                str(row.entry.place.nbytes if row.entry.place else 0),
                str(row.entry.patch.nbytes) if row.entry.patch else "none",
                str(row.entry.base.nbytes) if row.entry.base else "none",
            ),
        ),
    )
    yield section(
        "How many times smaller",
        "The whole version's bytes over what its commit stored.",
        ["smaller"],
        table(
            "times smaller",
            ("whole, bytes", "stored, bytes", "times smaller"),
            lambda row: (
                str(version_of(row.entry).nbytes),
                str(row.entry.place.nbytes if row.entry.place else 0),
                "none" if row.smaller is None else f"{row.smaller:.2f}",
            ),
        ),
    )
    yield section(
        "What a host that holds nothing pulls",
        "By the cheapest way: a base, and patches from there (weightvc plan nothing VERSION). Where these are many, "
        "run weightvc compact.",
        ["depth", "cold"],
        table(
            "cold pulls",
            ("patches", "bytes", "objects"),
            lambda row: (
                ("none", "none", "none")
                if row.cold is None
                else (str(row.cold.patches), str(row.cold.nbytes), str(row.cold.requests))
            ),
        ),
    )


def _who(row: "Row") -> tuple[str, str, str]:
    version = version_of(row.entry)
    return version.short, "none" if version.step is None else str(version.step), row.entry.name or "none"


# Layers


def _layers(facts: "Facts", section: Any) -> Iterable[str]:
    if (made := facts.changes) is not None:
        of = f"{counted(len(made.versions), 'version')} of {facts.default}"
        if made.whole:
            which = f"Of the newest {of}, read whole: these are the numbers of weightvc diff."
        else:
            which = f"Of the newest {of}, from {share(made.share)} of the weights, in blocks from all over them."
        newest = range(max(0, len(made.versions) - COLUMNS), len(made.versions))
        yield section(
            "Changed share by layer and step",
            f"{which} What did not change at all has no colour.",
            ["layers"],
            _table(
                "elements changed by layer, of those that were read",
                ("layer", "read", *(_column(made.versions[i]) for i in newest)),
                [
                    (name, str(made.read[layer]), *(str(made.changed[i][layer]) for i in newest))
                    for layer, name in enumerate(made.layers)
                ],
                left=(0,),
            ),
        )
        if made.steps:
            from weightvc_cli.pictures import move

            total: dict[int, int] = {}
            for (exponent, _), count in made.steps.items():
                total[exponent] = total.get(exponent, 0) + count
            yield section(
                "Moves by exponent",
                f"{which} How far floating elements moved, in representable values (ULP; + is up), as a share of "
                "those that changed with that exponent of the old value.",
                ["ulp"],
                _table(
                    "moves by exponent",
                    ("old exponent", "move, ULP", "elements", "of that exponent"),
                    [
                        (str(exponent), move(step), str(count), share(count / total[exponent]))
                        for (exponent, step), count in sorted(made.steps.items())
                    ],
                ),
            )
    if (found := facts.weights) is not None:
        newest = range(max(0, len(found.versions) - COLUMNS), len(found.versions))
        chosen = f"{len(found.versions)} of {found.of}" if found.of > len(found.versions) else str(found.of)
        yield section(
            "Patches by layer, over the whole run",
            f"Bits of patch for each element of a layer, from the block indexes of {chosen} versions, evenly in the "
            f"history of {facts.default}. A few bits are spent on each change, so this follows what changed; a block "
            "of several small tensors is shared out by their bytes.",
            ["patches"],
            _table(
                "bytes of patches by layer",
                ("layer", "elements", *(_column(found.versions[i]) for i in newest)),
                [
                    (name, str(found.elements[layer]), *(f"{found.nbytes[i][layer]:.0f}" for i in newest))
                    for layer, name in enumerate(found.layers)
                ],
                left=(0,),
            ),
        )


def _column(entry: Any) -> str:
    version = version_of(entry)
    return f"step {version.step}" if version.step is not None else version.short


# Metrics


def _told(facts: "Facts", section: Any) -> Iterable[str]:
    pulls = [(one.name, pull) for one in facts.told for pull in one.pulls]
    if pulls:
        yield section(
            "Pulls of hosts",
            "From the files that weightvc follow --json wrote: how old a version was when a host had verified it, "
            "and how many versions the host was behind before.",
            ["lag", "behind"],
            _table(
                f"the newest {min(ROWS, len(pulls))} pulls",
                ("file", "version", "age, s", "versions behind", "took, s", "fetched, bytes"),
                [
                    (
                        name,
                        pull.version[:12],
                        f"{pull.age:.2f}",
                        "not known" if pull.lag is None else str(pull.lag),
                        f"{pull.seconds:.2f}",
                        str(pull.nbytes),
                    )
                    for name, pull in reversed(pulls[-ROWS:])
                ],
                left=(0, 1),
            ),
        )
    runs = sorted(((run, one.name) for one in facts.told for run in one.runs), key=lambda pair: pair[0].time)
    if runs:
        yield section(
            "Runs of jobs",
            "From the files of --metrics and --prometheus: what was live, what was garbage, and what was deleted.",
            ["runs"],
            _table(
                f"the newest {min(ROWS, len(runs))} runs",
                ("ended (UTC)", "file", "command", "ok", "numbers"),
                [
                    (
                        iso(int(run.time * 1e6))[:19].replace("T", " "),
                        name,
                        run.command,
                        "yes" if run.ok else "no",
                        ", ".join(f"{what} {value:g}" for what, value in sorted(run.numbers.items())),
                    )
                    for run, name in reversed(runs[-ROWS:])
                ],
                left=(0, 1, 2, 3, 4),
                wide=4,
            ),
        )
