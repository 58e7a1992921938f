"""The page beside the record: whole in itself, true to the record, and drawn for one window as for many."""

import dataclasses
import io
import re
from html.parser import HTMLParser

import pytest

from model.evaluation.agreement import Agreement
from model.evaluation.expert_load import ExpertLoad
from model.evaluation.perplexity import WindowLoss, summarise
from model.evaluation.plots import divergence_plot, load_plot, loss_plot
from model.evaluation.predictions import Reference
from model.evaluation.record import Compute, Evaluation, Run
from model.evaluation.report import REPORT, page, write_report
from model.evaluation.speed import Speed
from model.evaluation.text import TextRecord
from model.evaluation.thresholds import Threshold

REFERENCE = Reference("transformers", "the <source>", "1" * 64, "float32")


def evaluation(windows=3, **changes) -> Evaluation:
    losses = tuple(WindowLoss(1 + 15 * i, 15, 3.0 + 0.125 * i) for i in range(windows))
    whole = Evaluation(
        manifest_sha256="2" * 64,
        text=TextRecord("a & b.txt", "0" * 64, 88),
        compute=Compute("cpu", "float32", False, "absorbed", 1, 4),
        perplexity=summarise(losses, window=16, stride=15, size=88),
        agreement=Agreement(REFERENCE, 15 * windows, 1e-3, 0.1, 0.97, (0.0, *[1e-3] * (windows - 1))),
        expert_load=(ExpertLoad(1, (0,) * 16), ExpertLoad(2, (40, *[0] * 15))),
        thresholds=(Threshold("max_kl", 1e-6, 1e-3, False),),
        run=Run("CPU", 0.1, 0.2, (Speed(4, 128, 32, 1234.5, 67.8),)),
    )
    return dataclasses.replace(whole, **changes)


class _Read(HTMLParser):
    """Text of the tables' cells, and every address that the page refers to."""

    def __init__(self):
        super().__init__()
        self.cells, self.addresses, self.inside = [], [], False

    def handle_starttag(self, tag, attrs):
        self.inside = tag == "td"
        self.addresses += [value for name, value in attrs if name in ("src", "href", "xlink:href")]

    def handle_data(self, data):
        if self.inside:
            self.cells.append(data)
            self.inside = False


def read(html: str) -> _Read:
    reader = _Read()
    reader.feed(html)
    return reader


def test_the_page_says_what_the_record_says():
    html = page("mp2 <bf16>", evaluation())
    cells = read(html).cells
    assert "<title>Evaluation of mp2 &lt;bf16&gt;</title>" in html
    assert "Failed: max_kl: 0.001 is above the limit of 1e-06" in html
    for cell in ("3.12500", "a & b.txt, 88 bytes in 45 tokens", "the <source> (transformers, float32)", "1,234.5"):
        assert cell in cells, cell
    assert cells[-8:] == ["16", "15", "3.12500", "1.000e-03", "31", "15", "3.25000", "1.000e-03"]


def test_the_page_needs_nothing_but_itself(tmp_path):
    write_report(tmp_path, evaluation())
    html = (tmp_path / REPORT).read_text()
    addresses = read(html).addresses
    assert any(address.startswith("data:image/png;base64,") for address in addresses), "the heat map"
    assert all(address.startswith(("data:", "#")) for address in addresses)
    assert "<script" not in html
    assert re.findall(r"@import|url\((?!#)", html) == []
    assert "prefers-color-scheme: dark" in html


def test_what_was_not_measured_has_no_part():
    html = page("x", evaluation(agreement=None, expert_load=(), thresholds=(), run=Run("CPU", 0.1, 0.2)))
    assert re.findall("<h2>(.*?)</h2>", html) == ["Perplexity", "How it was computed", "Loss of each window"]
    assert "No threshold was asked for." in html
    assert "mean KL" not in html


def test_the_same_evaluation_gives_the_same_page():
    assert page("x", evaluation()) == page("x", evaluation())


@pytest.mark.parametrize("windows", [1, 2, 300])
def test_pictures_of_any_number_of_windows(windows):
    from matplotlib.image import imread

    result = evaluation(windows)
    for png in (loss_plot(result.perplexity, "png"), divergence_plot(result.perplexity, result.agreement, "png")):
        pixels = imread(io.BytesIO(png))
        assert pixels.shape[1] == 1152
        assert pixels[..., 3].min() == 0, "the paper is transparent"
        blue = (abs(pixels[..., :3] - [0x2F / 255, 0x7E / 255, 0xD8 / 255]).sum(-1) < 0.02) & (pixels[..., 3] > 0.9)
        assert blue.sum() > 300, "the line is drawn"


@pytest.mark.parametrize("layers", [1, 2, 58])
def test_a_heat_map_of_any_number_of_layers(layers):
    svg = load_plot(tuple(ExpertLoad(3 + i, tuple(range(256))) for i in range(layers)), "svg").decode()
    texts = re.findall(r"<text[^>]*>(.*?)</text>", svg)
    assert "3" in texts
    assert "× even share" in texts
    assert "currentColor" in svg
