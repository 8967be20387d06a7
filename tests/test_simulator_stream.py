"""Episodes as a function of (seed, index), their ranges, and accepted sets."""

import jax
import numpy as np
import pytest

from trace_jax.config import SimulatorConfig
from trace_jax.simulator.accepted import accepted_episodes
from trace_jax.simulator.causes import CAUSE_INDEX, CAUSES, EPISODE_TYPES, episode_type
from trace_jax.simulator.stream import paper_composition, propose
from trace_jax.simulator.vocabulary import PROFILES

CONFIG = SimulatorConfig(batch=64)


@pytest.fixture(scope="module")
def everything():
    """64 proposals of every stratum."""
    return {s: propose(CONFIG, 11, "t", *s, np.arange(64)) for s in paper_composition(235)}


def _same(a, b):
    return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def test_same_bits_in_any_batch(everything):
    """Case 21 of data: alone, in a batch of 7, in a longer one, after padding."""
    want = everything["AD_QUALITY_DROP", 2]
    for batch in (1, 192):
        config = SimulatorConfig(batch=batch)
        for indices in ([17], range(7), [40, 3, 17]):
            got = propose(config, 11, "t", "AD_QUALITY_DROP", 2, np.array(indices))
            assert _same(got, jax.tree.map(lambda x, i=list(indices): x[i], want))


def test_seed_split_and_stratum_matter(everything):
    """Case 22 of data: another seed, split or cause gives other episodes; the same one the same."""
    first = everything["BUDGET_CAP", 0][0]
    assert _same(first, propose(CONFIG, 11, "t", "BUDGET_CAP", 0, np.arange(64))[0])
    for other in (
        propose(CONFIG, 12, "t", "BUDGET_CAP", 0, np.arange(64))[0],
        propose(CONFIG, 11, "u", "BUDGET_CAP", 0, np.arange(64))[0],
        everything["BID_INCREASE", 0][0],
    ):
        assert not np.isin(first.campaign_id, other.campaign_id).any()
        assert not np.array_equal(first.impressions, other.impressions)


def test_counts_are_counts(everything):
    """Case 20 of data: orders <= clicks <= impressions in every cell, nothing negative, money finite."""
    for batch, _ in everything.values():
        assert (batch.orders >= 0).all()
        assert (batch.orders <= batch.clicks).all()
        assert (batch.clicks <= batch.impressions).all()
        assert np.isfinite(batch.spend).all() and (batch.spend >= 0).all()
        assert ((batch.in_stock >= 0) & (batch.in_stock <= 1)).all()
        outside = ~np.broadcast_to(batch.segment_mask[:, None, :], batch.impressions.shape)
        assert (batch.impressions[outside] == 0).all()


def test_noise_streams_are_independent(everything):
    """Case 22 of data: residuals of impressions and of CTR are uncorrelated across cells."""
    pairs = []
    for batch, _ in (everything["NO_SIGNAL", 0], everything["BUDGET_CAP", 0]):
        n, c = batch.impressions[:, :14].astype(float), batch.clicks[:, :14].astype(float)
        ok = (n.sum(1) > 14 * 400)[:, None, :] & (n > 200)
        share = n / n.sum(-1, keepdims=True)
        with np.errstate(invalid="ignore", divide="ignore"):
            x = share / share.mean(1, keepdims=True) - 1
            y = (c / n) / (c.sum(1, keepdims=True) / n.sum(1, keepdims=True)) - 1
        pairs.append((x[ok], y[ok]))
    x, y = (np.concatenate(v) for v in zip(*pairs, strict=True))
    assert len(x) > 20_000
    assert abs(np.corrcoef(x, y)[0, 1]) < 4 / np.sqrt(len(x)) + 0.005


def test_cell_noise_exceeds_binomial(everything):
    """Public data are overdispersed (docs/simulator.md): Pearson dispersion of daily CTR is well above one."""
    batch, _ = everything["NO_SIGNAL", 0]
    n, c = batch.impressions[:, :14].astype(float), batch.clicks[:, :14].astype(float)
    big = n.sum(1) > 14 * 2000
    rate = c.sum(1, keepdims=True) / np.maximum(n.sum(1, keepdims=True), 1)
    pearson = ((c - n * rate) ** 2 / np.maximum(n * rate, 1e-9)).sum(1)[big] / 13
    assert np.median(pearson) > 1.3


def test_labels_are_consistent(everything):
    """Slices use the cause's own driver attribute; onsets lie in the second half only (case 5 of data)."""
    for (name, dimensions), (batch, _) in everything.items():
        info = CAUSES[CAUSE_INDEX[name]]
        used = batch.slice_attributes >= 0
        assert (batch.cause == CAUSE_INDEX[name]).all()
        assert (used.sum(1) == dimensions).all()
        assert (batch.onset >= CONFIG.days // 2).all() and (batch.onset < CONFIG.days).all()
        if dimensions:
            members = np.take_along_axis(batch.segment_values, batch.slice_attributes.clip(0)[:, None, :], 2)
            inside = ((members == batch.slice_values[:, None, :]) | ~used[:, None, :]).all(-1) & batch.segment_mask
            assert inside.any(1).all() or info.level == "mix"
        if info.level == "segment":
            assert set(np.unique(batch.profile)) <= set(range(len(PROFILES)))


def test_accepted_sets_have_the_composition_asked_for():
    composition = paper_composition(47)
    seen = []
    batch, verdict = accepted_episodes(CONFIG, 5, "train", composition, on_progress=lambda d, t: seen.append((d, t)))
    assert verdict.accept.all()
    got = {}
    for cause, attributes in zip(batch.cause, batch.slice_attributes, strict=True):
        key = (CAUSES[cause].name, int((attributes >= 0).sum()))
        got[key] = got.get(key, 0) + 1
    assert got == composition
    assert seen[-1] == (47, 47)
    # The order tells nothing: it is a shuffle, not the order of the strata.
    assert (np.diff(batch.cause) < 0).sum() > 10
    assert len(set(batch.campaign_id.tolist())) == 47


def test_paper_composition():
    """30 campaign, 21 mix, 115 one-attribute, 49 two-attribute, 20 no-signal of 235 (arXiv 2609.10315)."""
    composition = paper_composition(235)
    kinds = dict.fromkeys(EPISODE_TYPES, 0)
    for (cause, dimensions), n in composition.items():
        kinds[episode_type(cause, dimensions)] += n
    assert list(kinds.values()) == [30, 21, 115, 49, 20]
    for total in (1, 16, 528, 4472):
        assert sum(paper_composition(total).values()) == total


def test_accepted_sets_do_not_depend_on_the_batch():
    """The first accepted proposals of each stratum, however the batches were filled."""
    composition = {("BUDGET_CAP", 0): 3, ("AD_QUALITY_DROP", 2): 5, ("NO_SIGNAL", 0): 1}
    small, large = (accepted_episodes(SimulatorConfig(batch=b), 5, "train", composition) for b in (64, 192))
    assert _same(small, large)
    want = []
    for (cause, dimensions), n in composition.items():
        batch, verdict = propose(CONFIG, 5, "train", cause, dimensions, np.arange(192))
        want += batch.campaign_id[verdict.accept][:n].tolist()
    assert sorted(small[0].campaign_id.tolist()) == sorted(want)
