"""`penstock plot`: learning curves of finished and live runs, as one picture.

Runs with several seeds are one line with its 95 % bootstrap interval, up to the end of the shortest
run, over the single runs, drawn faintly. So are runs in several environments, whose returns are
scaled first.
"""

from __future__ import annotations

import html
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.configs.errors import UserError
from penstock.monitor.curves import (
    RETURN,
    STATISTIC_NAMES,
    Ranges,
    Setting,
    band,
    check_metric,
    check_ranges,
    common_span,
    default_statistic,
    is_scaled,
    load,
    parse_ranges,
    ranges_of,
    run_curve,
    strata,
)
from penstock.monitor.figures import ALL
from penstock.monitor.intervals import Floats
from penstock.monitor.run_folder.columns import Points
from penstock.monitor.run_folder.reader import evaluation_curve, is_evaluation, mean_return

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INSTALL = 'pip install "penstock[plot]"'
AXES = {"steps": "env_steps", "time": "time_s"}
PANELS = (RETURN, "steps_per_s", "policy_lag_mean", "learner_wait_fraction")
LABELS = {
    RETURN: "return, mean of the last episodes",
    ALL: "return, all environments",
    "episode_length_mean": "episode length, steps",
    "eval_return_mean": "return in evaluation",
    "steps_per_s": "agent steps / s",
    "trained_steps_per_s": "trained agent steps / s",
    "policy_lag_mean": "policy lag, updates",
    "learner_wait_fraction": "learner waits, share of time",
    "grad_norm": "gradient norm",
    "kl": "KL divergence",
}
# Points at which the statistic of several runs is computed.
GRID = 300
# A line with more points is thinned.
MOST_POINTS = 2000
DOTS = {"marker": "o", "markersize": 3.5}
# Okabe and Ito's colours, which readers with any form of colour blindness tell apart, without the
# yellow, which is too light for lines; further lines repeat them with other dashes.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES = ("-", "--", "-.", ":")
MINUTE_S = 60.0
HOUR_S = 3600.0
# From these lengths on, an axis of time is in minutes, or in hours.
LEAST_MINUTES_S = 600.0
LEAST_HOURS_S = 7200.0


def plot(
    folders: Sequence[str],
    out: str | None = None,
    by: str | None = None,
    metrics: Sequence[str] = (),
    smooth: int = 1,
    statistic: str | None = None,
    ranges: Sequence[str] = (),
) -> Path:
    """Draws the curves of runs into a file.

    Args:
        folders: see `curves.load`.
        out: the file, whose suffix selects the format.
        by: "steps" or "time"; None: steps, or both if no metric is named.
        metrics: names in `metrics.jsonl`, one panel each; none: an overview.
        smooth: measurements of a run over which each point is averaged.
        statistic: "mean" or "iqm", see `curves.band`.
        ranges: see `curves.parse_ranges`.

    Returns:
        The path of the picture.

    Raises:
        UserError: if matplotlib is missing, a folder is not a run, a metric is unknown, or the
            picture cannot be written.
    """
    make_figure = figure_class()
    if out is not None and not Path(out).suffix:
        raise UserError(
            f"--out {out} has no suffix, which selects the format; give a name that ends in .png, "
            ".svg, .pdf or .html"
        )

    panels = metrics or PANELS
    user_ranges = parse_ranges(ranges)
    settings = load(folders, {*panels, ALL})
    for name in metrics:
        check_metric(settings, name)
    check_ranges(settings, panels, user_ranges)

    # A row of the figure is a metric, a column an axis.
    if by:
        columns = [by]
    elif metrics:
        columns = ["steps"]
    else:
        columns = list(AXES)
    height = 4.0 if len(panels) == 1 else 2.6
    size = (6.4 * len(columns), height * len(panels) + 0.4)
    figure = make_figure(figsize=size, layout="constrained")
    cells = figure.subplots(len(panels), len(columns), squeeze=False, sharex="col")
    for row, name in zip(cells, panels, strict=True):
        scales = ranges_of(settings, name, user_ranges, smooth)
        for cell, column in zip(row, columns, strict=True):
            draw(
                cell,
                settings,
                x=AXES[column],
                y=name,
                smooth=smooth,
                statistic=statistic,
                scales=scales,
            )
            row[0].set_ylabel(y_label(name, scaled=scales is not None), fontsize=9)
    for column, cell in zip(columns, cells[-1], strict=True):
        label_x(cell, AXES[column])

    shows_dots = _shows_dots(settings, panels)
    _draw_legend(figure, settings, statistic=statistic, smooth=smooth, dots=shows_dots)

    path = _output_path(folders, out)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".html":
            path.write_text(_page(figure, folders), encoding="utf-8")
        else:
            figure.savefig(path, dpi=110)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be written ({error}); give another --out") from error
    return path


def _output_path(folders: Sequence[str], user_path: str | None) -> Path:
    """Returns the path that the user names, or `plot.png` in the only folder, or in the current
    one if there are several."""
    if user_path:
        return Path(user_path)
    folder = Path(folders[0]) if len(folders) == 1 else Path()
    return folder / "plot.png"


def _shows_dots(settings: Sequence[Setting], panels: Sequence[str]) -> bool:
    """Whether a panel shows evaluations as dots: only returns that are not scaled have some."""
    of_evaluations = [name for name in panels if name == RETURN or is_evaluation(name)]
    if all(is_scaled(settings, name) for name in of_evaluations):
        return False
    return any(run.files.evaluations for setting in settings for run in setting.runs)


def _page(figure: Figure, folders: Sequence[str]) -> str:
    """Returns an HTML page with the picture inside, as wide as the window; it needs no other
    file."""
    svg = io.StringIO()
    figure.savefig(svg, format="svg")
    picture = svg.getvalue()
    title = html.escape(f"penstock plot {' '.join(folders)}")
    return (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{title}</title>\n'
        "<style>body { margin: 1em } svg { width: 100%; height: auto }</style>\n"
        f"{picture[picture.index('<svg') :]}</html>\n"
    )


def figure_class() -> type[Figure]:
    """Returns matplotlib's figure, which needs no display.

    Raises:
        UserError: if matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError(
            f"a plot needs matplotlib, which is not installed; run `{INSTALL}`"
        ) from error
    return Figure


def draw(
    cell: Any,
    settings: Sequence[Setting],
    x: str,
    y: str,
    *,
    smooth: int = 1,
    statistic: str | None = None,
    scales: Ranges | None = None,
) -> None:
    """Draws a metric of the settings, each in a colour; evaluations of the return as dots.

    Where environments explore at different rates, the mean return over all is a faint line.

    Args:
        cell: matplotlib's axes.
        settings: see `curves.load`.
        x: "env_steps" or "time_s".
        y: name of the metric.
        smooth: measurements of a run over which each point is averaged.
        statistic: "mean" or "iqm", see `curves.band`.
        scales: by task, the values that are scaled to 0 and 1; None: values are not scaled.
    """
    for index, setting in enumerate(settings):
        repetition, place = divmod(index, len(COLOURS))
        style = {"color": COLOURS[place], "linestyle": DASHES[repetition % len(DASHES)]}
        _draw_setting(
            cell,
            setting,
            x=x,
            y=y,
            smooth=smooth,
            statistic=statistic,
            scales=scales,
            style=style,
        )
        if y == RETURN and scales is None:
            for run in setting.runs:
                everywhere = thinned(*run_curve(run, x, ALL, smooth=smooth))
                if len(everywhere[0]):
                    cell.plot(*everywhere, color=style["color"], linewidth=0.8, alpha=0.4)
                xs, ys = thinned(*evaluation_curve(run.files.evaluations, x, mean_return))
                cell.plot(xs, ys, color=style["color"], **DOTS, linestyle="")

    cell.grid(True, linewidth=0.4, alpha=0.5)
    cell.spines[["top", "right"]].set_visible(False)
    cell.tick_params(labelsize=8)
    cell.yaxis.set_major_formatter(units)


def _draw_setting(
    cell: Any,
    setting: Setting,
    *,
    x: str,
    y: str,
    smooth: int,
    statistic: str | None,
    scales: Ranges | None,
    style: Mapping[str, str],
) -> None:
    """Draws a setting: a run as a line, several as the line of their statistic with its band.

    The single runs are drawn faintly below that line if they are of one task, and in full if they
    have no part of the axis in common, so that there is no such line.
    """
    runs = [run for run in setting.runs if len(run_curve(run, x, y)[0])]
    curves = [thinned(*run_curve(run, x, y, smooth=smooth, ranges=scales)) for run in runs]
    label = text(setting.label(len(runs)))

    # A single run: its line, above its measurements before smoothing.
    if len(curves) == 1 and scales is None:
        if smooth > 1:
            raw_xs, raw_ys = thinned(*run_curve(runs[0], x, y))
            cell.plot(raw_xs, raw_ys, color=style["color"], lw=0.6, alpha=0.35)
        xs, ys = curves[0]
        cell.plot(xs, ys, linewidth=1.4, label=label, **style, **_marks(xs, y))
        return

    # Several runs: the line of each.
    span = common_span(runs, x, y)
    if span is not None and span[0] == span[1]:  # one point has no line
        span = None
    if scales is None or span is None:
        thin = {"color": style["color"], "linewidth": 0.6, "alpha": 0.3 if span else 1.0}
        for xs, ys in curves:
            cell.plot(xs, ys, **thin, **_marks(xs, y))

    if span is None:
        # An empty line, so that the legend has this setting too, even one without runs.
        cell.plot([], [], label=label, **style)
        return

    # Their statistic, in the part of the axis that they have in common.
    places = np.linspace(*span, GRID)
    statistic_name = statistic or default_statistic(len(setting.tasks))
    values = strata(setting, places, x, y, smooth=smooth, ranges=scales)
    estimate = band(values, statistic_name)
    colour = style["color"]
    cell.plot(places, estimate.middle, linewidth=1.8, label=label, **style)
    cell.fill_between(places, estimate.low, estimate.high, color=colour, alpha=0.2, linewidth=0)


def _marks(xs: Floats, y: str) -> Mapping[str, Any]:
    """Returns the marker of each point, for evaluations, which are few, and for a line of one
    point, which is invisible; empty for other lines."""
    return DOTS if is_evaluation(y) or len(xs) == 1 else {}


def thinned(xs: Floats, ys: Floats) -> Points:
    """Returns at most `MOST_POINTS` points of a curve, equally spaced, with the first and the
    last."""
    if len(xs) <= MOST_POINTS:
        return xs, ys
    indices = np.linspace(0, len(xs) - 1, MOST_POINTS).round().astype(int)
    return xs[indices], ys[indices]


def text(name: str) -> str:
    """Returns a name as a label of matplotlib, which would read `$` as mathematics, and omits
    labels in the legend that begin with `_`."""
    escaped = name.replace("$", r"\$")
    return f" {escaped}" if escaped.startswith("_") else escaped


def units(value: float, position: int | None = None) -> str:
    """Returns a number of an axis with its unit: 1500000 -> "1.5M"; the signature is
    matplotlib's."""
    for factor, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{value / factor:.6g}{unit}"
    return f"{value:.6g}"


def y_label(name: str, *, scaled: bool = False) -> str:
    """Returns a metric as the label of an axis."""
    label = LABELS.get(name, name.replace("_", " "))
    return text(f"{label},\nscaled by environment" if scaled else label)


def label_x(cell: Any, x: str) -> None:
    """Names the horizontal axis of ``cell``, matplotlib's axes.

    An axis of time is in seconds, minutes or hours by its length, with round numbers as ticks.
    """
    if x != AXES["time"]:
        cell.set_xlabel("agent steps", fontsize=9)
        cell.xaxis.set_major_formatter(units)
        return

    from matplotlib.ticker import MaxNLocator

    first_s, last_s = cell.get_xlim()
    if last_s >= LEAST_HOURS_S:
        unit, unit_s = "hours", HOUR_S
    elif last_s >= LEAST_MINUTES_S:
        unit, unit_s = "minutes", MINUTE_S
    else:
        unit, unit_s = "seconds", 1.0

    ticks = MaxNLocator(8).tick_values(first_s / unit_s, last_s / unit_s)
    cell.set_xticks([tick * unit_s for tick in ticks], [f"{tick:g}" for tick in ticks])
    cell.set_xlim(first_s, last_s)
    cell.set_xlabel(f"{unit} of training", fontsize=9)


def _draw_legend(
    figure: Any, settings: Sequence[Setting], *, statistic: str | None, smooth: int, dots: bool
) -> None:
    """Draws below the panels the names of the lines, and what a line, a band and a dot is."""
    explanations = []
    repeated = [setting for setting in settings if len(setting.runs) > 1]
    if repeated:
        statistics = {statistic or default_statistic(len(setting.tasks)) for setting in repeated}
        names = " or ".join(STATISTIC_NAMES[name] for name in sorted(statistics))
        explanations += [f"line: {names}", "band: 95 % bootstrap interval"]
    if dots:
        explanations.append("dots: evaluations")
    if smooth > 1:
        explanations.append(f"smoothed over {smooth} measurements")

    # A line of several panels is named once; one that only a single panel has, too.
    lines = {}
    for cell in figure.axes:
        for line, label in zip(*cell.get_legend_handles_labels(), strict=True):
            lines[label] = line

    is_wide = max(map(len, lines), default=0) > 30
    figure.legend(
        lines.values(),
        lines.keys(),
        loc="outside lower center",
        ncols=1 if is_wide else min(3, max(1, len(lines))),
        fontsize=8,
        frameon=False,
        title="; ".join(explanations) or None,
        title_fontsize=8,
    )
