"""The report holds the numbers that are in the files, as a page that needs nothing but itself."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from scripts import report
from scripts.report import PLAIN_CHARTS, RECALL_CHARTS, SPLIT_CHARTS, TAU_CHARTS

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
SPLIT = [name for _, name, _ in (*SPLIT_CHARTS, *TAU_CHARTS, *RECALL_CHARTS)]
PLAIN = [name for _, name, _ in PLAIN_CHARTS]
VOID = {"meta", "link"}


def write_run(folder: Path, lr: float, *, steps: int = 40) -> Path:
    folder.mkdir()
    lines = []
    for step in range(1, steps + 1):
        metrics = {"step": step, **{f"train/{name}": 1 + step / 100 + lr for name in SPLIT},
                   **{name: 100.0 + step for name in PLAIN}}
        metrics |= {f"train/accuracy/step_{index}": 0.5 - index / 20 for index in range(3)}
        metrics["perf/mfu"] = float("nan")  # json writes NaN
        lines.append(metrics)
    lines.append({"step": steps, **{f"validation/{name}": 2.5 for name in SPLIT},
                  **{f"validation/accuracy/step_{index}": 0.25 for index in range(3)}})
    killed = '{"step": 41, "train/lo'
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + killed)
    sample = {"step": steps, "id": "row-3", "tokens_per_round": 2.0,
              "pieces": [["prompt", "<user>"], ["accepted", "fast & good"], ["rejected", "no"], ["target", "yes"]]}
    (folder / "samples.jsonl").write_text(json.dumps({**sample, "step": 1, "id": "old"}) + "\n" + json.dumps(sample))
    (folder / "config.yaml").write_text(yaml.safe_dump({"seed": 0, "optim": {"lr": lr}, "target": {"extra": {}}},
                                                       sort_keys=False))
    (folder / "run.json").write_text(json.dumps({"git_commit": "abc123"}))
    return folder


class Page(HTMLParser):
    """The page as a parser sees it: tags that close, texts, and addresses that it would load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.counts: dict[str, int] = {}
        self.addresses: list[str] = []
        self.texts: dict[str, list[str]] = {}
        self.points: list[list[tuple[float, float]]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.counts[tag] = self.counts.get(tag, 0) + 1
        values = dict(attributes)
        self.addresses += [value for name, value in values.items() if name in ("src", "href")]
        if tag == "polyline":
            self.points.append([tuple(map(float, pair.split(","))) for pair in values["points"].split()])
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open:
            self.texts.setdefault(self.open[-1], []).append(data)


def make(monkeypatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["report.py", *map(str, arguments)])
    report.main()


def test_one_run_on_a_page(tmp_path, monkeypatch):
    run = write_run(tmp_path / "run<1>", 0.25)
    make(monkeypatch, run)
    text = (run / "report.html").read_text()
    page = Page(text)
    assert page.addresses == ["data:,"] and "script" not in page.counts and "url(" not in text
    titles = [title for title, _, _ in (*SPLIT_CHARTS, *TAU_CHARTS, *RECALL_CHARTS, *PLAIN_CHARTS)]
    shown = page.texts["h3"]
    assert set(titles) - set(shown) == {"Model FLOPs utilisation"}  # no number, no chart
    assert "Accuracy by unroll step" in shown
    assert page.texts["h1"] == ["run<1>"]
    assert page.texts["b"][:4] == ["2.500", "2.500", "250.00%", "2.500"]
    assert "not finished, step 40" in page.texts["p"]
    rows = re.findall(r"<tr><td>(.*?)</td><td>(.*?)</td></tr>", text)
    assert rows == [("seed", "0"), ("optim.lr", "0.25"), ("target.extra", "{}"), ("git_commit", "abc123")]
    assert page.texts["mark"][1:] == ["fast & good"] and page.texts["del"][1:] == ["no"]
    assert page.texts["i"] == ["<user>"] and "old: 2.00 tokens a round" not in page.texts["p"]


def test_lines_lie_where_the_numbers_say(tmp_path, monkeypatch):
    run = write_run(tmp_path / "run", 0.0)
    make(monkeypatch, run)
    page = Page((run / "report.html").read_text())
    rising = page.points[0]  # train/loss rises by the same amount at every step; y goes down the page
    assert len(rising) == 40
    across = [second[0] - first[0] for first, second in pairwise(rising)]
    up = [first[1] - second[1] for first, second in pairwise(rising)]
    assert min(across) > 0 and max(across) - min(across) < 0.3
    assert min(up) > 0 and max(up) - min(up) < 0.3


def test_several_runs_and_what_differs(tmp_path, monkeypatch):
    runs = [write_run(tmp_path / name, lr) for name, lr in (("a", 0.1), ("b", 0.2))]
    (runs[1] / "final").mkdir()
    (runs[1] / "final" / "training.json").write_text("{}")
    make(monkeypatch, *runs, "--output", tmp_path / "both.html")
    text = (tmp_path / "both.html").read_text()
    page = Page(text)
    assert page.texts["h1"] == ["a · b"]
    assert [line for line in page.texts["p"] if "finished" in line] == ["not finished, step 40", "finished, step 40"]
    different = text[text.index("Different:") : text.index("All settings")]
    assert re.findall(r"<td>(.*?)</td>", different) == ["optim.lr", "0.1", "0.2"]
    train_a, validation_a, train_b, _ = page.points[:4]
    assert len(train_a) == len(train_b) == 40 and train_a != train_b and len(validation_a) == 1


def test_a_run_that_has_only_begun(tmp_path, monkeypatch):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("")
    make(monkeypatch, tmp_path / "run")
    assert Page((tmp_path / "run" / "report.html").read_text()).texts["h1"] == ["run"]


@pytest.mark.parametrize(("name", "content", "message"), [
    ("config.yaml", "", "config.yaml is damaged: it holds no settings; remove it"),
    ("config.yaml", "a: [1", "config.yaml is damaged: it is not YAML"),
    ("run.json", '{"a": 1', "run.json is damaged: it is not JSON"),
])
def test_damaged_files_of_a_run_are_named(name, content, message, tmp_path, monkeypatch, capsys):
    run = write_run(tmp_path / "a", 0.1)
    (run / name).write_text(content)
    with pytest.raises(SystemExit, match="2"):
        make(monkeypatch, run)
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_page_into_a_folder_that_is_not_there_or_cannot_be(tmp_path, monkeypatch, capsys):
    run = write_run(tmp_path / "a", 0.1)
    make(monkeypatch, run, "--output", tmp_path / "new/page.html")
    assert (tmp_path / "new/page.html").is_file()
    with pytest.raises(SystemExit, match="2"):
        make(monkeypatch, run, "--output", run / "metrics.jsonl/page.html")
    assert re.search(r"cannot write .*metrics.jsonl/page.html: .*choose another --output", capsys.readouterr().err)


def test_a_folder_that_is_no_run_is_named(tmp_path, monkeypatch, capsys):
    with pytest.raises(SystemExit, match="2"):
        make(monkeypatch, tmp_path / "nowhere")
    assert re.search(r"error: no metrics.jsonl in .*nowhere; name output folders of training", capsys.readouterr().err)


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium on the PATH (Debian, Ubuntu: apt-get install chromium)")
def test_a_browser_shows_the_charts_without_an_error(tmp_path, monkeypatch):
    runs = [write_run(tmp_path / name, lr) for name, lr in (("a", 0.1), ("b", 0.2))]
    make(monkeypatch, *runs, "--output", tmp_path / "page.html")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
             "--disable-background-networking", "--disable-component-update", "--disable-sync",
             f"--user-data-dir={tmp_path / 'profile'}", "--enable-logging=stderr", "--v=0"]
    shown = subprocess.run([CHROMIUM, *flags, "--dump-dom", (tmp_path / "page.html").as_uri()], capture_output=True,
                           text=True, timeout=120, check=True)
    page = Page(shown.stdout)
    assert page.texts["h1"] == ["a · b"]
    assert page.counts["polyline"] == Page((tmp_path / "page.html").read_text()).counts["polyline"] > 20
    assert "CONSOLE" not in shown.stderr
