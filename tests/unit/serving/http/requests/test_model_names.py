"""Model names that lead to adapters, and those that do not."""

import asyncio
import os
from types import SimpleNamespace

import pytest
from support.doubles.fake_engine import FakeEngine, write_fake_adapters

from lora_jax.adapters.task_head import HeadKind, TaskHead
from serving.adapters.rollout import Rollout, Shares
from serving.http.access.keys import Caller
from serving.http.errors import ApiError
from serving.http.requests.model_names import ModelNames, Target, folder_adapters

EVERYBODY = Caller()


@pytest.fixture
def names(tmp_path) -> ModelNames:
    root = write_fake_adapters(tmp_path / "root", "sql", "law", "bad-one")
    return ModelNames(FakeEngine(root))


def resolve(names: ModelNames, model=None, lora_path=None, caller=EVERYBODY) -> Target:
    return asyncio.run(names.resolve(model, lora_path, caller))


@pytest.mark.parametrize(
    ("model", "lora_path", "adapter"),
    [
        (None, None, None),
        ("", "", None),
        ("fake-base", None, None),
        ("sql", None, "sql"),
        ("fake-base:sql", None, "sql"),
        ("fake-base", "sql", "sql"),
        (None, "sql", "sql"),
        ("sql", "sql", "sql"),
        ("fake-base:sql", "sql", "sql"),
    ],
)
def test_all_spellings(names, model, lora_path, adapter):
    assert resolve(names, model, lora_path) == Target(adapter or "fake-base", adapter)


NOWHERE = ["nope", "other:sql", "fake-base:", "fake-base:nope", "../sql", "/etc/passwd", "a,b"]
NOWHERE += ["some/where/fake-base", "s q", "sql/", ".hidden", "x" * 65, "sql\0", "Sql"]


@pytest.mark.parametrize("name", NOWHERE)
def test_unknown_names_are_404_and_say_which(names, name):
    with pytest.raises(ApiError) as error:
        resolve(names, name)
    assert error.value.status == 404
    assert error.value.message.startswith(f"The model `{name}` does not exist. GET /v1/")
    assert error.value.param == "model"
    with pytest.raises(ApiError) as error:
        resolve(names, "fake-base", name)
    assert (error.value.status, error.value.param) == (404, "lora_path")


def test_an_unknown_part_of_a_sum_is_told_of_the_field_that_names_it(names):
    given = [{"name": "sql"}, {"name": "nope"}]
    with pytest.raises(ApiError, match="`nope` does not exist") as error:
        asyncio.run(names.resolve_sum(given, "fake-base", None, EVERYBODY, ""))
    assert (error.value.status, error.value.param) == (404, "adapters")


def test_two_different_adapters_are_400(names):
    with pytest.raises(ApiError, match="law") as error:
        resolve(names, "sql", "law")
    assert error.value.status == 400


def test_hidden_adapters_do_not_exist(names):
    tenant = Caller(adapters=frozenset({"law"}))
    assert names.visible_adapters(tenant) == ["law"]
    assert [names.sees_adapter(n, tenant) for n in ("law", "sql", "nope")] == [True, False, False]
    assert resolve(names, "law", caller=tenant).adapter == "law"
    with pytest.raises(ApiError) as error:
        resolve(names, "sql", caller=tenant)
    assert error.value.message.startswith("The model `sql` does not exist.")


def test_a_name_in_a_rollout_has_the_head_that_all_its_versions_have(tmp_path):
    one, other = TaskHead(HeadKind.CLASS, ("a", "b")), TaskHead(HeadKind.COUNT, ("0", "1"))
    heads = {"x": one, "x@v1": other, "x@v2": other, "x@v3": one, "y": one, "y@v1": None}
    registry = [SimpleNamespace(name=n, report=SimpleNamespace(head=h)) for n, h in heads.items()]
    engine = FakeEngine(tmp_path)
    engine.registry.known = lambda: registry
    states: dict[str, Rollout] = {}
    engine.rollouts.states = lambda: states
    made = ModelNames(engine)

    def head_of(name: str, **buckets: int) -> TaskHead | None:
        states[name] = Rollout(Shares(buckets))
        return made.heads().get(name)

    assert made.heads() == {name: head for name, head in heads.items() if head is not None}
    assert head_of("x", v1=5_000, v2=5_000) == other
    assert head_of("x", v1=9_000, v3=1_000) is None
    assert head_of("x", v1=10_000, v3=0) == other
    assert head_of("y", v1=10_000) is None, "its versions have none"


def test_seeing_one_agrees_with_listing_all(names):
    listed = names.visible_adapters(EVERYBODY)
    assert listed == ["bad-one", "law", "sql"]
    candidates = [*listed, *NOWHERE, "fake-base"]
    assert [n for n in candidates if names.sees_adapter(n, EVERYBODY)] == listed


def test_an_adapter_that_cannot_be_read_says_why(names):
    with pytest.raises(ValueError, match="lora_B is missing"):
        resolve(names, "bad-one")


def test_folder_lists_only_adapters_inside(tmp_path):
    root = write_fake_adapters(tmp_path / "root", "sql", "a,b")
    outside = write_fake_adapters(tmp_path / "outside", "law")
    (root / "law").symlink_to(outside / "law")
    (root / "alias").symlink_to(root / "sql")
    (root / "empty").mkdir()
    (root / "file").write_text("")
    assert folder_adapters(str(root)) == {"sql", "alias"}
    assert folder_adapters(None) == folder_adapters(str(tmp_path / "none")) == set()
    os.remove(root / "alias")
    assert folder_adapters(str(root)) == {"sql"}
