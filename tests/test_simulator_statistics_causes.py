"""What each cause does to the tables: sign, size, place and onset, in the simulator and in the NumPy reference."""

import numpy as np
import pytest
from simulator_worlds import SOURCES, distance, quiet, z_of_mean

from trace_jax.simulator.causes import CAUSE_INDEX, CAUSES, CHANNELS, COMPANION, FLAT, PRIMARY
from trace_jax.simulator.params import SimulatorParams
from trace_jax.simulator.stream import paper_composition
from trace_jax.simulator.vocabulary import ATTRIBUTE_NAMES, ATTRIBUTES, PROFILES

STRATA = tuple(paper_composition(1000))
EACH = 48  # episodes of a stratum
HALF, LAST = 14, 3  # baseline days; days at the end, when every onset is over
COUNTS = ("impressions", "clicks", "orders", "spend")


def _inside(batch):
    """Segments [E, G] of the labelled slice; all active ones if there is none."""
    hit = batch.segment_mask.copy()
    for a, v in zip(batch.slice_attributes.T, batch.slice_values.T, strict=True):
        value = np.take_along_axis(batch.segment_values, a.clip(0)[:, None, None], 2)[:, :, 0]
        hit &= (a < 0)[:, None] | (value == v[:, None])
    return hit


def _changes(batch, where):
    """Log change per episode, from the baseline to the last days, of the segments `where` [E, G]."""
    sums = {}
    for name in COUNTS:
        day = np.where(where[:, None, :], getattr(batch, name), 0).sum(-1, dtype=float)
        sums[name] = day[:, :HALF].mean(1), day[:, -LAST:].mean(1)

    def change(num, den=None):
        (a, b), (c, d) = sums[num], sums[den] if den else (1.0, 1.0)
        with np.errstate(divide="ignore", invalid="ignore"):  # a slice may be empty
            return np.log(b / a) - np.log(d / c)

    stock = batch.in_stock[:, :HALF].mean(1), batch.in_stock[:, -LAST:].mean(1)
    return {
        "volume": change("impressions"),
        "ctr": change("clicks", "impressions"),
        "cvr": change("orders", "clicks"),
        "cpc": change("spend", "clicks"),
        "in_stock": np.log(stock[1] / stock[0]),
    }


@pytest.fixture(scope="module", params=SOURCES)
def without_noise(request):
    """`EACH` episodes of every stratum at a million impressions a day, without noise or confounders."""
    cause = np.repeat([CAUSE_INDEX[c] for c, _ in STRATA], EACH)
    dimensions = np.repeat([d for _, d in STRATA], EACH)
    params = quiet(14.0, budget_headroom=(1.5, 2.6), overspend_cv=0.02)
    return SOURCES[request.param](21, cause, dimensions, len(cause), params)


def _of(batch, cause, dimensions):
    used = (batch.slice_attributes >= 0).sum(1)
    rows = (batch.cause == CAUSE_INDEX[cause]) & (used == dimensions)
    return type(batch)(**{f: getattr(batch, f)[rows] for f in batch.__dataclass_fields__})


def _close(measured, expected, what):
    """Within five standard errors, which are small: the mean is known to 2 % or better."""
    gap = np.asarray(measured) - expected
    error = gap.std() / np.sqrt(len(gap)) + 1e-7
    assert abs(gap.mean()) < 5 * error + 2e-4, (what, gap.mean(), error)
    assert error < 0.02, (what, error)


@pytest.mark.parametrize("stratum", STRATA, ids=lambda s: f"{s[0]}-{s[1]}")
def test_a_cause_has_its_effects_and_no_other(without_noise, stratum):
    """Measured log changes at full onset are the effects of `SimulatorParams`, channel by channel: rates change by F
    in the slice (everywhere for campaign and mix causes), weights by R, volume by V, orders with the stock."""
    batch, cause = _of(without_noise, *stratum), CAUSES[CAUSE_INDEX[stratum[0]]]
    assert len(batch.cause) == EACH
    effect = dict(zip(CHANNELS, np.asarray(batch.effects, float).T, strict=True))
    for name, (weak, strong) in {c: cause.effects.get(c, (0.0, 0.0)) for c in CHANNELS}.items():
        np.testing.assert_allclose(effect[name], weak + batch.strength * (strong - weak), atol=1e-5)

    inside, everything = _inside(batch), batch.segment_mask
    baseline = batch.impressions[:, :HALF].sum(1, dtype=float)
    share = np.where(inside, baseline, 0).sum(1) / baseline.sum(1)
    grown = 1 - share + share * np.exp(effect["mix"] if stratum[1] else 0.0)
    total = _changes(batch, everything)
    volume = effect["volume"] + effect["budget"] + (np.log(grown) if cause.compensated else 0.0)
    _close(total["volume"], volume, "volume")
    _close(total["in_stock"], np.maximum(effect["in_stock"], np.log(0.01)), "in_stock")
    cvr = effect["cvr"] + SimulatorParams().stock_elasticity * effect["in_stock"]
    for where, change in ((inside, 1.0), (everything & ~inside, 0.0 if cause.level == "segment" else 1.0)):
        rows = where.any(1) & (np.where(where, baseline, 0).sum(1) > 0.01 * baseline.sum(1))
        if not stratum[1] and where is not inside:
            continue
        assert rows.sum() > EACH / 2
        got = {k: v[rows] for k, v in _changes(batch, where).items()}
        for name, size in (("ctr", effect["ctr"]), ("cvr", cvr), ("cpc", effect["cpc"])):
            _close(got[name], change * size[rows], (name, "inside" if where is inside else "outside"))
    if stratum[1]:
        measured = _changes(batch, inside)["volume"] - total["volume"]
        rows = share > 0.01
        _close(measured[rows], (effect["mix"] - np.log(grown))[rows], "share")


@pytest.mark.parametrize("stratum", [s for s in STRATA if s[0] != "NO_SIGNAL"], ids=lambda s: f"{s[0]}-{s[1]}")
def test_signatures_have_the_sign_of_what_happens(without_noise, stratum):
    """The registry's signature is what the tables show: up is up, down is down, flat is flat."""
    batch, cause = _of(without_noise, *stratum), CAUSES[CAUSE_INDEX[stratum[0]]]
    inside, everything = _inside(batch), batch.segment_mask
    seen = _changes(batch, everything)
    if stratum[1]:
        part, rest = _changes(batch, inside), _changes(batch, everything & ~inside)
        share = part["volume"] - seen["volume"]
        drivers = {a for i in batch.slice_attributes.T for a in i if a >= 0}
        if cause.level == "segment":
            seen = {name: part[name] - rest[name] for name in part} | {"share": share}
        else:
            seen |= {f"mix_{ATTRIBUTE_NAMES[a]}": share for a in drivers}
    signs = {want: sign for table in (PRIMARY, COMPANION) for want, sign in table.items()}
    named = {f: want for f, want in cause.signature.items() if f in seen}
    assert any(want in PRIMARY for want in named.values())
    for feature, want in named.items():
        x = seen[feature][np.isfinite(seen[feature])]
        if want != FLAT:
            assert (signs[want] * x > 0).mean() > 0.9 and signs[want] * x.mean() > 0.04, feature
        elif cause.level != "mix":  # mixing also moves rates and volume a little, within what the oracle calls flat
            assert z_of_mean(x, 0.0) < 5 or abs(x.mean()) < 0.002, feature


def test_slices_sit_where_the_cause_may_act(without_noise):
    for name, dimensions in STRATA:
        batch, cause = _of(without_noise, name, dimensions), CAUSES[CAUSE_INDEX[name]]
        if not dimensions:
            continue
        pairs = [
            [(ATTRIBUTE_NAMES[a], v) for a, v in zip(*row, strict=True) if a >= 0]
            for row in zip(batch.slice_attributes, batch.slice_values, strict=True)
        ]
        assert all(len(p) == dimensions for p in pairs)
        for pair in pairs:
            assert any(a in cause.drivers and (not cause.values or ATTRIBUTES[a][v] in cause.values) for a, v in pair)
        assert len({p[0] for p in pairs}) > 1 or cause.values, name  # not always the same slice
        assert _inside(batch).any(1).all()


def test_slices_and_strengths_are_drawn_like_the_reference():
    """All strata of the full model: labels, sizes of the slices and measured changes have one distribution."""
    cause = np.repeat([CAUSE_INDEX[c] for c, _ in STRATA], 112)
    dimensions = np.repeat([d for _, d in STRATA], 112)
    found = []
    for make in SOURCES.values():
        batch = make(22, cause, dimensions, len(cause), SimulatorParams())
        inside = _inside(batch)
        code = batch.slice_attributes * 4 + batch.slice_values
        clicks = batch.clicks[:, :HALF].sum(1)
        share = np.where(inside, clicks, 0).sum(1) / np.maximum(clicks.sum(1), 1)
        some = share > 0
        found.append(
            {
                "first pair": code[:, 0],
                "second pair": code[:, 1],
                "share": share,
                "segments": inside.sum(1),
                "strength": batch.strength,
                "profile": batch.profile,
                "onset": batch.onset,
                **{f"effect on {c}": batch.effects[:, h] for h, c in enumerate(CHANNELS)},
                **{f"campaign {k}": v for k, v in _changes(batch, batch.segment_mask).items()},
                **{f"slice {k}": v[some & np.isfinite(v)] for k, v in _changes(batch, inside).items()},
                "lowest stock": batch.in_stock.min(1),
                "lowest budget": (batch.budget / batch.budget[:, :1]).min(1),
                "most spent": (batch.spend.sum(-1) / batch.budget).max(1),
            }
        )
    far = {name: distance(found[0][name], found[1][name]) for name in found[0]}
    assert max(far.values()) < 1, far


def test_budget_caps_bind_softly():
    """Case 18 of data: under a cap a day's spend ends near its budget, but for days of up to twice as much."""
    made = [make(23, CAUSE_INDEX["BUDGET_CAP"], 0, 384, SimulatorParams()) for make in SOURCES.values()]
    for batch in made:
        used = (batch.spend.sum(-1) / batch.budget)[:, -LAST:]
        assert 0.95 < np.median(used) < 1.03
        assert 0.02 < (used > 1.15).mean() < 0.10 and 1.5 < used.max() < 2.2
        assert (batch.spend.sum(-1) / batch.budget)[:, :HALF].mean() < 0.75
    assert distance(*((b.spend.sum(-1) / b.budget)[:, -1] for b in made)) < 1


@pytest.fixture(scope="module", params=SOURCES)
def onsets(request):
    """Share of the full effect of PAGE_DEGRADATION by day [E, T], as the CVR shows it, and the episodes."""
    params = quiet(14.0, strength=(1.0, 1.0))
    batch = SOURCES[request.param](24, CAUSE_INDEX["PAGE_DEGRADATION"], 0, 768, params)
    orders, clicks = (getattr(batch, f).sum(-1).astype(float) for f in ("orders", "clicks"))
    cvr = orders / clicks
    base = orders[:, :HALF].sum(1) / clicks[:, :HALF].sum(1)
    return np.log(cvr / base[:, None]) / batch.effects[:, [CHANNELS.index("cvr")]], batch


def test_profiles_come_in_the_stated_proportions(onsets):
    counts = np.bincount(onsets[1].profile, minlength=len(PROFILES))
    assert (np.abs(counts - 256) < 5 * np.sqrt(768 * 2 / 9)).all()
    onset = onsets[1].onset
    delayed = onsets[1].profile == PROFILES.index("delayed")
    assert (onset[~delayed] == HALF).all()
    delays = onset[delayed] - HALF  # 15 % to 45 % of 14 days, rounded
    assert set(delays) == {2, 3, 4, 5, 6} and z_of_mean(delays, 4.2) < 5


@pytest.mark.parametrize("profile", PROFILES)
def test_onsets_have_their_shape(onsets, profile):
    """Nothing in the baseline (case 5 of data); then a step at once, a step at the labelled day, or a straight ramp
    whose length is uniform over 35 % to 75 % of the window: E min(1, (k + 1)/L) on its k-th day."""
    rows = onsets[1].profile == PROFILES.index(profile)
    measured, day = onsets[0][rows], np.arange(28)
    expected = (day >= onsets[1].onset[rows][:, None]) * 1.0
    if profile == "ramp":
        length = np.linspace(0.35, 0.75, 2001) * HALF
        expected = np.clip((day[:, None] - HALF + 1) / length, 0, 1).mean(1)
    gap = measured - expected
    error = gap.std(0) / np.sqrt(rows.sum())
    assert (np.abs(gap.mean(0)) < 5 * error + 5e-4).all()
    assert error.max() < 0.02
    if profile == "ramp":  # each of them is straight over its first days, and as steep as its length says
        day = np.arange(1, 5)
        first = measured[:, HALF : HALF + 4]
        slope = first @ day / (day @ day)
        noise = gap[:, -LAST:].std()
        assert np.sqrt(((first - slope[:, None] * day) ** 2).mean()) < 1.2 * noise
        steepness = 1 / (np.linspace(0.35, 0.75, 2001) * HALF)
        assert z_of_mean(slope, steepness.mean()) < 5
        assert z_of_mean((slope - slope.mean()) ** 2, steepness.var() + noise**2 / (day @ day)) < 5


@pytest.mark.parametrize("source", SOURCES)
def test_gradual_causes_never_start_at_full_size(source):
    batch = SOURCES[source](25, CAUSE_INDEX["CREATIVE_FATIGUE"], 1, 192, SimulatorParams())
    counts = np.bincount(batch.profile, minlength=len(PROFILES))
    assert counts[PROFILES.index("immediate")] == 0
    assert abs(counts[PROFILES.index("ramp")] - 128) < 5 * np.sqrt(192 * 2 / 9)
