"""Report of the stand-ins of Long Range Arena: from scratch, after pretraining, and the published figures."""

import pathlib
from collections.abc import Mapping, Sequence

from flash_lm.report.figure import new_figure, style
from flash_lm.report.markdown import Columns, markdown_table
from flash_lm.runs.jsonl import Line, read_lines

ARMS = ("scratch", "pretrained")
MAJORITY = "most frequent label"


def read_sweep_lines(workdir: pathlib.Path, task: str) -> list[Line]:
    """Reads the test scores of a sweep's classifiers, and adds their task and arm.

    Args:
        workdir: folder of a sweep of studies/lra/configs/, whose runs are named FAMILY_ARM.
        task: name of the task.
    """
    scores = []
    for folder in sorted(workdir.iterdir()):
        family, _, arm = folder.name.rpartition("_")
        if arm in ARMS:
            test_lines = [line for line in read_lines(folder / "results.jsonl") if line["split"] == "test"]
            for line in test_lines[-1:]:
                scores.append({"lra": task, "family": family, "arm": arm} | line)
    return scores


def lra_table(
    lines: Sequence[Line], families: Sequence[str], published: Mapping[str, Sequence[float]], tasks: Sequence[str]
) -> str:
    """Returns a Markdown table, a row per family: per task our accuracies in both arms, and the published one.

    Args:
        lines: from `read_sweep_lines`, of all tasks.
        families: the rows, in order.
        published: published accuracies in % by family, in the order of `tasks`, at full size.
        tasks: names of the tasks; those without lines are left out.
    """
    scored_tasks = [task for task in tasks if any(line["lra"] == task for line in lines)]
    columns: Columns = {"family": ("family", "{}")}
    for task in scored_tasks:
        columns |= {f"{task}, {arm}": (f"{task} {arm}", "{:.1f}") for arm in ARMS}
        columns |= {f"{task}, published": (f"{task} published", "{:.1f}")}
    rows: dict[str, Line] = {family: {"family": family} for family in families}
    rows[MAJORITY] = {"family": MAJORITY}
    for line in lines:
        rows[line["family"]][f"{line['lra']} {line['arm']}"] = 100 * line["accuracy"]
        rows[MAJORITY][f"{line['lra']} {line['arm']}"] = 100 * line["majority"]
    for family, figures in published.items():
        rows[family] |= {f"{task} published": x for task, x in zip(tasks, figures, strict=True)}
    return markdown_table(list(rows.values()), columns)


def plot_lra(lines: Sequence[Line], families: Sequence[str], tasks: Sequence[str], path: pathlib.Path) -> None:
    """Plots a panel per task: both arms of each family with 95 % intervals, and the majority baseline."""
    scored_tasks = [task for task in tasks if any(line["lra"] == task for line in lines)]
    with new_figure(path, 1, len(scored_tasks), (4.5, 4), sharey=True) as (_, grid):
        for axes, task in zip(grid.flat, scored_tasks, strict=True):
            task_lines = [line for line in lines if line["lra"] == task]
            for i, arm in enumerate(ARMS):
                points = [line for line in task_lines if line["arm"] == arm]
                y = [families.index(line["family"]) + 0.15 * (2 * i - 1) for line in points]
                percent = lambda key, points=points: [100 * line[key] for line in points]
                x, low, high = (percent(key) for key in ("accuracy", "accuracy_low", "accuracy_high"))
                error = [[b - a for a, b in zip(*ends, strict=True)] for ends in ((low, x), (x, high))]
                axes.errorbar(x, y, xerr=error, label=arm, capsize=2, **style(i) | {"linestyle": "none"})
            axes.axvline(100 * task_lines[0]["majority"], color="gray", linestyle=":", label=MAJORITY)
            axes.set(title=task, xlabel="test accuracy, % (95 % interval)")
        grid.flat[0].set_yticks(range(len(families)), families)
        grid.flat[0].set_ylim(len(families) - 0.5, -0.5)
        grid.flat[0].legend(fontsize=7)
