"""Worker process of `python -m studies next`; it runs in the study's checkout."""

import argparse
import json
import time

from flash_lm.cli.run import run
from flash_lm.cli.types import local_path
from flash_lm.errors import Stopped
from studies.protocol.cores import one_core


def main(argv: list[str]) -> None:
    """Makes jobs on one core until the time is over, or writes the first losses of their configs."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    for name in ("results", "queue", "data"):
        parser.add_argument(f"--{name}", required=True, type=local_path)
    parser.add_argument("--hours", type=float, help="of work")
    parser.add_argument("--commit", help="the study's first commit, which lines name")
    parser.add_argument("--losses", type=local_path, help="write the first losses to this file and make no job")
    arguments = parser.parse_args(argv)
    end = time.monotonic() + 3600 * (arguments.hours or 0)
    with one_core(arguments.queue):
        # Imported only now: JAX starts a thread for each core that the process may use.
        from flash_lm.sweeps.jobs import JobFolder, make_jobs  # noqa: PLC0415
        from flash_lm.training.interrupt import stop_on_signal  # noqa: PLC0415
        from studies.controls import data, design  # noqa: PLC0415
        from studies.protocol.first_losses import first_losses  # noqa: PLC0415
        from studies.protocol.queue import read_hashes, select_queued  # noqa: PLC0415

        texts = data.prepare_texts(arguments.data, arguments.queue / "data")
        out, quality = arguments.results / design.NAME, arguments.results / "quality"
        jobs_now = lambda: select_queued(design.jobs_now(texts, design.read_counted_lines(out, quality)))
        with stop_on_signal() as stopped:
            if arguments.losses:
                arguments.losses.write_text(
                    json.dumps(first_losses(design.jobs_ever(texts), stopped)), encoding="utf-8"
                )
                return
            should_stop = lambda: stopped() or time.monotonic() > end
            job_folder = JobFolder(out, arguments.queue, should_stop, read_hashes())
            try:
                make_jobs(jobs_now, job_folder, {"study_commit": arguments.commit})
                print("nothing is left that can be made now: see python -m studies status")
            except Stopped:
                if stopped():
                    raise
                print(f"{arguments.hours:g} hours are over: the same command goes on from here")


if __name__ == "__main__":
    run(main)
