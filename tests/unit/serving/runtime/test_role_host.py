"""This machine starts a role as a child of this process."""

import pytest

from serving.runtime.role_host import THIS_HOST, OneHost


def test_a_role_of_this_host_is_a_child_with_a_pipe():
    ours, theirs = THIS_HOST.pipe()
    process = THIS_HOST.process(_answer, (theirs, b"here"), "role")
    process.start()
    theirs.close()
    assert ours.recv_bytes() == b"here"
    process.join(20)
    assert (process.exitcode, process.name, process.daemon) == (0, "role", True)
    ours.close()
    process.close()
    with pytest.raises(NotImplementedError, match="Unix sockets"):
        THIS_HOST.free_port()


def test_one_host_has_all_roles():
    hosts = OneHost()
    assert hosts.instance(3) == (hosts.server_rank(1),) == (THIS_HOST,)
    assert hosts.answer_here
    hosts.require_folder("/anywhere")
    hosts.close()


def _answer(connection, word):
    connection.send_bytes(word)
