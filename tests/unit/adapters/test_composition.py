"""Weighted sums of adapters as one adapter, and sums that cannot be."""

import dataclasses

import numpy as np
import pytest

from lora_jax.adapters.composition import (
    Part,
    digest_of,
    names_in,
    pair_of,
    parts_of,
    shown,
    sum_of,
    union_of,
    versions_in,
)
from lora_jax.adapters.entries import AdapterEntry
from lora_jax.adapters.kinds import AdapterKind
from lora_jax.adapters.weights import AdapterReport, AdapterWeights, ExpertWeights, SiteWeights
from lora_jax.rank_rows import parts

REPORT = AdapterReport(AdapterKind.LORA, "x", "d" * 64, {}, 0, 100, {}, 2, 0, None, None)


def site(rank, experts=(1, 1), seed=0, scaling=2.0, dtype="f4"):
    rng = np.random.default_rng(seed)
    a, b = (
        rng.standard_normal((n, rank, width)).astype(dtype)
        for n, width in zip(experts, (6, 5), strict=True)
    )
    return SiteWeights(a, b, scaling)


def lora(**sites):
    keyed = {(module.replace("__", "."), 0): one for module, one in sites.items()}
    return AdapterWeights(keyed, REPORT)


def delta(one, x, expert=0):
    """What a site adds, in float64."""
    a, b = (m[expert if len(m) > 1 else 0].astype("f8") for m in (one.a, one.b))
    return one.scaling * (x @ a.T) @ b


def test_the_sum_is_what_the_parts_add():
    x = np.random.default_rng(9).standard_normal((3, 6))
    one = lora(q_proj=site(2, seed=1), v_proj=site(1, seed=2))
    two = lora(q_proj=site(3, seed=3, scaling=0.5))
    made = sum_of([(one, 0.7), (two, -1.5)], "e" * 64, "one*0.7+two*-1.5", max_rank=8)
    q = made.sites["q_proj", 0]
    want = 0.7 * delta(one.sites["q_proj", 0], x) - 1.5 * delta(two.sites["q_proj", 0], x)
    np.testing.assert_allclose(delta(q, x), want, rtol=1e-6)
    assert (q.rank, q.scaling) == (5, 1.0)
    assert made.sites["v_proj", 0].rank == 1
    assert made.digest == "e" * 64
    assert made.report.max_rank == 5
    assert made.report.weight_bytes == 4 * (5 * 11 + 11)


def test_a_sum_of_rows_in_8_bits_keeps_their_values_and_scales_them():
    one, two = lora(q_proj=site(2, seed=1)), lora(q_proj=site(3, seed=2, scaling=0.3))
    coded = [weights.in_8_bits() for weights in (one, two)]
    made = sum_of([(coded[0], 0.7), (coded[1], 0.1)], "e" * 64, "x", max_rank=8)
    values, scales = parts(made.sites["q_proj", 0].a)
    first, second = (parts(weights.sites["q_proj", 0].a) for weights in coded)
    np.testing.assert_array_equal(values, np.concatenate([first[0], second[0]], axis=1))
    f = np.float32
    want = [first[1] * f(0.7) * f(2.0), second[1] * f(0.1) * f(0.3)]
    np.testing.assert_array_equal(scales, np.concatenate(want, axis=1))


def test_ranks_stand_in_order_and_only_a_is_scaled_in_float32():
    one, two = lora(q_proj=site(2, seed=1)), lora(q_proj=site(3, seed=2, scaling=0.3))
    made = sum_of([(one, 0.7), (two, 0.1)], "e" * 64, "x", max_rank=8).sites["q_proj", 0]
    f = np.float32
    parts = [(one, 0.7, 2.0), (two, 0.1, 0.3)]
    want = [w.sites["q_proj", 0].a * f(weight) * f(scaling) for w, weight, scaling in parts]
    np.testing.assert_array_equal(made.a, np.concatenate(want, axis=1))
    np.testing.assert_array_equal(
        made.b, np.concatenate([w.sites["q_proj", 0].b for w, _, _ in parts], axis=1)
    )
    assert made.a.dtype == np.float32


def test_one_matrix_for_all_experts_joins_one_for_each():
    x = np.random.default_rng(9).standard_normal((3, 6))
    name = "experts.gate_proj"
    one = lora(experts__gate_proj=site(2, experts=(4, 1), seed=1))
    two = lora(experts__gate_proj=site(1, experts=(1, 4), seed=2))
    made = sum_of([(one, 1.0), (two, 2.0)], "e" * 64, "x", max_rank=8).sites[name, 0]
    for expert in range(4):
        want = delta(one.sites[name, 0], x, expert) + 2 * delta(two.sites[name, 0], x, expert)
        np.testing.assert_allclose(delta(made, x, expert), want, rtol=1e-6)


def test_matrices_that_sites_share_stay_one():
    def absorbed(seed):
        """MLA: the A of kv_b_proj is kv_b_proj.v's A and kv_b_proj.k's B."""
        shared, k, v = site(2, seed=seed).a, site(2, seed=seed + 1), site(2, seed=seed + 2)
        return lora(
            kv_b_proj__k=SiteWeights(k.b, shared, 2.0), kv_b_proj__v=SiteWeights(shared, v.b, 2.0)
        )

    x = np.random.default_rng(9).standard_normal((3, 6))
    one, two = absorbed(1), absorbed(5)
    made = sum_of([(one, 0.5), (two, 3.0)], "e" * 64, "x", max_rank=8)
    k, v = made.sites["kv_b_proj.k", 0], made.sites["kv_b_proj.v", 0]
    assert k.b is v.a
    assert len(list(made.matrices())) == 3
    for module, width in (("kv_b_proj.k", 5), ("kv_b_proj.v", 6)):
        want = sum(f * delta(w.sites[module, 0], x[:, :width]) for w, f in ((one, 0.5), (two, 3.0)))
        np.testing.assert_allclose(delta(made.sites[module, 0], x[:, :width]), want, rtol=1e-6)


def test_ranks_over_the_server_s_name_the_flag():
    one, two = lora(q_proj=site(5)), lora(q_proj=site(4, seed=1))
    with pytest.raises(ValueError, match=r"sum to 9 at q_proj; the server takes max_lora_rank=8"):
        sum_of([(one, 1.0), (two, 1.0)], "e" * 64, "one*1+two*1", max_rank=8)


def experts(**layers):
    found = {int(k[1:]): dict.fromkeys(v, (np.zeros((2, 2)),) * 3) for k, v in layers.items()}
    return ExpertWeights(found, REPORT)


def test_experts_of_two_adapters_stand_together_unless_they_are_the_same():
    made = union_of([experts(l1=(4, 1), l2=(0,)), experts(l1=(2,), l0=(3,))], "e" * 64, "x")
    assert {layer: tuple(own) for layer, own in made.experts.items()} == {
        0: (3,),
        1: (1, 2, 4),
        2: (0,),
    }
    assert made.report.experts == {0: (3,), 1: (1, 2, 4), 2: (0,)}
    with pytest.raises(ValueError, match="expert 4 of layer 1"):
        union_of([experts(l1=(4, 1)), experts(l1=(4,))], "e" * 64, "x")


def test_a_pair_counts_both():
    one = AdapterEntry("a", AdapterKind.LORA, "1", 1, lora(q_proj=site(2)), False, "a")
    two = AdapterEntry("e", AdapterKind.ESFT, "2", 1, experts(l1=(1,)), False, "e")
    pair = pair_of(one, two, "e" * 64, "a*1+e*1")
    assert (pair.digest, pair.report.kind, pair.report.weight_bytes) == ("e" * 64, "pair", 200)


def test_what_an_adapter_has_beside_lora_is_not_composed():
    more = dataclasses.replace(REPORT, brings=("DoRA", "a bias"), folder="/a/dora")
    parts = [(lora(q_proj=site(1)), 0.7), (AdapterWeights({}, more), 0.5)]
    with pytest.raises(ValueError, match=r"with DoRA, a bias \(/a/dora\) is not composed with"):
        sum_of(parts, "e" * 64, "one*0.7+dora*0.5", max_rank=8)


def test_digests_know_weights_and_order():
    given = [[("a", 1.0), ("b", 0.5)], [("b", 0.5), ("a", 1.0)], [("a", 1.0), ("b", 0.25)]]
    assert len({digest_of(parts) for parts in given}) == 3
    assert digest_of(given[0]) == digest_of(tuple(given[0]))


def test_parts_come_as_a_list_or_a_mapping():
    parts = (Part("law", 0.7), Part("formal", 1.0))
    assert parts_of([{"name": "law", "weight": 0.7}, {"name": "formal"}]) == parts
    assert parts_of({"law": 0.7, "formal": 1}) == parts
    text = shown((part.name, part.weight) for part in parts)
    assert text == "law*0.7+formal*1"
    assert names_in(text) == ("law", "formal")
    assert names_in(shown([("law@v2", -1e-5), ("a", 100.0)])) == ("law@v2", "a")
    assert names_in("law@v2") == ()


def test_versions_of_a_sum_are_told_by_full_name():
    text = shown([("law@v2", -1e-5), ("formal", 0.5), ("sql@v1", 2.0)])
    assert versions_in(text) == "law@v2, sql@v1"
    assert versions_in(shown([("law", 0.5), ("formal", 0.5)])) is None
    assert (versions_in("law@v2"), versions_in("law"), versions_in("")) == ("v2", None, None)


def five():
    return [{"name": f"a{n}"} for n in range(5)]


WRONG = [
    ([], "1 to 4 parts, got 0"),
    (five(), "1 to 4 parts, got 5"),
    ("law", "list"),
    (["law"], "object"),
    ([{"weight": 1}], "name"),
    ([{"name": ""}], "name"),
    ([{"name": 3}], "name"),
    ([{"name": "a", "scale": 1}], "'scale'"),
    ([{"name": "a"}, {"name": "a"}], "twice"),
    *(
        ([{"name": "a", "weight": w}], "weight of 'a'")
        for w in ("1", None, True, [], 0, 101, 1e400)
    ),
    ([{"name": "a", "weight": float("nan")}], "weight of 'a'"),
]


@pytest.mark.parametrize(("given", "named"), WRONG, ids=range(len(WRONG)))
def test_wrong_parts_say_what_is_wrong(given, named):
    with pytest.raises(ValueError, match=named):
        parts_of(given)
