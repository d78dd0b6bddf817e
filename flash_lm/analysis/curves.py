"""Validation perplexity against steps and against training seconds."""

import pathlib

from flash_lm.analysis.results import Line

# key of a validation line -> what it is
_AXES = {"step": "steps", "train_seconds": "training seconds (without compilation, evaluation and saving)"}


def plot_curves(curves: dict[str, list[Line]], path: pathlib.Path, title: str) -> None:
    """Draws one curve a run, in two panels: quality for the same data, and quality for the same time.

    Args:
        curves: name of the run -> its validation lines.
        path: of the PNG.
        title: says what was trained.
    """
    # Matplotlib is an extra, and slow to import.
    import matplotlib  # noqa: PLC0415

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt  # noqa: PLC0415

    figure, panels = plt.subplots(ncols=2, sharey=True, figsize=(11, 5), layout="constrained")
    for axes, (key, label) in zip(panels, _AXES.items(), strict=True):
        for name, lines in curves.items():
            x, perplexity = ([line[field] for line in lines] for field in (key, "perplexity"))
            axes.plot(x, perplexity, marker="o", markersize=4, label=f"{name}: {perplexity[-1]:.1f}")
        axes.margins(x=0.03)
        axes.set_xlim(left=0)
        axes.set_xlabel(label)
        axes.grid(visible=True, which="both", alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    first = panels[0]
    first.set_yscale("log")
    first.yaxis.set_major_formatter("{x:g}")
    first.yaxis.set_minor_formatter("{x:g}")
    first.set_ylabel("validation perplexity (a token)")
    first.legend(frameon=False, title="at the end")
    figure.suptitle(title)
    figure.savefig(path, dpi=150)
    plt.close(figure)
