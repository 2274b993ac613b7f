"""When requests of an engine's loop have ended, and how they are kept from it."""

from support.waiting import wait_until


def ended(deltas):
    return bool(deltas) and deltas[-1].finish_reason is not None


def wait_sound(case):
    """Return when the books agree: callers have the last token before they do."""

    def is_sound():
        try:
            case.loop.check_integrity()
        except AssertionError:
            return False
        return True

    wait_until(is_sound)


def held_from(condition, go_on):
    """Trouble that lets steps run until the condition holds, and from `go_on` on.

    So requests do not end before the test has done what it does to them.
    """
    return lambda plan: condition() and not go_on.wait(60)
