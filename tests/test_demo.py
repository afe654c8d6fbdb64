"""`cbrs demo`: the figures, the pictures, and the whole command on the `null` model."""

import json
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from cbrs.cli import main
from cbrs.demo.colours import decode_colour, prefill_colour
from cbrs.demo.html import Answer, render_html
from cbrs.demo.png import draw_png
from cbrs.demo.timeline import Bar, Percentiles, PolicyRun, RequestTimes, Work, work_of_batch
from cbrs.demo.workload import make_workload

FIGURES = {
    "occupancy",
    "iterations",
    "output_tokens_per_s",
    "ttft_ms",
    "itl_ms",
    "prefix_cache_hit_tokens",
}


def tiny_run(name: str = "static batching") -> PolicyRun:
    """Two slots, three iterations: request 0 has two prompt chunks, request 1 one, then a hole."""
    return PolicyRun(
        name=name,
        max_num_seqs=2,
        iterations=[
            [Work(0, 0, 8, "prefill"), Work(1, 1, 3, "prefill")],
            [Work(0, 0, 4, "prefill"), Work(1, 1, 1, "decode")],
            [Work(0, 0, 1, "decode")],
        ],
        requests=[
            RequestTimes(0, 2, 0, 0.4, [0.1]),
            RequestTimes(0, 2, 16, 0.2, [0.3]),
        ],
        duration_s=2.0,
    )


def test_occupancy_is_work_over_slots_times_iterations() -> None:
    assert tiny_run().occupancy == pytest.approx(5 / 6)


def test_figures_cover_all_requests() -> None:
    assert tiny_run().to_dict() == {
        "occupancy": 0.8333,
        "iterations": 3,
        "output_tokens_per_s": 2.0,
        "ttft_ms": {"p50": 300.0, "p99": 398.0},
        "itl_ms": {"p50": 200.0, "p99": 298.0},
        "prefix_cache_hit_tokens": 16,
    }


def test_figures_of_a_run_without_work_are_zero() -> None:
    run = PolicyRun("idle", 4, [], [], 0.0)
    assert (run.occupancy, run.output_tokens_per_s) == (0.0, 0.0)
    assert run.time_to_first_token == Percentiles(0.0, 0.0)


def test_bars_merge_equal_work_and_split_at_phase_and_hole() -> None:
    assert tiny_run().bars() == [
        Bar(0, 0, "prefill", 0, 2, 12),
        Bar(0, 0, "decode", 2, 1, 1),
        Bar(1, 1, "prefill", 0, 1, 3),
        Bar(1, 1, "decode", 1, 1, 1),
    ]


def test_bars_split_where_a_slot_is_reused_and_after_a_pause() -> None:
    decode = [[Work(0, request, 1, "decode")] for request in (0, 0, 1)]
    run = PolicyRun("x", 1, [*decode, [], decode[2]], [], 1.0)
    assert [(bar.request, bar.first, bar.length) for bar in run.bars()] == [
        (0, 0, 2),
        (1, 2, 1),
        (1, 4, 1),
    ]


def test_last_prompt_chunk_counts_as_prefill_and_one_token_prompts_too() -> None:
    work = work_of_batch(
        row_ids=np.array([3, 0, 1], dtype=np.int32),
        requests=[7, 8, 9],
        query_start=np.array([0, 1, 5, 6], dtype=np.int32),
        seq_lens=np.array([11, 10, 1], dtype=np.int32),
        num_prompt_tokens=[10, 10, 1],
    )
    assert work == [
        Work(3, 7, 1, "decode"),
        Work(0, 8, 4, "prefill"),
        Work(1, 9, 1, "prefill"),
    ]


def test_workload_arrives_in_order_after_a_first_wave_that_fills_the_slots() -> None:
    workload = make_workload(max_num_seqs=8, seed=0)
    arrivals = [request.arrival_iteration for request in workload]
    assert len(workload) >= 24
    assert arrivals[:8] == [0] * 8
    assert arrivals == sorted(arrivals)
    assert arrivals[8] > 0
    assert len({request.num_output_tokens for request in workload}) >= 12
    assert arrivals != [item.arrival_iteration for item in make_workload(max_num_seqs=8, seed=1)]


def test_colours_are_valid_and_tell_neighbours_and_phases_apart() -> None:
    colours = [
        colour(request) for request in range(36) for colour in (decode_colour, prefill_colour)
    ]
    assert all(len(colour) == 7 and int(colour[1:], 16) >= 0 for colour in colours)
    assert len(set(colours)) == len(colours)


class Page(HTMLParser):
    """Collects what a page is made of."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.text += data


def render(runs: list[PolicyRun]) -> Page:
    """The page for some runs of the tiny workload."""
    return Page(
        render_html(
            runs,
            title="Title <1>",
            subtitle="sub",
            table=[["", "static"], ["iterations", "3"]],
            prompts=["first & foremost", "second"],
            answers=[Answer("Why <b>?", "Because of 1 < 2.")],
        )
    )


def test_page_is_self_contained_and_escapes_text() -> None:
    page = render([tiny_run("static"), tiny_run("continuous")])
    assert not {"script", "link", "img", "b"} & set(page.tags)
    assert not {"src", "href"} & {name for name, _ in page.attributes}
    for text in ("Title <1>", "first & foremost", "Why <b>?", "Because of 1 < 2.", "83.3%"):
        assert text in page.text


def test_page_draws_every_bar_with_a_hover_text() -> None:
    page = render([tiny_run()])
    num_bars = sum(attribute == ("class", "bar") for attribute in page.attributes)
    assert num_bars == len(tiny_run().bars())
    assert "prefill of 12 tokens in slot 0, iterations 1 to 2" in page.text


def test_png_is_drawn_without_touching_the_pyplot_state(tmp_path: Path) -> None:
    was_loaded = "matplotlib.pyplot" in sys.modules
    draw_png([tiny_run("static"), tiny_run("continuous")], "Title", tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert ("matplotlib.pyplot" in sys.modules) == was_loaded


def run_demo(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `cbrs demo` on the null model."""
    code = main(["demo", "--model", "null", *arguments])
    out, err = capsys.readouterr()
    return code, out, err


def test_demo_shows_that_continuous_batching_fills_the_slots(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, out, err = run_demo(capsys, "--json", "--out", str(tmp_path / "new" / "folder"))
    figures = json.loads(out.splitlines()[-1])
    assert code == 0
    assert set(figures) == {"static", "continuous"}
    assert all(set(run) == FIGURES for run in figures.values())
    assert figures["static"]["occupancy"] < 0.6
    assert figures["continuous"]["occupancy"] > 0.9
    assert figures["continuous"]["iterations"] < 0.6 * figures["static"]["iterations"]
    assert all(run["prefix_cache_hit_tokens"] > 0 for run in figures.values())
    assert "static batching" in err
    for name in ("timeline.html", "timeline.png"):
        path = tmp_path / "new" / "folder" / name
        assert path.stat().st_size > 10_000
        assert str(path) in out


def test_demo_is_the_same_every_time_but_for_the_clock(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def iterations() -> list[tuple[float, int]]:
        _, out, _ = run_demo(capsys, "--json", "--out", str(tmp_path), "--seed", "3")
        return [
            (run["occupancy"], run["iterations"])
            for run in json.loads(out.splitlines()[-1]).values()
        ]

    assert iterations() == iterations()


def test_demo_without_matplotlib_writes_the_page_and_names_the_extra(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, out, _ = run_demo(capsys, "--out", str(tmp_path))
    assert code == 0
    assert "cbrs[viz]" in out
    assert [path.name for path in tmp_path.iterdir()] == ["timeline.html"]


def test_demo_refuses_a_slot_count_below_one(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["demo", "--max-num-seqs", "0"])
    assert exit_info.value.code == 2
    assert "--max-num-seqs" in capsys.readouterr().err


def test_demo_of_an_unknown_model_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code = main(["demo", "--model", "no-such-model", "--out", str(tmp_path)])
    err = capsys.readouterr().err
    assert code == 2
    assert "no-such-model" in err.splitlines()[-1]
    assert "Traceback" not in err
