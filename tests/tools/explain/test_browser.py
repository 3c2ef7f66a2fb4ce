"""The page in a real browser without a screen: it plays, steps, shows the right numbers, and asks nobody for anything.

Chromium is looked for on the path; ``MGPU_TEST_BROWSER`` names it, and then it must be there.
"""

import os
import shutil

import pytest
import torch
from torch.nn import functional

import mgpu_core
from mgpu_core import comm

pytestmark = pytest.mark.browser

NAMED = os.environ.get("MGPU_TEST_BROWSER")
BROWSER = NAMED or shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
if NAMED:
    from playwright import sync_api
else:
    if BROWSER is None:
        pytest.skip("no Chromium on the path (MGPU_TEST_BROWSER names one)", allow_module_level=True)
    sync_api = pytest.importorskip(
        "playwright.sync_api", reason="playwright drives the browser: pip install playwright"
    )


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """Two steps: a training step of seven rows on four ranks with two buckets, and a ring on three."""
    net = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    step = mgpu_core.TrainStep(net, functional.mse_loss, optimizer, ["cpu"] * 4, bucket_nbytes=48)
    x, y = torch.randn(7, 6), torch.randn(7, 2)
    step(x, y)
    with mgpu_core.explain() as trace:
        step(x, y)
        comm.all_reduce([torch.ones(9) for _ in range(3)], algorithm="ring")
    step.close()
    path = tmp_path_factory.mktemp("page") / "page.html"
    trace.save_html(path)
    return path


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser, path):
    """Opens the page; at the end nothing may have been said on the console, or asked of the network."""
    opened, said, asked = [], [], []

    def open_it(**options):
        page = browser.new_page(**options)
        page.set_default_timeout(20_000)
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        opened.append(page)
        page.goto(path.as_uri())
        page.select_option("#step", index=0)
        return page

    yield open_it
    for page in opened:
        page.close()
    assert said == []
    assert set(asked) == {path.as_uri()}


def titles(page):
    return [text.split("\n")[0] for text in page.locator("#scenes button").all_inner_texts()]


def title(page):
    return page.inner_text("#scene-title")


def test_the_known_numbers(open_page):
    page = open_page()
    assert page.inner_text("#summary").startswith("train_step, 4 ranks (cpu, cpu, cpu, cpu), ")
    assert titles(page)[0] == title(page) == "Scatter: 7 rows, 4 ranks"
    assert "rank 0: 2, rank 1: 2, rank 2: 2, rank 3: 1" in page.inner_text("#scene-text")
    rank = page.locator("#picture [data-rank='3']")
    assert "1 row" in rank.locator("text").all_text_contents()
    assert "inputs[0] float32 (1, 6), 24 B, view; target float32 (1, 2), 8 B, view" in [
        each.get_attribute("data-tip") for each in rank.locator("[data-tip]").all()
    ]
    table = page.locator("#buckets tr").all_inner_texts()
    assert [row.split("\t") for row in table[1:]] == [
        ["0", "40 B", "2.bias, 2.weight"],
        ["1", "16 B", "0.bias"],
        ["2", "96 B", "0.weight"],
    ]
    head, *rows = (row.split("\t") for row in page.locator("#phases tr").all_inner_texts())
    moved = {row[0]: row[head.index("moved")] for row in rows}
    assert (moved["scatter"], moved["all_reduce"]) == ("-", "608 B")  # 4 ranks x 152 bytes
    assert any(line.startswith("preparing: no phase; ") for line in page.locator("#legend p").all_inner_texts())


def test_a_picture_keeps_what_the_scenes_before_it_have_done(open_page):
    def filled(rank, about):
        boxes = page.locator(f"#picture [data-rank='{rank}'] [data-tip^='{about}']")
        return {"--idle" not in box.get_attribute("style") for box in boxes.all()}

    page = open_page()
    assert filled(1, "inputs[0]") == {False}
    page.click("#next")
    assert title(page) == "Forward"
    assert filled(1, "inputs[0]") == {True}  # its rows have arrived
    page.keyboard.press("End")
    assert title(page) == "Update"
    assert filled(1, "gradients of bucket 0: 40 B, summed") == {True}


def test_all_columns_of_the_table_can_be_reached(open_page):
    page = open_page(viewport={"width": 400, "height": 900})
    holder = page.locator(".scroll").first
    holder.evaluate("box => box.scrollTo(box.scrollWidth, 0)")
    box, last, first = (
        each.bounding_box() for each in (holder, page.locator("#phases th").last, page.locator("#phases th").first)
    )
    assert last["x"] + last["width"] <= box["x"] + box["width"] + 1
    assert first["x"] == box["x"]  # the names of the phases stay


def test_it_steps_by_buttons_and_keys(open_page):
    page = open_page()
    scenes = titles(page)
    assert len(scenes) == len(set(scenes)) == 8
    page.click("#next")
    assert title(page) == scenes[1] == "Forward"
    page.keyboard.press("ArrowRight")
    assert title(page) == scenes[2]
    page.keyboard.press("ArrowLeft")
    assert title(page) == scenes[1]
    page.keyboard.press("End")
    assert title(page) == scenes[-1] == "Update"
    page.keyboard.press("ArrowRight")
    assert title(page) == scenes[-1]
    page.keyboard.press("Home")
    page.click("#back")
    assert title(page) == scenes[0]
    page.locator("#scenes button").nth(4).click()
    assert title(page) == scenes[4]
    assert page.locator("#scenes [aria-current='step']").count() == 1


def test_it_plays_to_the_end_and_pauses(open_page):
    page = open_page()
    page.select_option("#speed", "3")
    page.locator("#scene-title").click()
    page.keyboard.press("Space")
    assert page.inner_text("#play") == "Pause"
    sync_api.expect(page.locator("#scene-title")).to_have_text("Forward", timeout=20_000)
    page.click("#play")
    assert page.inner_text("#play") == "Play"
    there = page.get_attribute("#picture svg", "data-progress"), title(page)
    page.wait_for_timeout(200)
    assert (page.get_attribute("#picture svg", "data-progress"), title(page)) == there
    page.click("#play")
    sync_api.expect(page.locator("#play")).to_have_text("Play", timeout=60_000)
    assert title(page) == "Update"
    assert page.get_attribute("#picture svg", "data-progress") == "1.000"


def test_things_move_and_the_scrubber_sets_where(open_page):
    page = open_page()

    def indices():
        return [each.get_attribute("transform") for each in page.locator("#picture .tokens rect").all()]

    def scrub(value):
        page.evaluate(f"document.getElementById('scrub').value = {value}")
        page.locator("#scrub").dispatch_event("input")

    begin = indices()
    assert len(begin) == 7  # one token a row
    scrub(0.5)
    middle = indices()
    scrub(0.999)
    assert all(one != other for one, other in zip(begin, indices(), strict=True))
    assert begin != middle
    scrub(1.5)
    assert title(page) == "Forward"
    assert page.get_attribute("#scrub", "aria-valuetext") == "scene 2 of 8: Forward"
    page.focus("#scrub")
    page.keyboard.press("Home")
    assert title(page).startswith("Scatter")


def test_a_ring_chunk_by_chunk(open_page):
    page = open_page()
    page.select_option("#step", index=1)
    assert titles(page) == [f"all_reduce (ring): tensors are all-reduced, round {n} of 4" for n in (1, 2, 3, 4)]
    tips = [each.get_attribute("data-tip") for each in page.locator("#picture .tokens rect").all()]
    assert sorted(tip.split(":")[0] for tip in tips) == ["rank 0 to rank 1", "rank 1 to rank 2", "rank 2 to rank 0"]
    assert all("sum: 12 B" in tip for tip in tips)
    told = page.locator("#picture [data-rank='1'] text").all_text_contents()
    assert told[-2:] == ["gives 12 B", "gets 12 B"]  # its own chunk goes nowhere
    page.keyboard.press("End")
    held = [each.get_attribute("data-tip") for each in page.locator("#picture [data-rank='1'] [data-tip]").all()]
    assert {tip.split(": ")[1] for tip in held} == {"the sum of ranks 0, 1, 2"}


@pytest.mark.parametrize("width", [400, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_and_can_be_read(open_page, width, scheme):
    page = open_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.get_attribute("html", "data-theme") == scheme
    paper, ink = (page.evaluate(f"getComputedStyle(document.body).{name}") for name in ("backgroundColor", "color"))
    assert contrast(paper, ink) >= 7
    page.click("#theme")
    assert page.get_attribute("html", "data-theme") != scheme
    small = page.evaluate(
        "[...document.querySelectorAll('svg text')].map((e) => parseFloat(getComputedStyle(e).fontSize))"
        ".filter((size) => size < 12).length"
    )
    assert small == 0
    for button in page.locator(".controls button").all():
        assert button.bounding_box()["height"] >= 40


def contrast(one, other):
    """WCAG 2's ratio of two colours."""

    def luminance(colour):
        values = [int(each) / 255 for each in colour[colour.index("(") + 1 : -1].split(",")[:3]]
        linear = [each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in values]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted(map(luminance, (one, other)))
    return (high + 0.05) / (low + 0.05)


def test_everything_has_a_name(open_page):
    """What a screen reader says."""
    page = open_page()
    for button in page.locator("button, select, input").all():
        name = button.evaluate("e => e.getAttribute('aria-label') || e.textContent || e.labels[0].textContent")
        assert name.strip()
    assert page.get_attribute("#scene-text", "aria-live") == "polite"
    picture = page.locator("#picture svg")
    assert picture.get_attribute("role") == "img"
    assert picture.get_attribute("aria-label").startswith("Scatter: 7 rows, 4 ranks. ")
    assert page.locator("#timeline svg").get_attribute("aria-label").startswith("Timeline of ")
    assert page.locator("html").get_attribute("lang") == "en"
    reached = set()
    for _ in range(12):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id"))
    assert {"step", "theme", "first", "back", "play", "next", "last", "speed", "scrub"} <= reached


def test_bars_of_the_timeline_lead_to_their_scenes(open_page):
    page = open_page()
    bars = page.locator("#timeline .hit")
    tips = [each.get_attribute("data-tip") for each in bars.all()]
    bars.nth(next(position for position, tip in enumerate(tips) if tip.startswith("backward"))).click(force=True)
    assert title(page) == "Backward"
    bars.nth(next(position for position, tip in enumerate(tips) if tip.startswith("update"))).click(force=True)
    assert title(page) == "Update"
    bars.first.hover(force=True)
    assert page.inner_text("#tip") == tips[0]


def test_batches_of_a_predictor_are_blocks_with_waits(browser, tmp_path):
    with mgpu_core.Predictor(torch.nn.Linear(4, 2), ["cpu"] * 2, max_batch=3) as predict, mgpu_core.explain() as trace:
        predict(torch.ones(6, 4))  # two batches of three rows
        comm.all_reduce([torch.ones(9) for _ in range(3)])
    trace.save_html(tmp_path / "page.html")
    page, said = browser.new_page(viewport={"width": 1280, "height": 900}), []
    page.on("pageerror", lambda error: said.append(str(error)))
    page.goto((tmp_path / "page.html").as_uri())
    assert page.inner_text("h1") == "Inference, as it was recorded"
    assert page.inner_text("#phases-title") == "Batches of each rank"
    table = [row.split("\t")[:5] for row in page.locator("#phases tr").all_inner_texts()]
    assert table[0] == ["inference", "batches", "requests", "rows", "rows a batch"]
    assert sum(int(row[1]) for row in table[1:]) == 2
    duration = page.inner_text("#summary").split(", ")[-1]
    assert page.locator("#inference svg > text.soft").last.text_content() == duration
    tips = [each.get_attribute("data-tip") for each in page.locator("#inference [data-tip]").all()]
    assert len(tips) == 4  # a block and a wait each
    assert all(tip.startswith("3 rows of 1 request: ") for tip in tips)
    assert not page.locator("#timeline-part, .stage, #scenes-part").locator("visible=true").count()
    page.select_option("#step", index=0)
    assert page.inner_text("h1") == "A training step, as it was recorded"
    assert page.locator("#timeline-part").is_visible()
    assert not page.locator("#inference-part").is_visible()
    page.close()
    assert said == []


@pytest.mark.parametrize("width", [400, 1280])
def test_parts_of_a_placed_module_are_as_long_as_their_bytes(browser, tmp_path, width):
    net = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))
    mgpu_core.place(net, ["cpu"] * 2, split=["2"])
    with mgpu_core.explain() as trace:
        net(torch.ones(6, 4))
    trace.save_html(tmp_path / "page.html")
    page, said = browser.new_page(viewport={"width": width, "height": 900}), []
    page.on("pageerror", lambda error: said.append(str(error)))
    page.goto((tmp_path / "page.html").as_uri())
    assert page.inner_text("h1") == "A call of a placed module, as it was recorded"
    assert page.locator("#parts text").all_text_contents() == ["cpu: 0 to 1, 160 B", "cpu: 2, 80 B"]
    boxes = page.locator("#parts rect").all()
    assert [each.get_attribute("data-tip") for each in boxes] == ["0", "1", "2"]
    assert len({round(each.bounding_box()["width"]) for each in boxes}) == 1  # of 80 bytes each
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert not page.locator("#timeline-part, .stage").locator("visible=true").count()
    page.close()
    assert said == []


def test_a_pipeline_has_one_clock_and_the_plan(browser, tmp_path):
    net = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(2)))
    pipeline = mgpu_core.Pipeline(net, ["cpu"] * 2, chunks=3)
    step = mgpu_core.TrainStep(pipeline, functional.mse_loss, torch.optim.SGD(net.parameters(), 0.1))
    with mgpu_core.explain() as trace:
        step(torch.ones(6, 4), torch.ones(6, 4))
    trace.save_html(tmp_path / "page.html")
    page, said = browser.new_page(viewport={"width": 400, "height": 900}), []
    page.on("pageerror", lambda error: said.append(str(error)))
    page.goto((tmp_path / "page.html").as_uri())
    assert "Click a bar" not in page.inner_text("#timeline-part")
    assert not page.locator("#timeline .hit, #now").locator("visible=true").count()
    tips = [each.get_attribute("data-tip") for each in page.locator("#timeline rect[data-tip]").all()]
    assert sorted(tip.split(":")[0] for tip in tips if "micro-batch" in tip) == sorted(
        [f"{kind}, micro-batch {batch}" for kind in ("backward", "forward") for batch in range(3)] * 2
    )
    assert "stage 0 to stage 1: 96 B forward, 96 B backward" in page.inner_text("#pipeline")
    assert page.locator("#pipeline svg").count() == 1
    assert page.locator("#parts text").all_text_contents() == ["cpu: 0, 80 B", "cpu: 1, 80 B"]
    ends = [page.locator(f"#{part} svg > text.soft").last.text_content() for part in ("timeline", "pipeline")]
    assert ends == [page.inner_text("#summary").split(", ")[-1], "8 slots"]
    page.close()
    assert said == []
