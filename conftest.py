"""Settings of all tests; they must stand before the first import of jax."""

import contextlib
import gc
import importlib.util
import itertools
import logging
import mmap
import os
import pathlib
import shutil

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["GCE_METADATA_HOST"] = "127.0.0.1:9"  # nothing answers: a cloud that runs the tests stops none of them
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # the oracles' threads would wait for each other on busy cores
os.environ.setdefault("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")  # or `run` would start the tests' process again
_XLA_FLAGS = {
    "--xla_force_host_platform_device_count": "8",
    # Nearly all the time of the tests is compilation, and half of that is LLVM's optimisation of code that runs once.
    "--xla_backend_optimization_level": "0",
    "--xla_llvm_disable_expensive_passes": "true",
    # Half of the rest, and not in all versions. The demo, the benchmarks and all runs are compiled with them.
    "--xla_cpu_use_fusion_emitters": "false",
}


def _is_known(flag: str) -> bool:
    """Whether this version of XLA has a flag; it ends the process on one that it does not know."""
    spec = importlib.util.find_spec("jaxlib")
    assert spec and spec.origin
    for path in pathlib.Path(spec.origin).parent.glob("libjax_common.*"):
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            # As a C string: names of former flags stay in the description of the message that holds the flags.
            return content.find(b"\0" + flag.removeprefix("--").encode() + b"\0") >= 0
    return False


_environment = os.environ.get("XLA_FLAGS", "")
_flags = [f"{flag}={value}" for flag, value in _XLA_FLAGS.items() if flag not in _environment and _is_known(flag)]
os.environ["XLA_FLAGS"] = " ".join([_environment, *_flags]).strip()

# One per process with its children, and not the user's: two processes that write the same entry would corrupt it.
_CACHES = pathlib.Path(__file__).parent / ".cache" / "jax-tests"
_CACHE = _CACHES / os.environ.get("PYTEST_XDIST_WORKER", "one")
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(_CACHE)


def _link_compiled_functions() -> None:
    """Adds the functions that the other processes compiled in earlier runs, when each had other tests."""
    _CACHE.mkdir(parents=True, exist_ok=True)
    for path in _CACHES.glob("*/*-cache"):
        with contextlib.suppress(OSError):  # it has the entry, or the disk has no links
            os.link(path, _CACHE / path.name)


_link_compiled_functions()

import jax  # noqa: E402
import pytest  # noqa: E402
from oracles.families import FAMILIES  # noqa: E402
from small import allow_promotion  # noqa: E402

from flash_lm.config import keys, registry  # noqa: E402

# Tracing makes many small objects and little garbage: Python's usual intervals cost 6 % of the tests' CPU time.
gc.freeze()
gc.set_threshold(50_000, 20, 50)
# To write and read a smaller function takes as long as to compile it.
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.02)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

# So that silent broadcasting and silent widening cannot hide a mistake.
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


pytest_plugins = ["costs", "object_store"]


# Nearly all the time of the matrix over the families is compilation. So `make test` compares each family with its
# oracle and decodes it, and does the rest with those whose programs differ most; `make test-all` does all of it. A test
# of shared code is marked with its `representatives`, and `causal_alone` if only `make test-all` runs their
# bidirectional forms. A test marked `every_family` is also quick for families that are similar to another.
def _is_quick(item: pytest.Item, family: str, causal: bool) -> bool:
    if few := item.get_closest_marker("representatives"):
        return family in few.args and (causal or not few.kwargs.get("causal_alone"))
    row = FAMILIES.get(family)  # None: a hybrid
    if not causal and not (row and row.both_ways):
        return False
    return not (row and row.like) or bool(item.get_closest_marker("every_family") and causal)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Marks the tests of families that only `make test-all` runs, and groups tests that share compiled functions."""
    for item in items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        family = params.get("family")
        if family and not _is_quick(item, family, params.get("causal", True)):
            item.add_marker(pytest.mark.slow("of a family, or a form of it, that is much like another"))
        for mark in item.iter_markers("slow"):
            if not (len(mark.args) == 1 and isinstance(mark.args[0], str)):
                raise pytest.UsageError(f'{item.nodeid}: a slow test says why: pytest.mark.slow("starts a process")')
        # Models of a family are kept for the session of a process, so its tests run in the same one.
        group = item.get_closest_marker("group")
        item.add_marker(pytest.mark.xdist_group(family or (group.args[0] if group else item.path.stem)))


_LOG = logging.getLogger("flash_lm")
_MAPS = pathlib.Path("/proc/self/maps")
_MOST_MAPS = 50_000  # Linux allows a process 65530; ten tests make a few thousand at most
_tests_done = itertools.count(1)


@pytest.fixture(autouse=True)
def _forget_compiled_functions():
    """Each kernel of a compiled function holds memory maps, and with too many of them the process crashes."""
    yield
    # Counting them takes a while.
    if next(_tests_done) % 10 == 0 and _MAPS.exists() and _MAPS.read_bytes().count(b"\n") > _MOST_MAPS:
        jax.clear_caches()


@pytest.fixture(autouse=True)
def _the_log_as_it_was():
    """Restores the level of our log, which a command that a test runs may have set."""
    before = _LOG.level
    yield
    _LOG.setLevel(before)


@pytest.fixture(scope="module")
def browser():
    """Chromium, for tests of pages."""
    from playwright.sync_api import sync_playwright  # noqa: PLC0415 (few tests need it)

    if not (path := shutil.which("chromium") or shutil.which("google-chrome")):
        pytest.skip("there is no chromium: install it to test the page")
    options = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=options)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def usual_promotion():
    """Optax mixes integers and floats, so the tests of training run under jax's usual promotion."""
    with allow_promotion():
        yield


@pytest.fixture
def restore_registries():
    """Removes what a test registers."""
    tables = [registry.FAMILIES, registry.HEADS, registry.TASKS, registry.CORPORA, registry.OPTIMIZERS, keys.SECTIONS]
    copies = [dict(table) for table in tables]
    yield
    for table, before in zip(tables, copies, strict=True):
        table.clear()
        table.update(before)
