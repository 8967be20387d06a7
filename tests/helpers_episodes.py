"""Hand-made episodes (NumPy only) for tests that need tables but no simulator."""

from __future__ import annotations

import numpy as np

from trace_jax.simulator.causes import CAUSE_INDEX, CAUSE_NAMES, CHANNELS, SEGMENT_CAUSES
from trace_jax.simulator.confounders import CONFOUNDER_NAMES
from trace_jax.simulator.episode import NOT_COMPARED, EpisodeBatch, Verdict
from trace_jax.simulator.slices import SLICES
from trace_jax.simulator.vocabulary import ATTRIBUTE_NAMES, ATTRIBUTE_SIZES, ATTRIBUTES
from trace_jax.warehouse.splits import EpisodeSet

LABELS = (
    ("CREATIVE_FATIGUE", (("geo", "US"), ("device", "MOBILE"))),
    ("NO_SIGNAL", ()),
    ("BUDGET_CAP", ()),
    ("PLACEMENT_SHIFT", (("placement", "TOP_OF_SEARCH"),)),
    ("COMPETITIVE_PRESSURE", (("geo", "JP"),)),
)


def fake_batch(
    episodes: int = 5, *, days: int = 8, segments: int = 6, siblings: int = 2, seed: int = 0, missing: bool = False
):
    """An EpisodeBatch and a Verdict with plausible counts and the labels above in turn. The last segment is padding,
    the first has no impressions on any day. `missing`: the exports lack days, others in each episode."""
    rng = np.random.default_rng(seed)
    e, t, g, s = episodes, days, segments, siblings
    values = np.stack([_distinct_segments(rng, g) for _ in range(e)])
    mask = np.ones((e, g), bool)
    mask[:, -1] = False
    impressions = rng.integers(50, 500, (e, t, g)) * mask[:, None, :]
    impressions[:, :, 0] = 0
    clicks = rng.binomial(impressions, 0.1)
    orders = rng.binomial(clicks, 0.2)
    slices = np.full((2, e, 2), -1)
    for i in range(e):
        for j, (name, value) in enumerate(LABELS[i % len(LABELS)][1]):
            slices[:, i, j] = ATTRIBUTE_NAMES.index(name), ATTRIBUTES[name].index(value)
    there = np.ones((e, t), bool)
    if missing:
        there[np.arange(e), np.arange(e) % t] = False
        there[::2, 3] = False
    count = lambda: rng.integers(100, 1000, (e, s, t))  # noqa: E731
    batch = EpisodeBatch(
        index=np.arange(e),
        campaign_id=rng.permutation(1_000_000)[:e] + 1,
        advertiser_id=rng.permutation(1_000_000)[:e] + 1,
        start_day=rng.integers(0, 600, e),
        vertical=rng.integers(0, 6, e),
        strategy=rng.integers(0, 4, e),
        segment_values=values,
        segment_mask=mask,
        impressions=impressions,
        clicks=clicks,
        orders=orders,
        spend=(clicks * 1.237).astype(np.float32),
        sales=(orders * 31.7).astype(np.float32),
        day_mask=there,
        budget=np.full((e, t), 500.0, np.float32),
        in_stock=rng.uniform(0.9, 1.0, (e, t)).astype(np.float32),
        page_views=clicks.sum(2) + 5,
        brand_searches=rng.integers(0, 50, (e, t)),
        sibling_id=(rng.permutation(1_000_000)[: e * s] + 2_000_000).reshape(e, s),
        sibling_impressions=count() * 10,
        sibling_clicks=count(),
        sibling_orders=rng.integers(0, 100, (e, s, t)),
        sibling_spend=count().astype(np.float32),
        sibling_sales=count().astype(np.float32),
        sibling_budget=np.full((e, s, t), 500.0, np.float32),
        sibling_in_stock=np.ones((e, s, t), np.float32),
        sibling_page_views=count(),
        sibling_brand_searches=count(),
        cause=np.array([CAUSE_INDEX[LABELS[i % len(LABELS)][0]] for i in range(e)]),
        slice_attributes=slices[0],
        slice_values=slices[1],
        strength=rng.uniform(0, 1, e).astype(np.float32),
        profile=rng.integers(0, 3, e),
        onset=rng.integers(t // 2, t, e),
        effects=np.zeros((e, len(CHANNELS)), np.float32),
        confounders=np.zeros((e, len(CONFOUNDER_NAMES)), np.float32),
    )
    margin = lambda: rng.uniform(0.1, 5, e).astype(np.float32)  # noqa: E731
    own = np.arange(len(CAUSE_NAMES)) == batch.cause[:, None]
    segment = np.isin(batch.cause, [CAUSE_INDEX[name] for name in SEGMENT_CAUSES])
    verdict = Verdict(
        accept=np.ones(e, bool),
        detectability=margin(),
        confounder=margin(),
        rival_cause=margin(),
        rival_slice=margin(),
        cause_margins=np.where(own, NOT_COMPARED, rng.uniform(0.1, 5, own.shape)).astype(np.float32),
        slice_margins=np.where(segment[:, None], rng.uniform(0.1, 9, (e, SLICES)), NOT_COMPARED).astype(np.float32),
        evidence_z=rng.normal(0, 3, (e, 5)).astype(np.float32),
        evidence_change=rng.normal(0, 0.1, (e, 5)).astype(np.float32),
    )
    return batch, verdict


def fake_set(episodes: int = 5, **options) -> EpisodeSet:
    """`fake_batch` as a set."""
    return EpisodeSet(*fake_batch(episodes, **options), split="test")


def _distinct_segments(rng: np.random.Generator, count: int) -> np.ndarray:
    cells = rng.choice(int(np.prod(ATTRIBUTE_SIZES)), count, replace=False)
    return np.stack(np.unravel_index(cells, ATTRIBUTE_SIZES), axis=1)
