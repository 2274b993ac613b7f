"""Fixtures of the ops' tests."""

import jaxtyping
import pytest


@pytest.fixture
def shapes_unchecked():
    """Let wrong shapes pass the annotations, so that the op's own refusal is seen."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
