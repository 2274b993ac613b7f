"""Composed adapters are made once, bounded in number and bytes, and gone with their parts."""

import dataclasses

import numpy as np
import pytest

from lora_jax.adapters.entries import AdapterEntry
from lora_jax.adapters.kinds import AdapterKind
from lora_jax.adapters.registry_errors import RegistryBusy
from lora_jax.adapters.weights import AdapterReport, AdapterWeights, ExpertWeights, SiteWeights
from serving.loading.compositions import Compositions


def report(digest, kind=AdapterKind.LORA):
    return AdapterReport(kind, "x", digest, {}, 0, 0, {}, 2, 0, None, None)


def lora(name, rank=2):
    a, b = np.ones((1, rank, 6), "f4"), np.ones((1, rank, 4), "f4")
    weights = AdapterWeights({("q_proj", 0): SiteWeights(a, b, 1.0)}, report(f"digest {name}"))
    return AdapterEntry(name, AdapterKind.LORA, weights.digest, 1, weights, False, name)


def esft(name, *experts):
    matrices = (np.zeros((2, 2)),) * 3
    weights = ExpertWeights(
        {0: dict.fromkeys(experts, matrices)}, report(f"digest {name}", AdapterKind.ESFT)
    )
    return AdapterEntry(name, AdapterKind.ESFT, weights.digest, 1, weights, False, name)


def make(max_bytes=1 << 20, **more):
    return Compositions(lambda w: None, lambda w: w, max_rank=8, max_bytes=max_bytes, **more)


BYTES = 4 * 4 * 10  # of two such adapters of rank 2


def test_one_part_of_weight_1_is_that_part():
    made, one = make(), lora("a")
    assert make(refused="no").entry([(one, 1.0)]) is one
    assert made.entry([(one, 1.0)]) is one
    assert made.entries() == ()
    half = made.entry([(one, 0.5)])
    assert half.digest != one.digest
    assert half.name == "a*0.5"


def test_the_same_sum_is_made_once():
    made, parts = make(), [(lora("a"), 0.7), (lora("b"), 0.5)]
    first = made.entry(parts)
    assert made.entry(parts) is first
    assert made.generation == 1
    assert made.entry(parts[::-1]).digest != first.digest
    assert [entry.name for entry in made.entries()] == ["a*0.7+b*0.5", "b*0.5+a*0.7"]
    made.keep_only({"digest a", "digest b"}.__contains__)
    assert len(made.entries()) == 2
    made.keep_only({"digest a"}.__contains__)
    assert made.entries() == ()
    again = made.entry(parts)  # of a request that has its parts
    assert again.weights is first.weights  # which somebody holds


def test_a_sum_has_the_names_that_were_asked_for():
    """Two names of the same files share the weights of a sum, and no caller sees the other's."""
    made, plain, other = make(), lora("a"), lora("b")
    version = dataclasses.replace(plain, name="a@v1")
    first = made.entry([(plain, 0.7), (other, 0.5)])
    again = made.entry([(version, 0.7), (other, 0.5)])
    assert (first.name, again.name) == ("a*0.7+b*0.5", "a@v1*0.7+b*0.5")
    assert again.weights is first.weights
    assert again.digest == first.digest
    assert made.entry([(plain, 0.7), (other, 0.5)]) is first


def test_lora_and_esft_are_a_pair():
    made = make()
    pair = made.entry([(lora("a"), 1.0), (esft("e", 1), 1.0)])
    assert (pair.kind, pair.weights.lora.name, pair.weights.esft.name) == ("pair", "a", "e")
    more = made.entry([(lora("a"), 1.0), (esft("e", 1), 1.0), (lora("b"), 2.0), (esft("f", 2), 1)])
    assert (more.weights.lora.name, more.weights.esft.name) == ("a*1+b*2", "e*1+f*1")
    with pytest.raises(ValueError, match="'e' is an ESFT adapter"):
        made.entry([(lora("a"), 1.0), (esft("e", 1), 0.5)])
    with pytest.raises(ValueError, match="expert 1 of layer 0"):
        made.entry([(esft("e", 1), 1.0), (esft("f", 1), 1.0)])


def test_what_does_not_fit_the_device_is_refused():
    def check(weights):
        raise ValueError("The adapter needs 4 rank rows of width 6; the device has 3.")

    made = Compositions(check, lambda w: w, max_rank=8, max_bytes=1 << 20)
    with pytest.raises(ValueError, match="the device has 3"):
        made.entry([(lora("a"), 1.0), (lora("b"), 1.0)])
    with pytest.raises(ValueError, match="max_lora_rank=8"):
        make().entry([(lora("a", 5), 1.0), (lora("b", 4), 1.0)])
    with pytest.raises(ValueError, match="not here"):
        make(refused="not here").entry([(lora("a"), 0.5)])
    assert made.entries() == ()


def test_what_an_adapter_brings_is_refused_by_name():
    entry = lora("a")
    brought = dataclasses.replace(entry.weights.report, brings=("DoRA",))
    weights = AdapterWeights(entry.weights.sites, brought)
    dora = dataclasses.replace(entry, weights=weights)
    with pytest.raises(ValueError, match=r"an adapter with DoRA .* is not composed with others"):
        make().entry([(dora, 1.0), (lora("b"), 1.0)])
    assert make().entry([(dora, 1.0)]) is dora


def test_bytes_are_bounded():
    made, used = make(max_bytes=2 * BYTES), set()
    made.set_in_use(lambda: used)
    parts = [lora(name) for name in "abcd"]
    held = made.entry([(parts[0], 1.0), (parts[1], 1.0)])
    used.add(held.digest)
    for weight in range(1, 6):
        made.entry([(parts[2], 1.0), (parts[3], float(weight))])
        assert len(made.entries()) == 2
    other = made.entry([(parts[2], 1.0), (parts[3], 50.0)])
    used.add(other.digest)
    with pytest.raises(RegistryBusy, match=f"{2 * BYTES} bytes"):
        made.entry([(parts[2], 1.0), (parts[3], 60.0)])
    used.clear()
    assert made.entry([(parts[2], 1.0), (parts[3], 60.0)])
    with pytest.raises(ValueError, match=f"sum takes {BYTES} bytes; .* compose fewer") as never:
        make(max_bytes=BYTES - 1).entry([(parts[0], 1.0), (parts[1], 1.0)])
    assert not isinstance(never.value, RegistryBusy)


def test_idle_sums_are_few():
    made, parts = make(), [lora("a"), lora("b")]
    for weight in range(1, 50):
        made.entry([(parts[0], 1.0), (parts[1], float(weight))])
    assert len(made.entries()) == 32
    assert made.entries()[-1].name == "a*1+b*49"
