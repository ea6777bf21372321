"""Charts of docs/benchmarks.md: drawn from its data, and in agreement with its tables."""

from __future__ import annotations

import json
import re
from xml.etree import ElementTree as ET

import pytest

from tests.bench import charts
from tests.bench.report import Result, as_json

PAGE = (charts.FOLDER.parent / "benchmarks.md").read_text(encoding="utf-8")
NAMES = [chart.name for chart in charts.CHARTS]


def section(chart: charts.Chart) -> str:
    (found,) = [part for part in PAGE.split("\n## ") if f"(benchmarks/{chart.name}.svg)" in part]
    return found


@pytest.mark.parametrize("chart", charts.CHARTS, ids=NAMES)
def test_charts_are_drawn_from_the_data_that_is_there(chart: charts.Chart) -> None:
    drawn = charts.draw(chart)
    assert (charts.FOLDER / f"{chart.name}.svg").read_text(encoding="utf-8") == drawn
    root = ET.fromstring(drawn)  # noqa: S314 - our own
    texts = [node.text for node in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {chart.title, chart.axis} <= set(texts)
    for row, _, value in charts.figures(chart):
        assert row.label in texts
        assert charts.shown(value) in texts


@pytest.mark.parametrize("chart", charts.CHARTS, ids=NAMES)
def test_tables_have_the_figures_of_their_chart(chart: charts.Chart) -> None:
    """And the section names the command, machine and date of the data."""
    cells = re.findall(r"[\d,.]*\d", section(chart))
    numbers = {float(cell.replace(",", "")) for cell in cells}
    missing = [row.label for row, _, value in charts.figures(chart) if value not in numbers]
    assert not missing
    found = json.loads((charts.FOLDER / f"{chart.name}.json").read_text(encoding="utf-8"))
    assert f"`{found['command']}`" in section(chart)
    assert found["date"] in section(chart)


def test_every_figure_that_is_kept_has_a_chart() -> None:
    kept = {path.stem for path in charts.FOLDER.iterdir()}
    assert kept == set(NAMES)


def test_a_row_that_fits_no_result_or_two_is_an_error() -> None:
    (chart,) = [chart for chart in charts.CHARTS if chart.name == "vllm"]
    for where, count in (({"name": "made_up"}, 0), ({"name": "ttft_cold"}, 3)):
        wrong = chart._replace(rows=(charts.Row("g", "l", where),))
        with pytest.raises(ValueError, match=f"vllm: {count} results with .*, expected 1"):
            charts.figures(wrong)


def test_output_of_a_benchmark_is_taken_in_as_it_is() -> None:
    result = Result("n", 1.5, "ms", None, {"system": "ours"})
    found = json.loads(charts.take("vllm", "a machine", as_json("vllm", [result])))
    assert found["command"] == "python -m tests.bench vllm"
    assert found["machine"] == "a machine"
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", found["date"])
    assert {"system": "ours", "name": "n", "value": 1.5}.items() <= found["results"][0].items()
