"""The plots at the end of a run: reward.png and accuracy.png, from metrics.jsonl alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from expert_iteration.metrics.sinks import Record, read_records

# Okabe and Ito's palette, which colour-blind readers can tell apart.
BLUE, ORANGE, GREEN = "#0072B2", "#D55E00", "#009E73"
X_LABEL = "Collections trained on so far"


def plot_run(metrics_file: Path, directory: Path) -> list[Path]:
    """Writes reward.png and accuracy.png to `directory` and returns their paths.

    The samples of collection c (from 0) come from weights trained on c collections, which is where they stand on the x
    axis; so sampled and greedy accuracy of the same weights stand above one another.
    """
    records = read_records(metrics_file)
    collections = [record for record in records if record.kind == "collection"]
    evaluations = [record for record in records if record.kind == "eval"]
    return [
        _save(_reward_figure(collections), directory / "reward.png"),
        _save(_accuracy_figure(collections, evaluations), directory / "accuracy.png"),
    ]


def _reward_figure(collections: Sequence[Record]) -> Figure:
    figure, axes = _figure("Reward of sampled completions", "Reward (per completion)")
    x, mean = _series(collections, "reward/mean")
    _, std = _series(collections, "reward/std")
    _, low = _series(collections, "reward/min")
    _, high = _series(collections, "reward/max")
    # Mean - std of rewards of 0 and 1 lies below 0, where no reward is.
    axes.fill_between(
        x,
        [max(m - s, least) for m, s, least in zip(mean, std, low, strict=True)],
        [min(m + s, most) for m, s, most in zip(mean, std, high, strict=True)],
        color=BLUE,
        alpha=0.15,
        linewidth=0,
        label="collected, ± 1 standard deviation within the range seen",
    )
    axes.plot(x, mean, color=BLUE, marker="o", label="collected, mean")
    x, kept = _series(collections, "selection/accepted_reward_mean")
    if x:
        axes.plot(x, kept, color=ORANGE, marker="s", linestyle="--", label="kept for training, mean")
    _legend_below(figure, axes)
    return figure


def _accuracy_figure(collections: Sequence[Record], evaluations: Sequence[Record]) -> Figure:
    figure, axes = _figure("Accuracy", "Accuracy (share right)")
    for name, label, color, marker in (
        ("reward/pass_at_n", "training prompts, sampled: pass@N", GREEN, "^"),
        ("reward/accuracy", "training prompts, sampled: mean", BLUE, "o"),
    ):
        x, share = _series(collections, name)
        if x:
            axes.plot(x, share, color=color, marker=marker, label=label)
    x, accuracy = _series(evaluations, "eval/accuracy")
    _, low = _series(evaluations, "eval/low")
    _, high = _series(evaluations, "eval/high")
    if x:
        below = [a - b for a, b in zip(accuracy, low, strict=True)]
        above = [b - a for a, b in zip(accuracy, high, strict=True)]
        axes.errorbar(
            x,
            accuracy,
            yerr=[below, above],
            color=ORANGE,
            marker="D",
            linestyle="--",
            linewidth=1,
            elinewidth=2,
            capsize=6,
            zorder=3,
            label="held-out problems, greedy, with 95% interval",
        )
        for position, value, top in zip(x, accuracy, high, strict=True):
            axes.annotate(f"{value:.3f}", (position, top), xytext=(0, 5), textcoords="offset points", ha="center")
    axes.set_ylim(0, 1.05)
    _legend_below(figure, axes)
    return figure


def _series(records: Sequence[Record], name: str) -> tuple[list[float], list[float]]:
    """Positions and values of a metric, from the records that hold it."""
    points = [
        (record.values["progress/collection"], record.values[name]) for record in records if name in record.values
    ]
    return [x for x, _ in points], [y for _, y in points]


def _figure(title: str, y_label: str) -> tuple[Figure, Axes]:
    # Figure without pyplot: no global state, no window, and the Agg canvas whatever the display.
    figure = Figure(figsize=(7, 4.5), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title)
    axes.set_xlabel(X_LABEL)
    axes.set_ylabel(y_label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _legend_below(figure: Figure, axes: Axes) -> None:
    """Below the axes, where it hides no point."""
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False, fontsize="small")


def _save(figure: Figure, path: Path) -> Path:
    figure.savefig(path)
    return path
