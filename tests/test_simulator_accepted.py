"""Accepted sets in chunks: composition, order, continuation and memory, over a simulator that costs nothing."""

import tracemalloc

import jax
import numpy as np
import pytest
from helpers_episodes import fake_batch
from hypothesis import given, settings
from hypothesis import strategies as st

from trace_jax.config import ConfigError, SimulatorConfig
from trace_jax.simulator import accepted
from trace_jax.simulator.accepted import accepted_chunks, accepted_episodes, balanced_composition, prefix
from trace_jax.simulator.causes import CAUSE_INDEX
from trace_jax.simulator.stream import paper_composition

COMPOSITION = {("BUDGET_CAP", 0): 7, ("AD_QUALITY_DROP", 1): 30, ("AD_QUALITY_DROP", 2): 20, ("NO_SIGNAL", 0): 3}
RATES = {("AD_QUALITY_DROP", 2): 0.2, ("NO_SIGNAL", 0): 1.0}  # else one half


def accepts(cause, dimensions, index):
    """The fake verifier: a hash of the proposal."""
    rate = np.select([(cause == CAUSE_INDEX[c]) & (dimensions == d) for c, d in RATES], list(RATES.values()), 0.5)
    return (index * 7919 + cause * 104729 + dimensions * 31 + index**2 * 13) % 1009 < 1009 * rate


@pytest.fixture
def simulator(monkeypatch):
    """`simulate_rows` without a simulator; the list of the batches it was asked for."""
    template, verdict = fake_batch(1, days=2, segments=2, siblings=1)
    asked = []

    def rows(config, key, causes, dimensions, indices, params=None, oracle=None):
        asked.append((causes, dimensions, indices))
        batch, found = jax.tree.map(lambda x: np.repeat(x, len(indices), 0), (template, verdict))
        slices = np.where(np.arange(2) < dimensions[:, None], 0, -1)
        batch = batch.replace(index=np.asarray(indices), cause=np.asarray(causes), slice_attributes=slices)
        return batch, found.replace(accept=accepts(causes, dimensions, indices))

    monkeypatch.setattr(accepted, "simulate_rows", rows)
    return asked


def chunks(*, batch=64, chunk=13, composition=COMPOSITION, seed=3, **options):
    return list(accepted_chunks(SimulatorConfig(batch=batch), seed, "s", composition, chunk=chunk, **options))


def order(parts):
    return [
        (int(c), int((a >= 0).sum()), int(i))
        for part in parts
        for c, a, i in zip(part.batch.cause, part.batch.slice_attributes, part.batch.index, strict=True)
    ]


def test_each_stratum_gives_its_first_accepted_proposals(simulator):
    parts = chunks()
    assert [len(part.batch.index) for part in parts] == [13, 13, 13, 13, 8]
    found = order(parts)
    for (cause, dimensions), wanted in COMPOSITION.items():
        code = CAUSE_INDEX[cause]
        own = [i for c, d, i in found if (c, d) == (code, dimensions)]
        every = np.arange(2000)
        first = every[accepts(np.full(2000, code), np.full(2000, dimensions), every)][:wanted]
        assert sorted(own) == first.tolist()
        # Chunk by chunk, too: what comes later in the set has higher indices.
        by_part = [[i for c, d, i in order([p]) if (c, d) == (code, dimensions)] for p in parts]
        assert [i for part in by_part for i in sorted(part)] == first.tolist()
    assert len({c for c, _, _ in found[:13]}) == 3  # every chunk has all causes ...
    assert found != sorted(found) and found[:13] != sorted(found[:13])  # ... in no order


def test_unverified_sets_take_every_proposal(simulator):
    config = SimulatorConfig(batch=64, verified=False)
    found = order(accepted_chunks(config, 3, "s", COMPOSITION, chunk=13))
    for (cause, dimensions), wanted in COMPOSITION.items():
        own = [i for c, d, i in found if (c, d) == (CAUSE_INDEX[cause], dimensions)]
        assert sorted(own) == list(range(wanted))


def test_order_depends_on_seed_and_split_alone(simulator):
    want = order(chunks())
    for batch in (1, 192, 1024):
        assert order(chunks(batch=batch)) == want
    assert order(chunks(seed=4)) != want
    assert {(c, d) for c, d, _ in order(chunks(seed=4))} == {(c, d) for c, d, _ in want}


@pytest.mark.parametrize("done", [1, 3])
def test_a_stream_continues_from_any_place(simulator, done):
    whole = chunks()
    rest = chunks(batch=192, start=whole[done - 1].place)
    assert [part.number for part in rest] == list(range(done, 5))
    assert order(rest) == order(whole[done:]) and rest[-1].place == whole[-1].place


def test_place_counts_accepted_and_examined(simulator):
    place = chunks()[-1].place
    assert place.accepted == tuple(COMPOSITION.values())
    for (cause, dimensions), wanted, proposed in zip(COMPOSITION, place.accepted, place.proposed, strict=True):
        index = np.arange(proposed)
        hits = accepts(np.full(proposed, CAUSE_INDEX[cause]), np.full(proposed, dimensions), index)
        assert hits.sum() == wanted and hits[-1]


def test_full_batches_and_little_surplus(simulator):
    composition = paper_composition(6000)
    parts = chunks(batch=256, chunk=500, composition=composition)
    needed = sum(parts[-1].place.proposed)
    assert all(len(indices) == 256 for _, _, indices in simulator)
    assert needed <= parts[-1].simulated <= 1.05 * needed + 2 * 256
    # No proposal is simulated twice.
    seen = np.concatenate([c * 2**40 + d * 2**36 + i for c, d, i in simulator])
    assert len(np.unique(seen)) == len(seen)


def test_memory_is_that_of_a_chunk(simulator):
    """Twelve times the episodes, the same peak."""

    def peak(total):
        tracemalloc.start()
        made = 0
        for part in accepted_chunks(SimulatorConfig(batch=256), 3, "s", paper_composition(total), chunk=250):
            made += len(part.batch.index)
            simulator.clear()  # the fixture's own memory
        highest = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert made == total
        return highest

    peak(1000)
    assert peak(12_000) < 1.3 * peak(1000)


def test_a_stratum_that_accepts_nothing_is_an_error(simulator, monkeypatch):
    monkeypatch.setitem(RATES, ("BUDGET_CAP", 0), 0.0)
    with pytest.raises(ConfigError, match="0 of .* BUDGET_CAP episodes with 0 slice attributes ") as caught:
        chunks(max_proposals=2)
    for mend in ("days", "segments", "simulator.strength", "simulator.noise", "simulator.difficulty"):
        assert mend in str(caught.value)


def test_one_set_is_all_chunks(simulator):
    seen = []
    batch, verdict = accepted_episodes(
        SimulatorConfig(batch=64), 3, "s", COMPOSITION, on_progress=lambda done, total: seen.append((done, total))
    )
    whole = chunks(chunk=accepted.CHUNK)
    assert batch.index.tolist() == whole[0].batch.index.tolist() and len(whole) == 1
    assert verdict.accept.all() and seen[-1] == (60, 60) and seen == sorted(seen)


@given(
    weights=st.lists(st.integers(1, 400), min_size=1, max_size=16),
    size=st.integers(1, 300),
)
@settings(max_examples=200, deadline=None)
def test_every_prefix_has_the_composition(weights, size):
    """Growing, never two episodes of a stratum off, and exact at the end."""
    wanted = np.array(weights)
    total, before = int(wanted.sum()), np.zeros(len(weights), int)
    for count in [*range(size, total, size), total]:
        taken = prefix(count, wanted)
        assert (taken >= before).all() and taken.sum() == count
        assert (np.abs(taken - count * wanted / total) < 2).all()
        before = taken
    assert (before == wanted).all()


def test_prefixes_are_those_of_the_quotient_method():
    """Against the method's definition: the `count` smallest quotients (2 k + 1) / wanted."""
    wanted = np.array([1, 1, 1, 6, 6, 40])
    quotients = sorted(((2 * k + 1) / w, i) for i, w in enumerate(wanted) for k in range(w))
    for count in range(1, 56):
        want = np.bincount([i for _, i in quotients[:count]], minlength=6)
        assert (prefix(count, wanted) == want).all()


def test_balanced_composition():
    counts = balanced_composition(35)
    assert sum(counts.values()) == 35 and set(counts) == set(paper_composition(10**6))
    assert max(counts.values()) - min(counts.values()) == 1
    assert sum(balanced_composition(3).values()) == 3
