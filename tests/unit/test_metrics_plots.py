"""The plots, read back as pictures and as data."""

from __future__ import annotations

from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
from matplotlib.collections import LineCollection

from expert_iteration.metrics.plots import _accuracy_figure, _reward_figure, plot_run
from expert_iteration.metrics.sinks import JsonlFile, Record


def collection(index: int, mean: float) -> Record:
    return Record(
        "collection",
        {
            "progress/optimizer_step": 8 * index,
            "progress/collection": index,
            "reward/mean": mean,
            "reward/std": 0.4,
            "reward/min": 0.0,
            "reward/max": 1.0,
            "reward/accuracy": mean,
            "reward/pass_at_n": mean + 0.3,
        },
    )


def evaluation(index: int, accuracy: float) -> Record:
    return Record(
        "eval",
        {
            "progress/optimizer_step": 8 * index,
            "progress/collection": index,
            "eval/accuracy": accuracy,
            "eval/low": accuracy - 0.05,
            "eval/high": accuracy + 0.07,
        },
    )


def write(path: Path, records: list[Record]) -> Path:
    file = JsonlFile(path)
    for record in records:
        file.write(record)
    file.close()
    return path


def test_both_plots_are_written(tmp_path: Path) -> None:
    unscored = Record("collection", {"progress/optimizer_step": 16, "progress/collection": 2})
    step = Record("step", {"progress/optimizer_step": 1, "progress/collection": 0, "loss/total": 1.0})
    records = [evaluation(0, 0.2), collection(0, 0.2), step, collection(1, 0.5), unscored, evaluation(3, 0.5)]
    paths = plot_run(write(tmp_path / "metrics.jsonl", records), tmp_path)
    assert [path.name for path in paths] == ["reward.png", "accuracy.png"]
    for path in paths:
        image = matplotlib.image.imread(path)
        assert image.shape[:2] == (675, 1050)
        assert image.std() > 0.05  # not a blank page


@pytest.mark.parametrize("records", [[], [evaluation(0, 0.2)]])
def test_a_run_that_was_stopped_early_is_plotted_too(tmp_path: Path, records: list[Record]) -> None:
    for path in plot_run(write(tmp_path / "metrics.jsonl", records), tmp_path):
        assert path.stat().st_size > 0


def test_accuracies_stand_at_the_collections_their_weights_were_trained_on() -> None:
    figure = _accuracy_figure([collection(0, 0.25), collection(1, 0.5)], [evaluation(0, 0.2), evaluation(2, 0.5)])
    (axes,) = figure.axes
    series = [np.asarray(line.get_xydata()).tolist() for line in axes.lines]
    assert [[0, 0.25], [1, 0.5]] in series
    assert [[0, 0.2], [2, 0.5]] in series
    bars = axes.collections[0]
    assert isinstance(bars, LineCollection)
    ((low, high), _) = [np.asarray(segment)[:, 1].tolist() for segment in bars.get_segments()]
    assert (low, high) == pytest.approx((0.15, 0.27))


def test_the_band_of_rewards_leaves_out_what_no_reward_can_be() -> None:
    figure = _reward_figure([collection(0, 0.25), collection(1, 0.5)])
    (axes,) = figure.axes
    heights = np.asarray(axes.collections[0].get_paths()[0].vertices)[:, 1]
    assert (heights.min(), heights.max()) == pytest.approx((0.0, 0.9))  # 0.25 - 0.4 is cut at 0
