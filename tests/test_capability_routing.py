"""Routing: what the router reads, labels of one token, the choice, the oracle; the sum of adapters as one adapter."""

import jax
import numpy as np
import pytest
from helpers_hybrid import HYBRID, adapters

from trace_jax.capability import routing
from trace_jax.config import ConfigError
from trace_jax.environments.ads.capabilities import CAPABILITIES
from trace_jax.policy import lora
from trace_jax.recipes.routing import _summed


def test_the_question_names_every_capability_by_its_label():
    some = CAPABILITIES[:3]
    text = routing.question("clicks -12%. Why?", some, ("A", "C", "x", "0"))
    lines = text.splitlines()
    assert lines[0] == "Task: clicks -12%. Why?" and lines[2:5] == [
        f"{label}: {c.description}" for label, c in zip("ACx", some, strict=True)
    ]
    assert lines[5].startswith("0: None") and len(lines) == 7
    with pytest.raises(ValueError, match="zip"):
        routing.question("x", some, ("A", "B"))


def test_labels_are_single_tokens_and_differ():
    ids = {"A": [5], "B": [5], "C": [1, 2], "D": [7], "E": [9]}
    assert routing.labels_for(3, lambda text: ids.get(text, [0, 0])) == ("A", "D", "E")
    with pytest.raises(ConfigError, match="writes only 3 letters as single tokens, and 4 labels are needed"):
        routing.labels_for(4, lambda text: ids.get(text, [0, 0]))


def test_the_choice_is_the_largest_and_the_last_is_the_base():
    scores = np.array([[-1.0, -2.0, -3.0], [-4.0, -2.0, -3.0], [-4.0, -2.0, -1.0], [-1.0, -1.0, -1.0]])
    assert routing.choose(scores).tolist() == [0, 1, routing.BASE, 0]


def test_the_oracle_takes_the_world_that_has_most_more_of_the_type_than_the_tasks():
    worlds = [{"a": 1.0}, {"a": 30.0, "b": 30.0}, {"b": 2.0}, {"a": 1.0, "b": 1.0, "c": 1.0}]
    assert routing.oracle(["a", "b", "c"], worlds).tolist() == [0, 2, routing.BASE]  # the last is as the tasks are
    assert routing.oracle(["a", "b", "b", "b"], [worlds[1]]).tolist() == [0, *[routing.BASE] * 3]
    assert routing.oracle([], worlds).tolist() == []


def test_a_sum_of_adapters_is_one_adapter_with_the_sum_of_their_products():
    one, other = (jax.tree.map(lambda x, k=k: x + 0.1 * k, adapters(HYBRID, seed=k)) for k in (1, 2))
    total = _summed([one, other])
    for name, pair in total.items():
        wanted = one[name].a @ one[name].b + other[name].a @ other[name].b
        np.testing.assert_allclose(pair.a @ pair.b, wanted, atol=1e-5)
        assert isinstance(pair, lora.Pair) and pair.a.shape[-1] == 2 * one[name].a.shape[-1]
