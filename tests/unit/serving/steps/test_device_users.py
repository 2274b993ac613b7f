"""No step waits on a device that something else in the process uses."""

import threading
import time

import pytest

from serving.steps import device_users
from serving.steps.device_users import DeviceUsers


def test_steps_wait_beside_no_second_user():
    users = DeviceUsers()
    with users.use():
        assert users.begin_wait()
        users.end_wait()
        with users.use():
            assert not users.begin_wait()
        assert users.begin_wait()


def test_as_many_steps_as_may_wait_beside_a_second_user_and_keep_none_from_beginning():
    users = DeviceUsers()
    with users.use():
        assert users.begin_wait(2)
        with users.use():  # which begins at once
            assert users.begin_wait(2)
            assert not users.begin_wait(2)
            users.end_wait()
            assert users.begin_wait(2)
        assert users.begin_wait(2)


def test_a_second_user_begins_when_no_step_waits():
    users, order = DeviceUsers(), []

    def second():
        with users.use():
            order.append("second")

    with users.use():  # the first one has nothing to wait for
        assert users.begin_wait()
        thread = threading.Thread(target=second)
        thread.start()
        while users.begin_wait():  # the second one has not asked yet
            users.end_wait()
            time.sleep(0.001)
        order.append("posted")
        users.end_wait()
        thread.join(60)
    assert order == ["posted", "second"]


def test_a_user_outlasts_a_step_that_gave_up_and_one_that_fails_is_no_user(monkeypatch):
    monkeypatch.setattr(device_users, "_PATIENCE_S", 0.01)
    users = DeviceUsers()
    with users.use():
        assert users.begin_wait()
        with pytest.raises(OSError, match="no model"), users.use():
            raise OSError("no model")
        assert users.begin_wait()


def test_one_that_is_interrupted_while_it_waits_is_no_user(monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    users = DeviceUsers()
    with users.use():
        assert users.begin_wait()
        monkeypatch.setattr(users._changed, "wait_for", interrupted)
        with pytest.raises(KeyboardInterrupt), users.use():
            pass
        assert users.begin_wait()
