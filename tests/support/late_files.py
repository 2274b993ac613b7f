"""Workers of pytest-xdist that import a test file when its turn comes, not all files at the start.

Every worker must list the same items, so that each of them would import every test file: 20 s of
processor time a worker. With `--dist loadfile` a worker runs whole files. It lists one item a file
instead, and collects the file's own tests when it runs that item. Reports name the tests as ever.
"""

import gc
import sys
from pathlib import Path

import pytest

FREEZE_AFTER = 100  # modules that were imported since


class LateFile(pytest.Item):
    """A test file that is collected when it runs."""

    def run_tests(self, nextitem: pytest.Item | None) -> None:
        """Collect the file's tests, and run those that are chosen."""
        session = self.session
        module = pytest.Module.from_parent(self.parent, path=self.path)
        tests = list(session.genitems(module))
        self.config.hook.pytest_collection_modifyitems(
            session=session, config=self.config, items=tests
        )
        _freeze_what_was_imported()
        if not tests:  # the item before kept the folders of this file set up
            session._setupstate.teardown_exact(nextitem)
        place = session.items.index(self)
        try:
            for test, following in zip(tests, [*tests[1:], nextitem], strict=False):
                session.items[place] = test  # pytest-xdist holds the report against it
                test.ihook.pytest_runtest_protocol(item=test, nextitem=following)
                if session.shouldfail or session.shouldstop:
                    break
        finally:
            session.items[place] = self

    def runtest(self) -> None:
        """Never called: `run_tests` takes the place of the item's own protocol."""
        raise AssertionError("a late file runs its tests, not itself")

    def reportinfo(self) -> tuple[Path, None, str]:
        """Return where the item is, for pytest's messages."""
        return self.path, None, self.nodeid


def late_file(path: Path, parent: pytest.Collector) -> LateFile | None:
    """Return the file's item where a worker deals in files, and nothing chooses single tests."""
    config = parent.config
    whole = getattr(config, "workerinput", {}).get("dist") == "loadfile"
    chosen = config.option.keyword or any("::" in argument for argument in config.args)
    if not whole or chosen or not config.option.markexpr.startswith("not ("):
        return None
    nodeid = path.relative_to(config.rootpath).as_posix()
    item = LateFile.from_parent(parent, name=path.name, path=path, nodeid=nodeid)
    item.add_marker(pytest.mark.timeout(0))  # each test has its own
    return item


_frozen_at = 0


def _freeze_what_was_imported() -> None:
    """Leave modules out of each later collection of garbage."""
    global _frozen_at
    if len(sys.modules) > _frozen_at + FREEZE_AFTER:
        gc.collect()
        gc.freeze()
        _frozen_at = len(sys.modules)
