"""Notebooks that take long are run by make test-all alone."""

import pytest

LONG = {"4_functions.ipynb"}  # three engines' steps are compiled where they are not kept


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.name in LONG:
            item.add_marker(pytest.mark.long)
