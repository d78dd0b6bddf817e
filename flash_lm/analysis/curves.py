"""Validation perplexity against training seconds."""

import pathlib

from flash_lm.analysis.results import Line


def plot_curves(curves: dict[str, list[Line]], path: pathlib.Path, title: str) -> None:
    """Draws one curve a run.

    Args:
        curves: name of the run -> its validation lines.
        path: of the PNG.
        title: says what was trained.
    """
    # Matplotlib is an extra, and slow to import.
    import matplotlib  # noqa: PLC0415

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt  # noqa: PLC0415

    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    for name, lines in curves.items():
        seconds, perplexity = ([line[key] for line in lines] for key in ("train_seconds", "perplexity"))
        (curve,) = axes.plot(seconds, perplexity, marker="o", markersize=4, label=name)
        axes.annotate(
            f"{perplexity[-1]:.1f}",
            (seconds[-1], perplexity[-1]),
            (6, 0),
            textcoords="offset points",
            va="center",
            color=curve.get_color(),
        )
    axes.margins(x=0.1)
    axes.set_xlim(left=0)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.set(
        xlabel="training seconds (without compilation, evaluation and saving)",
        ylabel="validation perplexity (a token)",
        title=title,
    )
    axes.grid(visible=True, which="both", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)
