"""flash-lm serve --workdir=runs/x [--host=127.0.0.1 --port=8000 --rows=16 …]."""

import argparse
import dataclasses
import logging
import os
import re
import signal
import socket
import sys

from flash_lm.cli.flags import add_run_flags, parse_run
from flash_lm.cli.run import run
from flash_lm.cli.types import positive
from flash_lm.config.model import DTYPES
from flash_lm.errors import InputError, first_line, missing_package
from flash_lm.inference.service.limits import Limits

_log = logging.getLogger("flash_lm.serve")  # also where the module is the program
_KEY = "FLASH_LM_API_KEY"
_LIMITS = {
    "rows": "answers generated at the same time",
    "waiting": "answers that may wait in the queue",
    "prompt_tokens": "longest prompt, in tokens",
    "masks": "most [MASK]s per request",
    "new_tokens": "longest answer, in tokens",
    "request_tokens": "most tokens of a request: of all its answers, each with its prompt",
    "seconds": "time limit of a request",
}


def flags() -> argparse.ArgumentParser:
    """Returns the command's argument parser."""
    defaults = Limits()
    parser = argparse.ArgumentParser(prog="flash-lm serve", description=main.__doc__)
    add_run_flags(parser)
    parser.add_argument(
        "--host",
        action="append",
        help="address to listen on (default: 127.0.0.1; 0.0.0.0: all addresses of this machine); repeat the flag for "
        "each further host name that clients use",
    )
    parser.add_argument("--port", type=int, default=8000, help="0: any free port; default: %(default)s")
    parser.add_argument(
        "--api_key",
        metavar="KEY",
        help=f"clients must send it, as Authorization: Bearer KEY; default: the environment variable {_KEY}, which "
        "other users of this machine cannot read; neither: no key",
    )
    parser.add_argument("--dtype", choices=DTYPES, help="dtype of parameters and computation; default: as trained")
    for name, help_ in _LIMITS.items():
        default = getattr(defaults, name)
        parser.add_argument(f"--{name}", type=positive, default=default, help=f"{help_}; default: {default:g}")
    return parser


def main(argv: list[str]) -> None:
    """Serves a run's checkpoint: a web page to try it, and a JSON API, documented at /docs."""
    arguments = flags().parse_args(argv)
    try:
        from flash_lm.inference.service.app import build_app, follow
        from flash_lm.inference.service.connections import server
    except ImportError as error:
        raise missing_package(str(error.name), "serve") from None
    from flash_lm.inference.model import load_model
    from flash_lm.runs.hosts import is_first
    from flash_lm.runs.lost_hosts import report_lost_host

    # Limits, key and addresses.
    key = _key(arguments.api_key)
    limits = Limits(**{field.name: getattr(arguments, field.name) for field in dataclasses.fields(Limits)})
    hosts = arguments.host or ["127.0.0.1"]
    name, mesh = parse_run(arguments)
    # Other hosts only compute; the first one listens.
    if not is_first():
        with report_lost_host():
            follow(load_model(name, dtype=arguments.dtype, mesh_shape=mesh), limits)
        return
    try:
        # The port is taken before the model loads: a busy one is reported at once.
        family = socket.AF_INET6 if ":" in hosts[0] else socket.AF_INET
        listening = socket.create_server((hosts[0], arguments.port), family=family)
    except (OSError, OverflowError) as error:
        where = f"{hosts[0]}:{arguments.port}"
        raise InputError(f"cannot listen on {where}: {first_line(error)}: choose another --host or --port") from None
    with listening:
        # Load, compile, and serve until a signal comes.
        trained = load_model(name, dtype=arguments.dtype, mesh_shape=mesh)
        _log.info("compiling %s, for %d sequences at a time; the address follows", trained.name, limits.rows)
        app = build_app(trained, limits, [*hosts, socket.gethostname()], key)
        host, port = listening.getsockname()[:2]
        host = f"[{host}]" if family == socket.AF_INET6 else host
        print(f"http://{host}:{port} serves a page to try {trained.name}; press Ctrl-C to stop", flush=True)
        for ending in (signal.SIGINT, signal.SIGTERM):  # uvicorn raises these again when all answers are finished
            signal.signal(ending, lambda *_: sys.exit(0))
        server(app, arguments.seconds).run(sockets=[listening])


def _key(flag: str | None) -> str | None:
    """The key of --api_key, or of the environment; raises InputError if no client could send it."""
    key = os.environ.get(_KEY) if flag is None else flag
    if key is not None and not re.fullmatch("[!-~]+", key):  # an empty one is a mistake, and would let everybody in
        where = _KEY if flag is None else "--api_key"
        raise InputError(f"{where} must be one or more visible ASCII characters, without spaces: choose another key")
    return key


if __name__ == "__main__":
    run(main, flags)
