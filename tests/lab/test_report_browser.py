"""The report in a real browser: nothing goes wrong, the pictures are there, clicking and keys work.

Screenshots are kept in build/report.
"""

from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.lab.browser import chromium
from tests.lab.report_parts import HOSTILE, parts

from kvist.lab.report import PrefixIcicle, html_report

SCREENSHOTS = Path(__file__).parents[2] / "build" / "report"
PICTURES = ("hit-rate", "time", "occupancy", "misses", "reuse", "icicle")


@pytest.fixture(scope="module")
def browser():
    with chromium() as launched:
        yield launched


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    file = tmp_path_factory.mktemp("report") / "report.html"
    file.write_text(html_report(**parts()), encoding="utf-8")
    return file


@contextmanager
def opened(browser, file, width=1600, scheme="light", **settings):
    """The page in a window of its own, which must have said nothing and fetched nothing when it is closed."""
    settings = {"viewport": {"width": width, "height": 1000}, "color_scheme": scheme, "offline": True} | settings
    context = browser.new_context(**settings)
    page = context.new_page()
    said, fetched = [], []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: fetched.append(request.url))
    page.goto(file.as_uri())
    if settings.get("java_script_enabled", True):
        page.wait_for_selector("html[data-ready]", state="attached")
    yield page
    assert said == []
    assert [url for url in fetched if url != "data:,"] == [file.as_uri()]
    context.close()


def picture(page, name):
    return page.locator(f"[data-picture={name}]")


def boxes(page):
    return picture(page, "icicle").locator("g[role=treeitem]")


def crumbs(page):
    return picture(page, "icicle").locator("nav li").all_inner_texts()


def focused(page):
    return page.evaluate("document.activeElement.getAttribute('aria-label')")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1600])
def test_every_picture_is_there_and_nothing_is_wider_than_the_window(browser, report, width, scheme):
    with opened(browser, report, width, scheme) as page:
        for name in PICTURES:
            (svg, *_) = picture(page, name).locator("svg:visible").all()
            assert svg.bounding_box()["width"] > 300, name
            assert svg.bounding_box()["height"] > 80, name
        assert picture(page, "hit-rate").locator("path.line").count() == 3
        assert picture(page, "hit-rate").locator("svg[role=img] path.point").count() == 3
        assert picture(page, "time").locator("path.line").count() == 3
        assert picture(page, "occupancy").locator("path.area").count() == 3
        assert picture(page, "misses").locator("rect.bar").count() >= 3
        assert picture(page, "reuse").locator("rect.bar").count() == 9
        assert boxes(page).count() > 20
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=SCREENSHOTS / f"{width}-{scheme}.png", full_page=True)


def test_no_text_lies_outside_its_picture_or_over_another(browser, report):
    """Labels of one axis: each within the picture, none over the next one."""
    for width in (400, 1600):
        with opened(browser, report, width) as page:
            for svg in page.locator("svg[role=img]:visible").all():
                frame = svg.bounding_box()
                found = [text.bounding_box() for text in svg.locator("g.axis text").all()]
                assert all(box["x"] >= frame["x"] - 1 for box in found)
                assert all(box["x"] + box["width"] <= frame["x"] + frame["width"] + 1 for box in found)
                assert not [(one, other) for one in found for other in found if one is not other and meet(one, other)]


def meet(one, other):
    across = one["x"] < other["x"] + other["width"] and other["x"] < one["x"] + one["width"]
    down = one["y"] + 2 < other["y"] + other["height"] and other["y"] + 2 < one["y"] + one["height"]
    return across and down


def test_names_from_traces_are_shown_as_text_and_never_run(browser, report):
    with opened(browser, report) as page:
        assert page.evaluate("window.hacked") is None
        assert page.locator("img").count() == 0
        assert page.locator("script").count() == 2
        assert page.title() == f"Prefix cache report: {HOSTILE}"
        assert HOSTILE in picture(page, "occupancy").text_content()
        assert any(HOSTILE in label for label in boxes(page).evaluate_all("all => all.map(each => each.ariaLabel)"))


def test_the_policy_of_the_page_forbids_other_scripts(browser, report):
    context = browser.new_context(offline=True)
    page = context.new_page()
    page.goto(report.as_uri())
    page.evaluate(
        "() => { const s = document.createElement('script'); s.text = 'window.x = 1'; document.body.append(s) }"
    )
    assert page.evaluate("window.x") is None
    context.close()


def test_clicking_a_box_zooms_in_and_the_path_leads_back(browser, report):
    with opened(browser, report) as page:
        assert crumbs(page) == ["all requests"]
        boxes(page).nth(1).click()
        assert len(crumbs(page)) == 2
        page.screenshot(path=SCREENSHOTS / "zoomed.png", full_page=True)
        below = boxes(page).nth(1)
        label = below.get_attribute("aria-label")
        below.click()
        assert len(crumbs(page)) == 3
        assert boxes(page).first.get_attribute("aria-label") == label
        assert picture(page, "icicle").locator("output").text_content().startswith(label)
        boxes(page).first.click()
        assert len(crumbs(page)) == 2
        picture(page, "icicle").get_by_role("button", name="all requests").click()
        assert crumbs(page) == ["all requests"]


def test_the_tree_is_walked_and_zoomed_with_keys(browser, report):
    with opened(browser, report) as page:
        boxes(page).first.focus()
        assert focused(page).startswith("all requests: 60 requests")
        page.keyboard.press("ArrowDown")
        first = focused(page)
        assert first.startswith("acme: 30 requests, 50.0 % of those above it") or HOSTILE in first
        page.keyboard.press("ArrowRight")
        assert focused(page) != first
        page.keyboard.press("ArrowLeft")
        assert focused(page) == first
        page.keyboard.press("Enter")
        assert len(crumbs(page)) == 2
        assert focused(page) == first
        page.keyboard.press("ArrowDown")
        assert "blocks 0–2: 30 requests, 100.0 %" in focused(page)
        assert "12 tokens, 348 of them found again by later requests" in focused(page)
        page.keyboard.press(" ")
        assert len(crumbs(page)) == 3
        page.keyboard.press("ArrowUp")
        page.keyboard.press("Escape")
        page.keyboard.press("Escape")
        assert crumbs(page) == ["all requests"]
        assert focused(page).startswith("all requests: 60 requests")


def test_plots_are_read_with_the_pointer_and_with_keys(browser, report):
    with opened(browser, report) as page:
        plot = picture(page, "hit-rate")
        plot.locator("svg[role=img]").hover()
        assert "tokens: lru " in plot.locator("output").text_content()
        plot.locator("svg[role=img]").focus()
        page.keyboard.press("End")
        end = plot.locator("output").text_content()
        page.keyboard.press("ArrowLeft")
        assert plot.locator("output").text_content() != end
        for name in ("misses", "reuse"):
            picture(page, name).locator("svg[role=img]").focus()
            page.keyboard.press("ArrowRight")
            assert "%" in picture(page, name).locator("output").text_content()


def test_a_legend_takes_a_line_out_and_brings_it_back(browser, report):
    with opened(browser, report) as page:
        plot = picture(page, "hit-rate")
        button = plot.get_by_role("button", name="optimal")
        button.click()
        assert (plot.locator("path.line").count(), button.get_attribute("aria-pressed")) == (2, "false")
        button.press("Enter")
        assert (plot.locator("path.line").count(), button.get_attribute("aria-pressed")) == (3, "true")


def test_another_replay_can_be_chosen(browser, report):
    with opened(browser, report) as page:
        plot = picture(page, "occupancy")
        plot.locator("select").select_option(index=2)
        assert plot.locator("ul.legend").first.locator("li").all_inner_texts() == ["device", "host"]


def test_colours_follow_the_system_or_the_reader(browser, report):
    ground = "getComputedStyle(document.body).backgroundColor"
    with opened(browser, report, scheme="dark") as page:
        dark = page.evaluate(ground)
        page.get_by_role("button", name="Light").click()
        light = page.evaluate(ground)
        page.get_by_role("button", name="Dark").click()
        assert page.evaluate(ground) == dark != light
        page.get_by_role("button", name="Auto").click()
        page.emulate_media(color_scheme="light")
        assert page.evaluate(ground) == light


def test_everything_that_can_be_operated_has_a_name(browser, report):
    with opened(browser, report) as page:
        operated = page.locator("button, select, svg[role], g[role], [tabindex]")
        is_nameless = "(each) => !(each.ariaLabel || each.labels?.length || each.textContent.trim())"
        assert operated.evaluate_all(f"all => all.filter({is_nameless}).length") == 0
        reached = set()
        for _ in range(60):
            page.keyboard.press("Tab")
            reached.add(page.evaluate("document.activeElement.closest('[data-picture]')?.dataset.picture"))
        assert reached >= set(PICTURES)


def test_without_scripts_there_are_tables(browser, report):
    with opened(browser, report, java_script_enabled=False) as page:
        assert page.locator("table:visible").count() >= 8
        assert page.locator(".needs-script:visible").count() == 0
        assert "Hit rate over cache size" in page.locator("caption").all_inner_texts()
        assert page.locator("html").get_attribute("data-ready") is None
        page.screenshot(path=SCREENSHOTS / "without-scripts.png", full_page=True)


def test_boxes_too_narrow_to_be_seen_are_one_that_can_be_zoomed_into(browser, tmp_path):
    """3,000 prompts that share a block and nothing else."""
    file = tmp_path / "wide.html"
    file.write_text(html_report("wide", tree=PrefixIcicle.of(star(3000), max_nodes=2000)), encoding="utf-8")
    with opened(browser, file) as page:
        labels = boxes(page).evaluate_all("all => all.map(each => each.ariaLabel)")
        assert len(labels) == 4
        assert any(label.startswith("1,001 more, left out of this page, with 1,001 requests") for label in labels)
        boxes(page).filter(has_text="1,999 narrow ones").click()
        assert crumbs(page) == ["all requests", "block 0", "1,999 narrow ones"]
        assert 20 < boxes(page).count() < 60
        boxes(page).last.click()
        assert crumbs(page)[-1].endswith("narrow ones")
        assert len(crumbs(page)) == 4


def test_a_report_of_nothing_is_a_page_all_the_same(browser, tmp_path):
    file = tmp_path / "nothing.html"
    file.write_text(html_report("nothing"), encoding="utf-8")
    with opened(browser, file) as page:
        assert page.locator("h2").all_inner_texts() == ["Trace"]


def star(num_requests):
    """References of prompts that share their first block."""
    import numpy as np

    from kvist.lab.curves import References

    ids = np.zeros(2 * num_requests, np.int64)
    ids[1::2] = np.arange(1, num_requests + 1)
    return References(ids, np.arange(0, 2 * num_requests + 1, 2), block_size=16)
