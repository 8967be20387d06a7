"""The synthetic tables of arXiv 2205.10004 as `bench/finders.py` draws them, and finders on a few of them."""

import dataclasses
import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

from trace_jax.evaluation.finders import riskloc, squeeze
from trace_jax.evaluation.finders.leaves import Element, Leaves, cuboid, deviation

spec = importlib.util.spec_from_file_location("finders", Path(__file__).parents[1] / "bench" / "finders.py")
finders = importlib.util.module_from_spec(spec)
sys.modules["finders"] = finders  # dataclasses look their module up
spec.loader.exec_module(finders)

SMALL = finders.Recipe((12, 11, 13), noise=(0.0, 0.0), deviation=(0.0, 0.0), zeros=(0.2, 0.2), anomalies=(1, 2))


@pytest.mark.parametrize("seed", range(20))
def test_only_the_anomalies_deviate(seed):
    """Without noise: leaves outside have their forecast, and elements that no other reaches lose one share."""
    leaves, truth = finders.instance(SMALL, (seed,))
    inside = {e: (leaves.codes[:, e.attributes] == e.codes).all(1) for e in truth}
    score = deviation(*leaves.measure)
    assert not score[~np.any(list(inside.values()), axis=0)].any()
    for element, own in inside.items():
        others = np.any([of for e, of in inside.items() if e.attributes != element.attributes] or [~own], axis=0)
        alone = own & ~others & (leaves.top.max(0) > 0)
        assert np.ptp(score[alone]) < 1e-9 and (np.abs(score[alone]) > 0.2).all() if alone.any() else others[own].any()


def test_a_table_is_a_function_of_its_seed():
    one, two = finders.instance(finders.SETS["L"], (1,)), finders.instance(finders.SETS["L"], (1,))
    assert (one[0].top == two[0].top).all() and one[1] == two[1]
    assert all(len(e.attributes) == 4 for e in one[1])  # single leaves only


def test_recipes_without_room_are_refused():
    with pytest.raises(ValueError, match="no place for an anomaly of 3 elements"):
        finders.instance(dataclasses.replace(SMALL, sizes=(2,), elements=(3, 3)), (0,))


def test_scores_by_hand():
    a, b, c = (Element((0,), (i,)) for i in range(3))
    assert finders.counts({a, b}, frozenset({b, c})) == (1, 1, 1)
    found = finders.scores(np.array([[1, 1, 1], [2, 0, 0]]))
    assert found["f1"]["value"] == pytest.approx(6 / 8) and found["f1"]["low"] <= 6 / 8 <= found["f1"]["high"]
    assert found["precision"] == found["recall"] == pytest.approx(3 / 4)


def test_cuboids_group_leaves():
    codes = np.array([[0, 2], [1, 0], [0, 2], [0, 1]])
    both = cuboid(codes, (0, 1))
    assert both.codes.tolist() == [[0, 1], [0, 2], [1, 0]] and both.of.tolist() == [1, 2, 1, 0]
    assert both.sums(np.array([1.0, 2.0, 4.0, 8.0])).tolist() == [8, 5, 2]
    assert both.element(1) == Element((0, 1), (0, 2))


def test_a_single_leaf_of_full_weight_is_no_matter_of_rounding():
    """Its risk is 1/2, the threshold; f (v / f) is not always v."""
    codes = np.stack([x.reshape(-1) for x in np.meshgrid(np.arange(30), np.arange(30), indexing="ij")], 1)
    rng = np.random.default_rng(0)
    at = np.arange(8) * 31  # eight leaves, each alone in its row and its column
    for _ in range(10):
        f = rng.uniform(50, 100, len(codes))
        v = f * rng.normal(1.0, 0.01, len(codes))
        lost = rng.uniform(5, 15, (8, 100))  # deviates by more than 1
        rounded = f[at][:, None] * (lost / f[at][:, None]) != lost
        v[at] = lost[np.arange(8), rounded.argmax(1)]
        wanted = {Element((0, 1), (i, i)) for i in range(8)}
        assert set(riskloc.localise(Leaves.plain(codes, f, v))) == wanted


def test_the_weight_of_squeeze_is_never_negative():
    """Clusters that cover much: the paper's formula would turn the ranking of explanations around."""
    codes = np.arange(12).reshape(-1, 1)
    many = [np.arange(12) % 3 == i for i in range(3)]
    assert squeeze._weight(codes, many) == pytest.approx(0)  # they cover everything
    assert squeeze._weight(codes, many[:2]) > 0


def test_finders_on_a_few_tables():
    """Against what the whole table of bench/results says, on so few tables that only large faults show."""
    several, single = finders.measure("S", 4), finders.measure("L", 4)
    for found, least in ((several, 0.4), (single, 0.65)):
        assert found["riskloc"]["f1"]["value"] > least and found["squeeze"]["f1"]["value"] > least
        assert found["adtributor"]["f1"]["value"] < found["riskloc"]["f1"]["value"]
    assert single["riskloc"]["precision"] == 1 and single["adtributor"]["recall"] == 0  # which names no leaf
