"""Settings of all tests; they must stand before the first import of jax."""

import os
import pathlib

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["HF_HUB_OFFLINE"] = "1"
_DEVICES = "--xla_force_host_platform_device_count"
if _DEVICES not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_DEVICES}=8".strip()

import jax  # noqa: E402
import pytest  # noqa: E402

# One a process: two that write the same entry would spoil it.
_CACHE = pathlib.Path(__file__).parent.parent / ".cache" / "jax-tests" / os.environ.get("PYTEST_XDIST_WORKER", "one")
jax.config.update("jax_compilation_cache_dir", str(_CACHE))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

# So that silent broadcasting and silent widening cannot hide a mistake.
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


# AFT's programs take long to compile, and aft_local has the code of all of them: the others are compared with their
# oracles and decoded in `make test`, and do all the rest in `make test-all`.
_ALIKE = ("aft_full", "aft_simple", "aft_conv")
_ALWAYS = ("test_oracle", "test_decoding", "test_sizes", "test_config")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Marks what only `make test-all` runs of families that are alike, and what shares compiled functions."""
    for item in items:
        family = item.callspec.params.get("family") if hasattr(item, "callspec") else None
        if family in _ALIKE and item.path.stem not in _ALWAYS:
            item.add_marker(pytest.mark.slow)
        # Models of a family are kept for the session of a process, so its tests run in the same one.
        item.add_marker(pytest.mark.xdist_group(family or item.path.stem))


_MAPS = pathlib.Path("/proc/self/maps")
_MOST_MAPS = 35_000  # Linux allows a process 65530


@pytest.fixture(autouse=True)
def _forget_compiled_functions():
    """Each kernel of a compiled function holds memory maps, and with too many of them the process crashes."""
    yield
    if _MAPS.exists() and _MAPS.read_bytes().count(b"\n") > _MOST_MAPS:
        jax.clear_caches()


@pytest.fixture(scope="module")
def usual_promotion():
    """Optax mixes integers and floats, so the tests of training run under jax's usual promotion."""
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    jax.config.update("jax_numpy_rank_promotion", "allow")
    yield
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
