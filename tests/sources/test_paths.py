import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightvc.errors import BadFile, BadName
from weightvc.sources.paths import check_relative, check_together


@pytest.mark.parametrize(
    "path",
    [
        "",
        "/",
        "/etc/x",
        "../../s.safetensors",
        "a/../b",
        "..",
        ".",
        "./a",
        "a/./b",
        "a//b",
        "a/",
        "a\\..\\b",
        "C:x",
        "c:",
        "a/C:/x",
        "a\0b",
        "a\nb",
        "a\x7fb",
        "a\x85b",
        "\ud800",
        "x" * 256,
        "é" * 128,
        "a/" + "x" * 256,
        "/".join(["x" * 200] * 21),
        "/".join(["x" * 100] * 11),
        ".weightvc",
        ".weightvc/x",
        "a/.weightvc",
        "a/.WeightVC/b",
    ],
)
def test_unsafe_paths_are_refused(path):
    with pytest.raises(BadName):
        check_relative(path)


@pytest.mark.parametrize(
    "path",
    ["a", "a/b.c", "...", ".hidden", ".weightvc.d", "x/" * 511 + "y", "a b", "é" * 127, "x" * 255, "unet/xy:z", "-x"],
)
def test_safe_paths_are_returned(path):
    assert check_relative(path) == path


@given(st.text(st.sampled_from("./\\C:a\0é\ud800"), max_size=8))
def test_what_is_accepted_stays_below_its_root(path):
    try:
        check_relative(path)
    except BadName:
        return
    import os.path

    assert os.path.normpath(f"/root/x/{path}") == f"/root/x/{path}"
    path.encode()


@pytest.mark.parametrize(
    ("paths", "named"),
    [
        (["a", "A"], ["'a'", "'A'"]),
        (["é", "e\u0301"], ["'é'", "'e\u0301'"]),
        (["É", "e\u0301"], ["'É'", "'e\u0301'"]),
        (["straße", "STRASSE"], ["'straße'", "'STRASSE'"]),
        (["d/x", "D/y"], ["'d'", "'D'"]),
        (["d/e/x", "d/E/y"], ["'d/e'", "'d/E'"]),
        (["A", "a/x"], ["'A'", "'a'"]),
        (["a", "a/x"], ["'a'"]),
    ],
)
def test_paths_that_some_systems_confuse_are_refused_by_name(paths, named):
    for order in (paths, paths[::-1]):
        with pytest.raises(BadFile) as caught:
            check_together(order)
        assert all(name in str(caught.value) for name in named)


def test_distinct_paths_pass():
    check_together(["a", "b/a", "b/c/a", "b/c/d", "é", "e"])
