"""What is in a report, and that it stays a page of a bearable size."""

import json
import re
from dataclasses import replace
from html import unescape
from importlib.resources import files

import numpy as np
import pytest
from tests.lab.report_parts import HOSTILE, parts

from kvist.lab.curves import Curve, References, knee
from kvist.lab.report import PrefixIcicle, html_report
from kvist.lab.report.contents import contents_of


@pytest.fixture(scope="module")
def given():
    return parts()


@pytest.fixture(scope="module")
def page(given):
    return html_report(**given)


def embedded(page):
    """What the script of a page reads."""
    (told,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    return json.loads(told)


def cells(page):
    return [unescape(cell) for cell in re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", page, re.DOTALL)]


def test_names_from_traces_cannot_leave_their_place(page):
    """The page has the two scripts and the one style of its own, and no picture."""
    assert len(re.findall("<script", page)) == len(re.findall("</script", page)) == 2
    assert "<img" not in page
    assert "<" not in page.partition('id="data">')[2].partition("</script>")[0]
    assert embedded(page)["icicle"]["label"][2] == HOSTILE
    assert HOSTILE in cells(page)


def test_the_page_allows_itself_nothing_but_what_it_has(page):
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy.startswith("default-src 'none'; img-src data:; style-src 'sha256-")
    assert "unsafe" not in policy
    outside = re.sub(r"http://www\.w3\.org/2000/svg", "", page)
    assert not re.findall(r"https?:|@import|url\(|\bfetch\(|XMLHttpRequest|innerHTML", outside)


def test_equal_numbers_make_equal_pages(given, page):
    assert html_report(**given) == page


def test_tables_have_what_the_pictures_show(given, page):
    rate = given["results"][0].hit_rate_blocks
    assert f"{rate:.2%}" in cells(page)
    for name in ("lru", "optimal", "lru, sampled", "replayed lru", "replayed lru + host", "device", "in acme"):
        assert name in cells(page), name
    assert page.count("<table>") == page.count("<caption>") >= 8


def test_parts_that_are_missing_have_no_section(given):
    only_curves = html_report("curves", given["curves"])
    assert re.findall("<h2>(.*?)</h2>", only_curves) == ["Trace", "Hit rate over cache size"]
    only_results = html_report("results", results=given["results"])
    shown = re.findall("<h2>(.*?)</h2>", only_results)
    assert shown[1:] == [
        "Hit rate over cache size",
        "Hit rate over time",
        "Miss classes",
        "Occupancy by tier and namespace",
    ]


def test_a_large_trace_makes_a_page_of_bounded_size(given):
    """A million references, a curve with 200,000 sizes, 200 replays and 500 namespaces."""
    random = np.random.default_rng(1)
    num_requests = 100_000
    tails = np.arange(1, num_requests + 1, dtype=np.int64)
    ids = np.stack([np.zeros(num_requests, np.int64), *(tails + n * num_requests for n in range(9))], axis=1).ravel()
    ids = np.unique(ids, return_inverse=True)[1].reshape(ids.shape)
    order = np.argsort(np.unique(ids, return_index=True)[1])
    dense = np.empty_like(order)
    dense[order] = np.arange(len(order))
    references = References(dense[ids], np.arange(0, 10 * num_requests + 1, 10), 16)
    curve = Curve("lru", np.arange(1, 200_001), np.sort(random.random(200_000)))
    point = {"time_s": 1.0, "hit_rate": 0.5, "occupancy": {"device": 9}}
    series = [point | {"by_namespace": {f"tenant {n}": n + 1 for n in range(500)}} for _ in range(128)]
    results = [replace(given["results"][0], name=f"replay {n}", series=series) for n in range(200)]
    page = html_report("large", [curve], results, references, PrefixIcicle.of(references))
    assert len(page) < 1_500_000
    shown = embedded(page)
    assert len(shown["curves"][0]["x"]) <= 256
    assert [len(each["time"]) > 0 for each in shown["results"]] == [True] * 12 + [False] * 188
    assert [each["name"] for each in shown["results"][0]["namespaces"]][-1] == "493 others"
    assert "Of 200 replays, the first 12 are shown in the course of time." in page
    assert "Of 100,001 runs of blocks in the prefix tree, the 4,000 that most requests begin with are shown" in page


def test_replays_of_one_name_are_told_apart(given):
    result = given["results"][0]
    contents = contents_of("twice", results=[result, result])
    assert [each.name for each in contents.replays] == [result.name, f"{result.name} (2)"]


def test_what_was_interrupted_or_sampled_is_said(given):
    partial = replace(given["results"][0], is_complete=False, name="stopped")
    contents = contents_of("x", given["curves"], [partial], given["references"].sampled(0.5))
    assert any("sample of 50.000%" in note for note in contents.notes)
    assert any(note.endswith("was replayed: stopped.") for note in contents.notes)


def test_the_knee_is_told(given, page):
    found = knee(given["curves"][0])
    assert f"The knee of lru is at {found.num_blocks:,} blocks, {found.hit_rate:.1%}" in page
    assert "The knee" not in html_report("x", [Curve("lru", np.array([1]), np.array([0.0]))])


def test_the_device_is_the_lowest_of_the_tiers(given):
    contents = contents_of("x", results=given["results"])
    assert [each.name for each in contents.replays[2].tiers] == ["device", "host"]


# -- colours ----------------------------------------------------------------------------------------------------------


def palettes():
    """The colours of the page's themes by name; what the dark ones do not say is as in the light one."""
    style = files("kvist.lab.report").joinpath("page.css").read_text(encoding="utf-8")
    blocks = re.findall(r":root[^{]*\{([^}]*--page[^}]*)\}", style)
    found = [dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", block)) for block in blocks]
    assert len(found) == 3
    return {"light": found[0], "dark by the system": found[1], "dark by choice": found[2]}


def contrast(one, other):
    """The ratio of WCAG 2.2."""

    def luminance(colour):
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("theme", ["light", "dark by the system", "dark by choice"])
def test_text_and_lines_can_be_told_from_what_is_behind_them(theme):
    colours = palettes()[theme]
    texts = [("text", "page"), ("text", "card"), ("quiet", "page"), ("quiet", "card"), ("quiet", "grid")]
    texts += [(f"t{step}", f"n{step}") for step in range(5)]
    assert [(pair, ratio) for pair in texts if (ratio := contrast(*(colours[name] for name in pair))) < 4.5] == []
    lines = [(f"c{number}", "card") for number in range(8)] + [("focus", "card")]
    assert [(pair, ratio) for pair in lines if (ratio := contrast(*(colours[name] for name in pair))) < 3] == []


def test_both_ways_to_the_dark_theme_have_equal_colours():
    found = palettes()
    assert found["dark by the system"] == found["dark by choice"]
    assert found["light"].keys() == found["dark by choice"].keys()
