"""flash-lm harness --workdir=runs/x --tasks=own_text,minimal_pairs [--include=configs/harness …]."""

import argparse
from typing import Any

from flash_lm.cli.flags import add_run_flags, parse_run, results_file
from flash_lm.cli.run import run
from flash_lm.cli.types import any_path, local_path, positive, split_words
from flash_lm.errors import InputError, first_line, missing_package
from flash_lm.runs.jsonl import Line, append_jsonl


def flags() -> argparse.ArgumentParser:
    """Returns the command's argument parser."""
    parser = argparse.ArgumentParser(prog="flash-lm harness", description=main.__doc__)
    add_run_flags(parser)
    parser.add_argument("--tasks", required=True, help="names of tasks, separated by commas or spaces")
    parser.add_argument(
        "--include", default="configs/harness", type=local_path, help="folder of YAML files; default: %(default)s"
    )
    parser.add_argument("--published", action="store_true", help="also the tasks that the harness publishes (network)")
    parser.add_argument("--shots", type=int, help="examples before each question; default: as the task says")
    parser.add_argument("--limit", type=positive, help="only the first questions of each task")
    parser.add_argument("--results", type=any_path, help="a JSONL file; default: harness.jsonl in the run's folder")
    return parser


def main(argv: list[str]) -> None:
    """Scores a run's checkpoint on tasks of EleutherAI's lm-evaluation-harness, and prints its table."""
    arguments = flags().parse_args(argv)
    try:
        from lm_eval import __version__
        from lm_eval.evaluator import simple_evaluate
        from lm_eval.tasks import TaskManager
        from lm_eval.utils import make_table
    except ImportError as error:
        raise missing_package(str(error.name), "harness") from None
    from flash_lm.inference.harness import HarnessModel
    from flash_lm.inference.model import load_model

    # The tasks, loaded before the model, so that a typing error costs no time.
    if not arguments.include.is_dir():
        raise InputError(f"--include={arguments.include} is no folder: give the one that has your YAML files")
    manager = TaskManager(include_path=str(arguments.include), include_defaults=arguments.published)
    tasks = split_words(arguments.tasks)
    if unknown := [task for task in tasks if task not in manager.all_tasks]:
        known = ", ".join(manager.all_tasks) if not arguments.published else "those of `lm_eval ls tasks`"
        raise InputError(f"--tasks: there is no task {', '.join(unknown)}; known are {known}")
    try:
        manager.load([*tasks])  # `simple_evaluate` loads them once more
    except Exception as error:  # whatever a user's YAML file, its data and its templates raise
        what = f"{type(error).__name__}: {first_line(error)}"
        raise InputError(f"--tasks={arguments.tasks}: {what}: look at the task's YAML file and its data") from None
    # The harness asks the model for log-likelihoods and generated text.
    name, mesh = parse_run(arguments)
    out = results_file(arguments, name, "harness.jsonl")
    trained = load_model(name, mesh_shape=mesh)
    results: Any = simple_evaluate(
        model=HarnessModel(trained),
        tasks=[*tasks],
        task_manager=manager,
        num_fewshot=arguments.shots,
        limit=arguments.limit,
        bootstrap_iters=0,
        log_samples=False,
    )
    # One line per task.
    about = {"run": trained.name, "step": trained.step, "family": trained.config.model.label, "lm_eval": __version__}
    print(make_table(results))
    append_jsonl(out, _lines(results, about))


def _lines(results: Any, about: Line) -> list[Line]:
    """A line for each task and group of tasks, with its scores by name, and how many questions it has."""
    lines = []
    for task, scores in results["results"].items():
        numbers = {key: x for key, x in scores.items() if isinstance(x, int | float) and key != "sample_len"}
        values = {key.partition(",")[0]: x for key, x in numbers.items() if "stderr" not in key}
        count = (
            results["n-samples"].get(task, {}).get("effective", scores.get("sample_len"))
        )  # a group has only the last
        lines.append({**about, "task": task, "questions": count, **values, "version": results["versions"].get(task)})
    return lines


if __name__ == "__main__":
    run(main, flags)
