"""What a token costs, and what the state takes, against the length of the context."""

import math
import pathlib

from flash_lm.analysis.results import Line

# key of a line -> (what it is, its unit in terms of the line's)
_PANELS = {"ms_a_token": ("milliseconds a token", 1.0), "state_bytes": ("megabytes of state", 1e-6)}
_STYLES = ("-", "--", "-.", ":")


def plot_decoding(lines: list[Line], path: pathlib.Path) -> None:
    """Draws a row of panels for each batch size, a curve a family, with its name at its end.

    Args:
        lines: with family, batch, context, ms_a_token and state_bytes; those without a time did not fit.
        path: of the PNG.
    """
    # Matplotlib is an extra, and slow to import.
    import matplotlib  # noqa: PLC0415

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt  # noqa: PLC0415

    batches = sorted({line["batch"] for line in lines})
    families = list(dict.fromkeys(line["family"] for line in lines))
    figure, panels = plt.subplots(
        nrows=len(batches), ncols=2, squeeze=False, figsize=(14, 6 * len(batches)), layout="constrained"
    )
    for row, batch in zip(panels, batches, strict=True):
        for axes, (key, (label, unit)) in zip(row, _PANELS.items(), strict=True):
            ends = []
            for i, family in enumerate(families):
                points = [
                    (line["context"], line[key] * unit)
                    for line in lines
                    if line["family"] == family and line["batch"] == batch and line.get(key)
                ]
                if not points:
                    continue
                x, y = zip(*sorted(points), strict=True)
                (curve,) = axes.plot(x, y, _STYLES[i % len(_STYLES)], marker="o", markersize=3, color=f"C{i % 10}")
                ends.append((x[-1], y[-1], family, curve.get_color()))
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.xaxis.set_major_formatter("{x:,.0f}")
            axes.yaxis.set_major_formatter("{x:g}")
            axes.set_xlabel("tokens of context")
            axes.set_ylabel(label)
            axes.set_title(f"batch {batch}")
            axes.grid(visible=True, which="major", alpha=0.25)
            axes.spines[["top", "right"]].set_visible(False)
            _name_ends(axes, ends)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _name_ends(axes, ends: list[tuple[float, float, str, str]]) -> None:
    """Writes each curve's name at the right edge, as near to its end as the other names allow."""
    bottom, top = axes.get_ylim()
    height = 0.045  # of a name, as a part of the axes
    place = lambda y: math.log(y / bottom) / math.log(top / bottom)
    lowest = -height
    for x, y, name, color in sorted(ends, key=lambda end: end[1]):
        at = max(place(y), lowest + height)
        lowest = at
        axes.annotate(
            name,
            xy=(x, y),
            xytext=(1.03, at),
            textcoords="axes fraction",
            color=color,
            va="center",
            fontsize=9,
            arrowprops={"arrowstyle": "-", "color": color, "alpha": 0.4, "linewidth": 0.6},
        )
