"""Services that the tests of this folder share: a service compiles its programs when it starts."""

import pathlib

import pytest
from small import allow_promotion

from flash_lm.inference.generation import Generator
from inference.service.serving import random_model, service

FOLDER = pathlib.Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Puts the tests of this folder in one process; it runs before the hook of the same name that reads `group`."""
    for item in items:
        if FOLDER in item.path.parents:
            item.add_marker(pytest.mark.group("service"))


@pytest.fixture(scope="package")
def usual_promotion():
    """As in other folders, but once for all tests: a change of the rules would compile the services again."""
    with allow_promotion():
        yield


@pytest.fixture(scope="package")
def generator(usual_promotion):
    """The model of `text` without a service."""
    return Generator(random_model("text"))


@pytest.fixture(scope="package")
def text(usual_promotion):
    """A client of a service that continues texts."""
    with service("text") as client:
        yield client


@pytest.fixture(scope="package")
def chat(usual_promotion):
    """A client of a service with a chat template."""
    with service("chat") as client:
        yield client


@pytest.fixture(scope="package")
def couplets(usual_promotion):
    """A client of a service that answers first lines."""
    with service("couplets") as client:
        yield client


@pytest.fixture(scope="package")
def fill_in(usual_promotion):
    """A client of a service that fills in masks."""
    with service("fill_in") as client:
        yield client
