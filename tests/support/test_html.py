"""HTML of results for notebooks: the values are there, and no name can add an element."""

from collections import deque
from dataclasses import replace
from html.parser import HTMLParser

import pytest
import torch
from fakes.nets import cpu
from torch.nn import functional

import mgpu_core
from mgpu_core.inference.stats import DeviceStats, Stats
from mgpu_core.support.html import html_frame, html_table, html_text
from mgpu_core.tools import doctor
from mgpu_core.tools.advise.break_even import BreakEven
from mgpu_core.tools.advise.data import Measurement
from mgpu_core.tools.advise.reasons import Reason
from mgpu_core.tools.advise.recommend import Recommendation
from mgpu_core.tools.advise.result import Advice
from mgpu_core.tools.advise.strategies import ENGINE, ONE
from mgpu_core.tools.explain.trace import Trace

HOSTILE = "</pre><script>alert('1 & 2')</script>\"'"


class Parsed(HTMLParser):
    """The elements, rows of cells, texts of ``pre`` and frames of a piece of HTML."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.tables, self.frames, self.texts, self._open = [], [], [], [], []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append(tag)
        self._open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
        elif tag == "iframe":
            self.frames.append(dict(attrs))
        elif tag == "pre":
            self.texts.append("")

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        if self._open[-1] == "pre":
            self.texts[-1] += data
        else:
            assert self._open[-1] in ("td", "th"), data
            self.tables[-1][-1][-1] += data


@pytest.fixture(scope="module")
def recorded():
    net = torch.nn.Linear(6, 4).to(cpu(1)[0])
    step = mgpu_core.TrainStep(net, functional.mse_loss, torch.optim.SGD(net.parameters(), 0.1), cpu(2), shares=[2, 1])
    x, y = torch.randn(12, 6), torch.randn(12, 4)
    step(x, y)
    with mgpu_core.explain() as trace:
        step(x, y)
    plan = step.plan()
    step.close()
    return trace, plan


def test_a_table_keeps_every_cell_as_text():
    rows = [("name", HOSTILE), (HOSTILE, 3)]
    parsed = Parsed(html_table(rows))
    assert parsed.tables == [[["name", HOSTILE], [HOSTILE, "3"]]]
    assert parsed.elements == ["table", "tr", "th", "th", "tr", "td", "td"]


def test_text_keeps_lines_and_frames_keep_pages():
    assert Parsed(html_text(f"a\n  {HOSTILE}")).texts == [f"a\n  {HOSTILE}"]
    (frame,) = Parsed(html_frame(HOSTILE)).frames
    assert frame["srcdoc"] == HOSTILE
    assert frame["sandbox"] == "allow-scripts"  # a frame with the same origin could read the notebook


def test_a_trace_shows_its_page_and_its_table(recorded, tmp_path):
    trace, _ = recorded
    parsed = Parsed(trace._repr_html_())
    trace.save_html(tmp_path / "page.html")
    (frame,) = parsed.frames
    assert frame["srcdoc"] == (tmp_path / "page.html").read_text()
    (rows,) = parsed.tables
    assert rows[0] == ["phase", "ranks", "calls", "moved", "time", "share", "bus GB/s"]
    assert {"forward", "backward", "update"} <= {row[0] for row in rows}
    text = [line.split() for line in trace.table().splitlines()]
    assert all(" ".join(row).split() in text for row in rows)


def test_a_trace_shows_batches():
    with mgpu_core.Predictor(torch.nn.Linear(4, 2), cpu(2)) as predict, mgpu_core.explain() as trace:
        predict(torch.ones(3, 4))
    rows = Parsed(trace._repr_html_()).tables[-1]
    assert rows[0][:4] == ["inference", "batches", "requests", "rows"]
    assert sum(int(row[3]) for row in rows[1:]) == 3


def test_an_empty_trace_says_so():
    parsed = Parsed(Trace()._repr_html_())
    assert "nothing was recorded" in parsed.texts[0]
    assert (parsed.frames, parsed.tables) == ([], [])


def test_a_step_too_large_for_a_page_keeps_its_table(recorded, monkeypatch):
    monkeypatch.setattr("mgpu_core.tools.explain.page.MOST_NBYTES", 100)
    parsed = Parsed(recorded[0]._repr_html_())
    assert "save_trace" in parsed.texts[0]
    assert (len(parsed.frames), len(parsed.tables)) == (0, 1)


def test_a_plan_is_a_list_and_a_table(recorded):
    _, plan = recorded
    assert isinstance(plan, list)
    assert plan == list(plan)
    assert [each.rows for each in plan] == [8, 4]
    (rows,) = Parsed(plan._repr_html_()).tables
    assert rows[0] == ["rank", "device", "share", "rows", "workers", "why"]
    assert [row[:4] for row in rows[1:]] == [
        [str(each.rank), str(each.device), share, str(each.rows)]
        for each, share in zip(plan, ["66.7%", "33.3%"], strict=True)
    ]


def test_statistics_say_in_html_what_they_say_as_text():
    stats = Stats([DeviceStats("cpu", 3, 40, 2, queue_seconds=deque([0.1, 0.2])), DeviceStats(HOSTILE, is_lost=True)])
    (rows,) = Parsed(stats._repr_html_()).tables
    assert rows[1][:7] == ["0", "cpu", "3", "40", "100.0%", "2", "20.0"]
    assert rows[2][1] == f"{HOSTILE} (lost)"
    assert [" ".join(row).split() for row in rows] == [line.split() for line in str(stats).splitlines()]


def test_advice_has_its_table_and_its_sentences():
    measurements = (
        *(Measurement(ONE, rows, (seconds,)) for rows, seconds in ((8, 2e-3), (32, 8e-3))),
        *(Measurement(ENGINE, 8, ()), Measurement(ENGINE, 32, (4e-3,))),
    )
    measurements = (*measurements[:2], replace(measurements[2], error=HOSTILE), measurements[3])
    reason, best = Reason("compute", HOSTILE), Recommendation(ENGINE, "take it")
    told = (BreakEven("at", 16.0), None, None, None, None, reason, best, ("a note",), {"torch": HOSTILE})
    advice = Advice(("cpu", "cpu"), 8, measurements, *told)
    parsed = Parsed(advice._repr_html_())
    (rows,) = parsed.tables
    assert rows[0] == ["batch", ONE, ENGINE, ""]
    assert rows[1:] == [["8 *", "2 ms", "failed", ""], ["32", "8 ms", "4 ms", "x 2.00"]]
    assert parsed.elements.count("script") == 0
    table = [" ".join(row).split() for row in rows]
    sentences = [line for line in str(advice).splitlines() if line and line.split() not in table]
    assert [line for text in parsed.texts for line in text.splitlines() if line] == sentences


def test_the_report_of_doctor(monkeypatch):
    monkeypatch.setenv("MGPU_CORE_CPU_RANKS", HOSTILE)
    report = doctor.examine()
    parsed = Parsed(report._repr_html_())
    assert parsed.texts == [doctor.render(report)]
    assert parsed.elements == ["pre"]
    assert HOSTILE in parsed.texts[0]
