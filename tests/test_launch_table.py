"""The launch table: which row is chosen, and what is no table."""

import json

import pytest

pytest.importorskip("torch", reason="the launch table stands beside kernels of torch")

from cbrs.kernels import launch


def entry(kernel: str, capability: int, num_warps: int, **others: object) -> dict[str, object]:
    return {
        "kernel": kernel,
        "capability": capability,
        "num_warps": num_warps,
        "num_stages": 2,
    } | others


def read(folder, *entries):
    (folder / "some.json").write_text(json.dumps(entries))
    return launch.read_rows(folder)


def test_the_newest_row_that_holds_is_chosen_then_the_one_with_most_conditions(tmp_path):
    rows = read(
        tmp_path,
        entry("a", 80, 1),
        entry("a", 80, 2, when={"width": [2, 4]}),
        entry("a", 90, 3, when={"width": [4, 8]}),
        entry("b", 80, 4),
    )

    def warps(capability: int, **shape: int) -> int | None:
        row = launch.best(rows, "a", capability, shape)
        return None if row is None else row.launch.num_warps

    assert warps(80, width=1) == 1
    assert [warps(80, width=width) for width in (2, 4, 5)] == [2, 2, 1]
    assert [warps(90, width=width) for width in (3, 4, 8, 9)] == [2, 3, 3, 1]
    assert warps(120, width=4) == 3
    assert warps(120) == 1
    assert warps(75, width=4) is None


def test_the_own_table_has_a_row_for_every_kernel_and_shape():
    for kernel in {row.kernel for row in launch.read_rows()}:
        for capability in ((8, 0), (8, 9), (9, 0), (10, 0), (12, 0)):
            chosen = launch.choose(kernel, capability)
            assert chosen.options == {
                "num_warps": chosen.num_warps,
                "num_stages": chosen.num_stages,
            }


def test_a_device_or_kernel_without_a_row_is_refused():
    with pytest.raises(ValueError, match=r"no launch of attention_sum for capability 7\.5"):
        launch.choose("attention_sum", (7, 5))
    with pytest.raises(ValueError, match=r"no launch of nothing .* a row without conditions"):
        launch.choose("nothing", (9, 0), width=3)


@pytest.mark.parametrize(
    "wrong",
    [
        {"kernel": "a"},
        entry("a", 80, 4, colour="red"),
        entry("a", 80, 4, when={"width": [1]}),
        entry("a", 80, 4, constants={"BLOCK": "wide"}),
        "a",
    ],
    ids=["lacks keys", "unknown key", "bound", "constant", "no row"],
)
def test_what_is_no_table_is_refused_by_its_name(tmp_path, wrong):
    with pytest.raises(ValueError, match=r"some\.json is not a launch table"):
        read(tmp_path, wrong)


def test_a_table_of_more_rows_than_are_compiled_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"has 41 rows, 40 are allowed"):
        read(tmp_path, *[entry("a", 80, 4)] * 41)
