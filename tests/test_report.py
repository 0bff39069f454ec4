"""The report of a nest: everything that nest.json says, nothing from outside, the same bytes each time."""

import json
import math
import re
import shutil
import struct
from collections.abc import Iterator
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
import tiny
import torch
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.text import Text

from nestling.nest import FULL, Member, Nest, open_nest, write_nest
from nestling.report import figures, report
from nestling.report.drawing import LIGHT, look, smooth, spread, style
from nestling.score import Scores
from nestling.sort import sort
from nestling.train import TrainSettings, train

SMALL = {"hidden": 32, "effn": 12, "sffn": 8, "mamba": 2}
TINIEST = {"hidden": 24, "effn": 8, "expert": 4, "layer": 4}
FIGURES = {"nest", "bytes", "quality", "importance", "router", "losses"}
NAMES = ("100", "97", "95", "a-long-name-for-a-member", "45", "25")
KEYS = ("thinking_tokens", "accuracy", "accuracy_before", "accuracy_random", "kl", "kl_before")


def results(place: int) -> dict[str, Any]:
    """What evaluation may have found for the member at this place, the full one first."""
    single = dict(
        zip(
            KEYS,
            (51.25, 0.953 - 0.04 * place, 0.953 / (1 + place), 0.0213, 4e-4 * (1 + place), 0.31 * place),
            strict=True,
        )
    )
    return single | {
        "problems": 1500,
        "accuracy_by_family": {"chain_sum": 0.9 - 0.1 * place},
        "perplexity": {"brown": 34.5 + 3 * place, "speeches": 21.3 + place},
        "perplexity_before": {"brown": 34.4 * (1 + 40 * place), "speeches": 21.2 + 9 * place},
    }


def records(members: dict[str, dict[str, int]], full: dict[str, int], steps: int = 240) -> list[dict[str, Any]]:
    """A training log in the form that `nestling train` writes."""
    made, draw, soft = [], np.random.default_rng(0), steps // 3
    small = [name for name in members if name != FULL]
    for step in range(steps):
        record: dict[str, Any] = {"step": step, "phase": "router" if step < soft else "members", "lr": 1e-3}
        noise = {name: float(np.exp(0.3 * draw.normal())) for name in members}
        through = min(1.0, step / soft)
        if step < soft:
            name = list(members)[step % len(members)]
            record["budget_term"] = {name: 0.4 * math.exp(-4 * through) * noise[name]}
            record["router"] = {
                one: {
                    a: full[a] + (members[one].get(a, full[a]) - full[a]) * through for a in ("hidden", "effn", "mamba")
                }
                for one in small
            }
            record["loss"] = {name: 0.3 * noise[name]}
        else:
            decay = 0.02 + math.exp(-4 * (step - soft) / steps)
            record["loss"] = {name: (1e-5 + 0.1 * i) * decay * noise[name] for i, name in enumerate(members)}
        made.append(record | {"tokens": 4096 * (step + 1), "grad_norm": 1.0, "tokens_per_second": 900.5})
    return made


def chance_scores(nest: Nest) -> Scores:
    """Scores as `nestling build` leaves them, by chance."""
    draw = torch.Generator().manual_seed(0)
    axes = tuple(axis for axis in nest.layout.elastic() if axis != "layer")
    sums = {axis: torch.rand(nest.layout.order_shape(axis), generator=draw, dtype=torch.float64) ** 3 for axis in axes}
    return Scores(
        architecture=nest.layout.arch.model_type, sizes=nest.layout.sizes, axes=axes, sums=sums, source="chance"
    )


def make_nest(folder: Path, members: dict[str, dict[str, int]]) -> Path:
    """A nest with all that a build leaves, but trained by nobody."""
    tiny.save("nemotron_h", folder)
    nest = open_nest(folder)
    made = {
        name: Member(name=name, sizes=sizes, budget=f"active:0.{50 - i}", is_trained=True, results=results(i))
        for i, (name, sizes) in enumerate(members.items())
    }
    recipe = {"train": {"data": "a.jsonl=0.7", "stage": ["tokens=1e6"], "router_lambda": 2.0}, "tokens": 983_040}
    write_nest(replace(nest, members=made, recipe=recipe, parent="1f2e3d"), folder)
    (folder / "nest" / "scores").mkdir(parents=True)
    chance_scores(nest).save(folder / "nest" / "scores")
    lines = [json.dumps(record) + "\n" for record in records(members, nest.layout.sizes)]
    (folder / "nest" / "train.jsonl").write_text("".join(lines), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def nest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {FULL: {}, "70": {"hidden": 40, "effn": 20}, "45": SMALL, "<b>&$x_1$": TINIEST}
    return make_nest(tmp_path_factory.mktemp("made") / "nest", sizes)


@pytest.fixture(scope="module")
def made(nest: Path) -> Path:
    """The folder of a report."""
    return report(nest, nest.parent / "report", say=lambda line: None).parent


def text_of(page: Path) -> str:
    """What a reader sees, with one space where tags stand."""
    html = page.read_text(encoding="utf-8")
    body = re.sub(r"<style>.*?</style>", "", html, flags=re.DOTALL)
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", body)).split())


def leaves(tree: dict[str, Any], path: str = "") -> list[tuple[str, float]]:
    """The numbers of a tree of results, each with its path."""
    pairs = [(f"{path}/{key}", value) for key, value in tree.items()]
    return [leaf for at, value in pairs for leaf in (leaves(value, at) if isinstance(value, dict) else [(at, value)])]


def numbers_in(text: str) -> list[float]:
    """Every number of a text as a value; percentages as shares."""
    found = re.findall(r"(?<![\w.,])(-?\d[\d,]*(?:\.\d+)?(?:e-?\d+)?)( %)?", text)
    return [float(number.replace(",", "")) / (100 if percent else 1) for number, percent in found]


def test_the_page_holds_every_member_and_every_number_of_nest_json(nest: Path, made: Path):
    text = text_of(made / "report.html")
    shown = np.array(numbers_in(text))
    told = json.loads((nest / "nest.json").read_text())
    for name, member in told["members"].items():
        assert name in text
        assert f"{member['parameters']:,}" in text
        assert f"{member['active_parameters']:,}" in text
        for count in member["bytes"].values():
            assert f"{count:,}" in text
        for path, number in leaves({"sizes": member["sizes"], "results": member["results"]}):
            rounding = 5.01e-4 if "accuracy" in path else 5.01e-4 * abs(number)  # a percentage has one decimal
            assert np.abs(shown - number).min() <= rounding, f"{name}: {path} = {number} is not on the page"
    assert told["fingerprint"] in text
    assert told["parent"] in text
    assert "a.jsonl=0.7" in text


def test_the_same_nest_gives_the_same_bytes_wherever_it_lies(nest: Path, made: Path, tmp_path: Path):
    again = report(shutil.copytree(nest, tmp_path / "elsewhere"), tmp_path / "again", say=lambda line: None).parent
    files = sorted(file.name for file in made.iterdir())
    assert files == sorted(file.name for file in again.iterdir())
    assert [name for name in files if (made / name).read_bytes() != (again / name).read_bytes()] == []


def test_the_page_loads_nothing_and_runs_nothing(made: Path):
    html = (made / "report.html").read_text(encoding="utf-8")
    outside = re.sub(r"data:image/png;base64,[A-Za-z0-9+/=]+", "DATA", html)
    assert set(re.findall(r"(?:src|srcset|href)\s*=\s*\"?([^\"\s>]*)", outside)) == {"DATA"}
    assert not re.findall(r"https?:|//|<script|<link|<iframe|url\(|@import|\son\w+=", outside)


def test_a_name_cannot_bring_markup_into_the_page(made: Path):
    html = (made / "report.html").read_text(encoding="utf-8")
    assert "<b>&$" not in html
    assert "&lt;b&gt;&amp;$x_1$" in html


def test_every_figure_lies_beside_the_page_and_shows_something(made: Path):
    assert {file.stem for file in made.glob("*.png")} == FIGURES
    for file in made.glob("*.png"):
        pixels = imread(file)
        height, width = pixels.shape[:2]
        assert width > 800, file.name
        assert height > 250, file.name
        colors = (pixels[..., :3] * 255).astype(int) @ [1, 256, 65536]
        assert len(np.unique(colors)) > 50, file.name


def test_figures_carry_no_date_and_no_version(made: Path):
    for file in made.glob("*.png"):
        data, at, kinds = file.read_bytes(), 8, set()
        while at < len(data):
            length, kind = struct.unpack(">I4s", data[at : at + 8])
            kinds.add(kind)
            at += length + 12
        assert kinds <= {b"IHDR", b"IDAT", b"IEND", b"pHYs"}, file.name


def test_a_plain_checkpoint_gives_a_page_that_says_what_is_missing(tmp_path: Path):
    said: list[str] = []
    page = report(tiny.save("qwen3", tmp_path / "plain"), tmp_path / "report", say=said.append)
    assert {file.stem for file in page.parent.glob("*.png")} == {"nest"}
    text = text_of(page)
    assert "Not in this nest" in text
    for command in ("nestling build", "nestling train"):
        assert command in text
        assert any(command in line for line in said)


def test_a_nest_without_scores_or_a_router_shows_the_rest(nest: Path, tmp_path: Path):
    bare = shutil.copytree(nest, tmp_path / "bare")
    shutil.rmtree(bare / "nest" / "scores")
    log = bare / "nest" / "train.jsonl"
    kept = [line for line in log.read_text().splitlines() if json.loads(line)["phase"] == "members"]
    log.write_text("\n".join(kept) + "\n")
    page = report(bare, tmp_path / "report", say=lambda line: None)
    assert {file.stem for file in page.parent.glob("*.png")} == FIGURES - {"importance", "router"}
    assert "the run had no phase for it" in text_of(page).lower()


def test_a_broken_line_of_the_log_is_named(nest: Path, tmp_path: Path):
    broken = shutil.copytree(nest, tmp_path / "broken")
    log = broken / "nest" / "train.jsonl"
    log.write_text(log.read_text() + '{"step": 240, "pha\n')
    with pytest.raises(ValueError, match=r"line 241 .* is not the record of a step"):
        report(broken, tmp_path / "report")
    assert not (tmp_path / "report").exists()


def test_a_report_is_not_overwritten_unasked(nest: Path, made: Path):
    with pytest.raises(ValueError, match="exists"):
        report(nest, made)


def test_other_users_of_matplotlib_notice_nothing(tmp_path: Path):
    before = matplotlib.rcParams.copy()
    report(tiny.save("llama", tmp_path / "plain"), tmp_path / "report", say=lambda line: None)
    assert matplotlib.rcParams.copy() == before


def test_a_nest_as_training_leaves_it_can_be_drawn(tmp_path: Path):
    tiny.save("nemotron_h", tmp_path / "parent", is_chatty=True)
    (tmp_path / "data.jsonl").write_text('{"text": "one and one is two, two and two is four"}\n' * 40)
    sort(tmp_path / "parent", {}, tmp_path / "sorted")
    settings = TrainSettings(
        data=str(tmp_path / "data.jsonl"), member=("60=active:0.60",), stage=("tokens=1280,length=16,batch=4,lr=1e-3",),
        router_axes="hidden=4,effn=4,sffn=4", warmup=2,
    )  # fmt: skip
    train(settings, tmp_path / "sorted", tmp_path / "nest", say=lambda line: None)
    page = report(tmp_path / "nest", tmp_path / "report", say=lambda line: None)
    assert {file.stem for file in page.parent.glob("*.png")} == {"nest", "bytes", "router", "losses"}


def drawn_texts(figure: Figure) -> Iterator[Text]:
    """Every text that a figure draws; ticks that stand outside the limits are not drawn."""
    for ax in figure.axes:
        yield from ax.texts
        for axis in (ax.xaxis, ax.yaxis) if ax.axison else ():
            yield axis.label
            low, high = sorted(axis.get_view_interval())
            yield from (tick.label1 for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high)


def touching(figure: Figure) -> list[tuple[str, str]]:
    """Pairs of texts that overlap by more than a hair, and texts that leave the figure."""
    figure.draw_without_rendering()
    texts = [text for text in drawn_texts(figure) if text.get_text().strip()]
    boxes = [(text.get_text(), text.get_window_extent()) for text in texts]
    width, height = figure.bbox.size
    wrong = [
        (name, "the edge")
        for name, box in boxes
        if box.x0 < -1 or box.y0 < -1 or box.x1 > width + 1 or box.y1 > height + 1
    ]
    for i, (name, a) in enumerate(boxes):
        for other, b in boxes[i + 1 :]:
            if min(a.x1, b.x1) - max(a.x0, b.x0) > 1 and min(a.y1, b.y1) - max(a.y0, b.y0) > 2.5:
                wrong.append((name, other))
    return wrong


@pytest.mark.parametrize("count", [1, 2, 4, 6])
def test_no_text_of_a_figure_touches_another(count: int):
    names: list[str] = list(NAMES[:count])
    billions = (3.58, 3.5, 3.4, 3.3, 1.4, 0.9)
    active = {name: int(n * 1e9) for name, n in zip(names, billions, strict=False)}
    cuts: dict[str, int] = dict(zip(names, (48, 47, 46, 46, 20, 18), strict=False))
    steps = np.arange(90.0)
    series = {name: (steps, np.full(90, 0.02 + 0.01 * (i > 3))) for i, name in enumerate(names)}
    shares = {name: active[name] / active[names[0]] for name in names}
    axis = figures.Importance(
        axis="hidden", meaning="channels of the residual stream", curves=np.ones((1, 48)), cuts=cuts
    )
    far: dict[str, float] = dict.fromkeys(names, 9000)
    drawn = {
        "rectangles": lambda colors: figures.rectangles({"All parameters": active, "Active": active}, colors),
        "weights": lambda colors: figures.weights(active, colors, told=lambda n: f"{n / 2**30:,.2f} GiB"),
        "quality": lambda colors: figures.quality(
            [figures.Quality(title="Solved", is_share=True, trained=shares, cut=shares, random=shares, parent=0.99),
             figures.Quality(title="Perplexity", is_share=False, trained=cuts, cut=far, parent=48)],
            active, colors,
        ),
        "importance": lambda colors: figures.importance([axis] * 3, colors),
        "router": lambda colors: figures.router(
            figures.RouterRun(shares={"hidden": series, "mamba": series}, frozen={"hidden": shares}, distance=series),
            colors,
        ),
        "losses": lambda colors: figures.losses(
            {name: [one] for name, one in series.items()}, {"router learns": (0, 30), "members train": (30, 90)}, colors
        ),
    }  # fmt: skip
    with style(LIGHT):
        found = {name: touching(draw(look(names, LIGHT))) for name, draw in drawn.items()}
    assert {name: pairs for name, pairs in found.items() if pairs} == {}


def test_labels_are_moved_apart_in_order_and_no_further_than_needed():
    draw = np.random.default_rng(0)
    for _ in range(200):
        n = int(draw.integers(1, 7))
        wanted, lengths = draw.uniform(0, 1, n), draw.uniform(0.02, 0.15, n)
        found = np.array(spread(wanted.tolist(), lengths.tolist(), 0.0, 1.0))
        order = np.argsort(wanted)
        gaps = np.diff(found[order]) - (lengths[order][1:] + lengths[order][:-1]) / 2
        assert (gaps > -1e-9).all()
        assert (found - lengths / 2 > -1e-9).all()
        assert (found + lengths / 2 < 1 + 1e-9).all()
    assert spread([0.2, 0.5, 0.8], [0.1, 0.1, 0.1], 0.0, 1.0) == pytest.approx([0.2, 0.5, 0.8])
    assert spread([0.5, 0.5], [0.2, 0.2], 0.0, 1.0) == pytest.approx([0.4, 0.6])


def test_smoothing_keeps_what_is_even_and_calms_what_is_not():
    assert smooth(np.full(500, 3.0)) == pytest.approx(np.full(500, 3.0))
    noise = np.random.default_rng(0).normal(size=3000)
    assert smooth(noise).std() < 0.2 * noise.std()
    assert smooth(np.array([1.0])) == pytest.approx([1.0])
