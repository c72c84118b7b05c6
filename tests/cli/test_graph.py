from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from weightvc_cli.graph import draw


def _draw(history: Sequence[tuple[str, str]]) -> list[str]:
    return list(draw((ident, list(parents), [ident]) for ident, parents in history))


def test_a_line() -> None:
    assert _draw([("c", "b"), ("b", "a"), ("a", "")]) == ["* c", "* b", "* a"]


def test_two_merges_of_three_lanes() -> None:
    assert _draw([("f", "ed"), ("e", "cb"), ("d", "a"), ("c", "a"), ("b", "a"), ("a", "")]) == [
        "*   f",
        "|\\",
        "* |   e",
        "|\\ \\",
        "| | * d",
        "* | | c",
        "|_|/",
        "| * b",
        "|/",
        "* a",
    ]


def test_roots_end_their_lanes() -> None:
    assert _draw([("d", "b"), ("c", "a"), ("b", ""), ("a", "")]) == ["* d", "| * c", "* | b", " /", "* a"]


def test_text_keeps_its_lines() -> None:
    lines = list(draw(iter([("b", ["a"], ["one", "two", ""]), ("a", [], ["three", "four"])])))
    assert lines == ["* one", "| two", "|", "* three", "  four"]


@st.composite
def _histories(drawn: st.DrawFn) -> list[tuple[str, list[str]]]:
    count = drawn(st.integers(1, 12))
    names = [f"v{i}" for i in range(count)]
    history = []
    for i, name in enumerate(names):
        later = names[i + 1 :]
        parents = drawn(st.lists(st.sampled_from(later), max_size=3, unique=True)) if later else []
        history.append((name, parents))
    return history


@given(_histories())
def test_every_version_stands_once_in_a_lane_of_its_own(history: list[tuple[str, list[str]]]) -> None:
    lines = list(draw((name, parents, [name]) for name, parents in history))
    stars = [line for line in lines if "*" in line]
    assert [line.split()[-1] for line in stars] == [name for name, _ in history]
    assert all(line.count("*") == 1 for line in stars)
    assert set("".join(lines)) <= set("*|/\\_ v0123456789")
