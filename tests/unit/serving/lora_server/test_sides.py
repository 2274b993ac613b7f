"""Every end of an engine has the interface that its adapters' residency uses."""

import ast
import typing

import pytest
from support.processes.server_process import ROOT

from serving.lora_server import sides

SOURCE = ROOT / "serving" / "loading" / "server_residency.py"


def used() -> set[str]:
    """Names that the residency uses of its server."""
    tree = ast.parse(SOURCE.read_text())
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("self.server", "server")
    }


@pytest.mark.parametrize("side", typing.get_args(sides.RemoteSide))
def test_a_side_has_what_a_residency_uses(side):
    names = used() - {"wake"}  # of instances
    assert len(names) > 8
    assert not [name for name in names if not hasattr(side, name)]


@pytest.mark.parametrize("access", typing.get_args(sides.RemoteAccess))
def test_an_access_opens_a_side(access):
    assert callable(access.open)
    assert isinstance(access.holds_all, bool)


@pytest.mark.parametrize("link", typing.get_args(sides.RemoteLink))
def test_a_link_starts_a_step(link):
    assert callable(link.start)
