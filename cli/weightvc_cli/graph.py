"""History as lanes: which lines of text stand beside which versions."""

from collections.abc import Callable, Iterator, Sequence


def draw(history: Iterator[tuple[str, Sequence[str], list[str]]], paint: Callable[[str], str] = str) -> Iterator[str]:
    """Lines of `history`, children before parents: (id, parents' ids, lines of text), with the graph before them.

    A lane is a version that is still awaited. After each version its lane goes on to its parents; lanes that await
    the same version run together into the leftmost. `paint` gives a row of lanes its colours.
    """
    lanes: list[str] = []
    for ident, parents, text in history:
        if ident not in lanes:
            lanes.append(ident)
        here = lanes.index(ident)
        wanted = [[lane] if i != here else list(parents) for i, lane in enumerate(lanes)]
        after = list(dict.fromkeys(parent for group in wanted for parent in group))
        edges = [(i, after.index(parent)) for i, group in enumerate(wanted) for parent in group]
        rows = [" ".join("*" if i == here else "|" for i in range(len(lanes)))]
        if any(start != end for start, end in edges):
            rows.append(_links(edges).ljust(2 * len(after) - 1))
        straight = " ".join("|" * len(after))
        rows += [straight] * (len(text) - len(rows))
        width = max(map(len, rows))
        for i, row in enumerate(rows):
            yield f"{paint(row.ljust(width))} {text[i] if i < len(text) else ''}".rstrip()
        lanes = after


def _links(edges: Sequence[tuple[int, int]]) -> str:
    """One row that leads from columns to columns."""
    row = [" "] * (2 * max(max(edge) for edge in edges) + 2)
    for start, end in edges:
        if end < start:
            row[2 * start - 1] = "/"
            between = range(2 * end + 1, 2 * start - 1)
        elif end > start:
            row[2 * end - 1] = "\\"
            between = range(2 * start + 1, 2 * end - 1)
        else:
            row[2 * start] = "|"
            continue
        for i in between:
            if row[i] == " ":
                row[i] = "_"
    return "".join(row).rstrip()
