"""A folder that all hosts must see: those that do not are named, and nothing is left in it."""

from pathlib import Path

import pytest

from serving.cluster.far.folder import require_seen


def sees(path, content):
    return Path(path).read_bytes() == content


def test_a_folder_that_all_hosts_see_is_taken(tmp_path):
    require_seen(str(tmp_path), {"node 0": sees, "node 1": sees})
    assert not list(tmp_path.iterdir())


def test_hosts_that_do_not_see_it_are_named_with_what_to_change(tmp_path):
    hosts = {"node 0": sees, "node 1": lambda path, content: False, "node 2": lambda *given: False}
    with pytest.raises(ConnectionError, match=r"not seen by node 1, node 2\. .*give --state-dir a"):
        require_seen(str(tmp_path), hosts)
    assert not list(tmp_path.iterdir())


def test_nothing_is_left_where_a_host_does_not_answer(tmp_path):
    def silent(path, content):
        raise ConnectionError("A node does not answer")

    with pytest.raises(ConnectionError, match="does not answer"):
        require_seen(str(tmp_path), {"node 0": silent})
    assert not list(tmp_path.iterdir())
