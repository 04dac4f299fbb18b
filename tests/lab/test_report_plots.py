"""The pictures as files."""

import sys

import numpy as np
import pytest
from tests.lab.report_parts import parts

from kvist import ArgumentError
from kvist.lab.report import PICTURES, save_plot

pytest.importorskip("matplotlib")


@pytest.fixture(scope="module")
def given():
    return parts()


@pytest.mark.parametrize("picture", PICTURES)
def test_every_picture_is_drawn_as_png(given, picture, tmp_path):
    """Names with dollar signs, which begin formulas, are drawn as they are."""
    from matplotlib.image import imread

    save_plot(tmp_path / "plot.png", picture, **given, replay=2)
    pixels = imread(tmp_path / "plot.png")
    assert pixels.shape[:2] == (675, 1200)
    colours = (pixels[..., :3] * 255).round().astype(int) @ [65536, 256, 1]
    assert len(np.unique(colours)) > 20


@pytest.mark.parametrize("picture", PICTURES)
def test_equal_numbers_make_equal_svg_files(given, picture, tmp_path):
    for name in ("one.svg", "other.svg"):
        save_plot(tmp_path / name, picture, **given)
    text = (tmp_path / "one.svg").read_text(encoding="utf-8")
    assert text.startswith("<?xml")
    assert "<script" not in text
    assert text == (tmp_path / "other.svg").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("picture", "name", "message"),
    [
        ("pie", "x.png", "picture is 'pie', must be one of hit-rate, time, occupancy, misses, reuse, icicle"),
        ("hit-rate", "x.pdf", r"path is '.*x.pdf', must end in .png or .svg"),
        ("hit-rate", "x.png", "there is nothing to draw for 'hit-rate': it needs curves or results"),
        ("occupancy", "x.png", "it needs a result of that number"),
        ("icicle", "x.png", "it needs a tree"),
    ],
)
def test_what_cannot_be_drawn_is_told_and_makes_no_file(picture, name, message, tmp_path):
    with pytest.raises(ArgumentError, match=message):
        save_plot(tmp_path / name, picture)
    assert list(tmp_path.iterdir()) == []


def test_without_matplotlib_the_extra_is_named(given, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"plots need matplotlib.figure; pip install 'kvist\[lab\]'"):
        save_plot(tmp_path / "x.png", "time", **given)
