"""Programs of functions: who makes them, and that none starts without them in a GPU's jail."""

import pytest

from serving.functions.program_maker import EXTRA_BYTES, ProgramMaker

FIELDS = {"max_loras": 1}


class Launches:
    """Stands in for an agent's launches: a function is ready where its sizes were made."""

    def __init__(self, sizes=None, keeps=True):
        self.events, self._sizes, self._keeps = [], sizes or {}, keeps
        self._kept = []
        self.maker = ProgramMaker(self._launch, lambda name: self.events.append(("end", name)))

    def start(self, compiles, name="law"):
        order = {"name": name, "adapter": f"adapters/{name}"}
        return self.maker.start(order, FIELDS, compiles=compiles)

    def _launch(self, order, programs):
        if programs["writes"]:
            assert order["adapter"] is None
            self.events.append(("makes", order["fields"]))
            self._kept += [order["fields"]] if self._keeps else []
            return order["name"], 1, {"ready": True}
        self.events.append((order["name"], programs["demands"]))
        if not programs["demands"] or (self._keeps and FIELDS | self._sizes in self._kept):
            return order["name"], 1, {"ready": True}
        return order["name"], 1, {"ready": False, "missing": "step 5f", "sizes": self._sizes}


def test_programs_are_made_while_the_function_that_needs_them_has_no_process():
    """So both are within the room of one."""
    launches = Launches()
    made = [("makes", FIELDS), ("end", "programs")]
    assert launches.start(compiles=True)[0] == "law"
    assert launches.events == [("law", True), ("end", "law"), *made, ("law", False)]
    launches.start(compiles=True)
    assert launches.events[5:] == [("law", False)]
    launches.start(compiles=True, name="summary")
    assert launches.events[6:] == [("summary", True)]


def test_programs_have_the_sizes_that_the_functions_adapter_needs():
    sizes = {"max_lora_cls_labels": 3}
    launches = Launches(sizes)
    for _ in range(2):
        assert launches.start(compiles=False)[2]["ready"]
    made = [e for e in launches.events if e[0] == "makes"]
    assert made == [("makes", FIELDS | sizes)]
    assert [e for e in launches.events if e[0] == "law"] == [("law", True)] * 3


def test_a_function_whose_programs_are_not_kept_does_not_start_in_a_gpus_jail():
    """It is never launched as one that may compile, which would have no jail."""
    launches = Launches(keeps=False)
    for times in (1, 2):  # what is no longer kept is made again
        with pytest.raises(ValueError, match=r"'law' cannot start.*step 5f.*LORA_JAX_GPU_JAIL=0"):
            launches.start(compiles=False)
        assert sum(e[0] == "makes" for e in launches.events) == times
    assert ("law", False) not in launches.events
    assert launches.events[-1] == ("end", "law")
    assert launches.start(compiles=True)[2]["ready"]


@pytest.mark.parametrize("said", [None, [1], {"model": "/etc", "max_lora_cls_labels": "3"}])
def test_a_function_names_no_fields_but_sizes(said):
    launches = Launches(keeps=False)
    launches._sizes = said
    launches.start(compiles=True)
    assert ("makes", FIELDS) in launches.events


def test_programs_that_have_gone_are_made_again_and_those_of_others_are_not():
    launches = Launches()
    launches.start(compiles=False)
    launches._kept.clear()
    assert launches.start(compiles=False)[2]["ready"]
    assert sum(e[0] == "makes" for e in launches.events) == 2
    launches.maker._make(FIELDS, {}, asked_at=0.0)  # another one asked before they were made
    assert sum(e[0] == "makes" for e in launches.events) == 2


def test_a_function_that_needs_more_than_was_measured_gets_more_and_at_last_no_bound():
    asked = []

    def launch(order, programs):
        extra = order["extra_bytes"]
        asked.append((order["name"], extra, programs["demands"]))
        if order["name"] == "big" and extra is not None and extra < EXTRA_BYTES[2]:
            return "first", 1, {"ready": False, "lacks_memory": True}
        return "second", 1, {"ready": True}

    ended = []
    maker = ProgramMaker(launch, ended.append)
    for name in ("big", "big", "small"):
        order = {"name": name, "adapter": f"adapters/{name}"}
        assert maker.start(order, FIELDS, compiles=False)[0] == "second"
    assert asked == [
        ("big", 0, True),
        ("big", EXTRA_BYTES[1], True),
        ("big", EXTRA_BYTES[2], True),
        ("big", EXTRA_BYTES[2], True),
        ("small", EXTRA_BYTES[1], True),
    ]
    assert ended == ["first", "first"]
    for _ in EXTRA_BYTES:  # it ran out of them in calls
        maker.lacked("adapters/big")
    maker.start({"name": "big", "adapter": "adapters/big"}, FIELDS, compiles=False)
    assert asked[-1] == ("big", None, True)
