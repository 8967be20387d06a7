"""The contrast's arithmetic against a loop over attempts, its selection rule and its edges."""

import dataclasses
import json
import xml.etree.ElementTree as ET

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trace_jax.capability import contrast, table
from trace_jax.config import CapabilityConfig
from trace_jax.environments.capability import Capability, Label

CONFIG = CapabilityConfig()


def naive(labels, passed, counts):
    """Cov, ER-, ER+ of one run and capability, attempt by attempt."""
    failed = lacking_failed = present_failed = lacking_passed = present_passed = 0
    for label, ok, times in zip(labels, passed, counts, strict=True):
        for _ in range(int(times)):
            failed += not ok
            if label == Label.LACKING:
                lacking_passed, lacking_failed = lacking_passed + ok, lacking_failed + (not ok)
            elif label == Label.PRESENT:
                present_passed, present_failed = present_passed + ok, present_failed + (not ok)

    def ratio(a, b):
        return a / b if b else 0.0

    return (
        ratio(lacking_failed, failed),
        ratio(lacking_failed, lacking_failed + present_failed),
        ratio(lacking_passed, lacking_passed + present_passed),
    )


@st.composite
def cases(draw):
    attempts, capabilities, runs = draw(st.integers(1, 12)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    one = draw(st.booleans())
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    labels = rng.integers(-1, 2, (1 if one else runs, attempts, capabilities))
    return labels, rng.random(attempts) < draw(st.sampled_from((0.0, 0.5, 1.0))), rng.integers(0, 4, (runs, attempts))


@settings(max_examples=200, deadline=None)
@given(cases())
def test_rates_are_those_of_a_loop(case):
    labels, passed, counts = case
    found = contrast.rates(labels, passed, counts.astype(float))
    for r in range(counts.shape[0]):
        for c in range(labels.shape[2]):
            wanted = naive(labels[min(r, labels.shape[0] - 1), :, c], passed, counts[r])
            got = (found.coverage[r, c], found.er_failed[r, c], found.er_passed[r, c])
            assert got == pytest.approx(wanted, abs=1e-12)
            assert found.gap[r, c] == pytest.approx(wanted[1] - wanted[2], abs=1e-12)


def run(labels, passed, config=CONFIG, tasks=None, **kwargs):
    labels = np.asarray(labels, np.int8)
    labels = labels if labels.ndim == 3 else labels[None]
    tasks = np.arange(labels.shape[1]) if tasks is None else tasks
    options = {"resamples": 200, "confidence": 0.95, "seed": 0} | kwargs
    return contrast.contrast(labels, np.asarray(passed, bool), tasks, config, **options)


def test_a_capability_that_only_failures_lack_is_kept_and_ranked_first():
    rng = np.random.default_rng(0)
    passed = np.arange(200) < 100
    planted = np.where(passed, 1, -1)
    half = np.where(rng.random(200) < 0.5, 1, -1)  # lacking as often among the passed
    weak = np.where(passed | (rng.random(200) < 0.5), 1, -1)
    found = run(np.stack([half, weak, planted], 1), passed)
    assert found.order.tolist()[:2] == [2, 1] and found.kept.tolist() == [False, True, True]
    assert found.selected[2] == CONFIG.runs and found.value.gap[2] == 1.0
    assert found.low["gap"][2] == found.high["gap"][2] == 1.0
    assert found.low["gap"][1] < found.value.gap[1] < found.high["gap"][1]


def test_equal_gaps_are_ranked_by_coverage():
    passed = np.arange(100) < 50
    few, many = np.where(passed, 1, 0), np.where(passed, 1, -1)
    few[50:70] = -1
    found = run(np.stack([few, many], 1), passed)
    assert found.mean_gap.tolist() == [1.0, 1.0] and found.order.tolist() == [1, 0]


def test_the_rank_may_be_the_share_of_failures_that_a_gap_speaks_for():
    passed = np.arange(100) < 50
    sharp = np.where(passed, 1, 0)
    sharp[50:60] = -1  # Cov .2, gap 1
    wide = np.where(passed, 1, -1)
    wide[:20] = -1  # Cov 1, gap .6
    both = np.stack([sharp, wide], 1)
    assert run(both, passed).order.tolist() == [0, 1]
    assert run(both, passed, dataclasses.replace(CONFIG, rank="explained")).order.tolist() == [1, 0]


def test_coverage_and_gap_must_both_reach_their_thresholds():
    passed = np.repeat([False, True], 100)
    rare = np.zeros(200, int)
    rare[:9] = -1  # lacking in 9 % of the failed, gap 1
    wide = np.concatenate([np.repeat([-1, 1], [60, 40]), np.repeat([-1, 1], [41, 59])])  # Cov .6, gap .19
    just = np.concatenate([np.repeat([-1, 1], [60, 40]), np.repeat([-1, 1], [40, 60])])  # Cov .6, gap .20
    found = contrast.rates(np.stack([rare, wide, just], 1)[None], passed, np.ones((1, 200)))
    assert contrast.selects(found, CONFIG).tolist() == [[False, False, True]]


def test_eight_of_ten_runs_must_select():
    passed = np.repeat([False, True], 20)
    lacking, absent = np.where(passed, 1, -1), np.ones(40, int)
    for selecting in (7, 8):
        labels = np.stack([lacking if r < selecting else absent for r in range(10)])[:, :, None]
        found = run(labels, passed)
        assert found.selected.tolist() == [selecting] and bool(found.kept[0]) == (selecting >= 8)
        assert found.mean_gap[0] == pytest.approx(selecting / 10)


def test_runs_of_computed_labels_resample_tasks_not_attempts():
    tasks = np.repeat(np.arange(5), 4)
    counts = contrast.by_task(tasks, 50, seed=3)
    assert counts.shape == (50, 20) and (counts.sum(1) == 20).all()
    assert all(len(set(row[tasks == t])) == 1 for row in counts for t in range(5))
    assert len({tuple(row) for row in counts}) > 10


@pytest.mark.parametrize(
    ("passed", "labels", "gap"),
    [
        ([True] * 6, [1, 1, -1, -1, 0, 0], -0.5),  # nothing failed
        ([False] * 6, [-1, -1, -1, 1, 0, 0], 0.75),  # nothing passed: ER+ is 0
        ([False, False, False, True, True, True], [0] * 6, 0.0),  # nothing called for
        ([False], [-1], 1.0),
    ],
)
def test_ratios_of_nothing_are_zero(passed, labels, gap):
    found = run(np.array(labels)[:, None], passed)
    assert found.value.gap[0] == pytest.approx(gap)
    assert np.isfinite([found.low["gap"][0], found.high["gap"][0], found.mean_gap[0]]).all()
    assert not (all(passed) and found.kept.any())


def test_nothing_to_contrast_is_an_error():
    with pytest.raises(ValueError, match="no attempt"):
        run(np.zeros((0, 2), int), [])


def test_table_and_chart_say_what_was_found():
    passed = np.repeat([False, True], 10)
    labels = np.stack([np.where(passed, 1, -1), np.ones(20, int)], 1)[None]
    capabilities = [Capability(n, f"<{n}>", "", "", lambda attempt: Label.NA) for n in ("first", "second")]
    found = run(labels, passed)
    entries = table.entries(found, labels, passed, capabilities)
    assert [e["capability"] for e in entries] == ["first", "second"] and entries[0]["attempts"]["lacking_failed"] == 10
    result = {
        "capabilities": entries,
        "failed": 10,
        "attempts": 20,
        "runs": 10,
        "confidence": 0.95,
        "notes": ["A note."],
    }
    result["thresholds"] = {"coverage": 0.1, "gap": 0.2, "keep": 8}
    text = table.markdown(json.loads(json.dumps(result)))
    assert "| <first> (`first`) | 1.00 | 1.00 | 0.00 | +1.00 [+1.00, +1.00] | 10 of 10 | **kept** |" in text
    assert "| <second> (`second`) |" in text and text.count("**kept**") == 1 and text.endswith("A note.\n")
    nobody = labels.copy()
    nobody[:, passed, 0] = 0
    asked = result | {"capabilities": table.entries(run(nobody, passed), nobody, passed, capabilities)}
    assert "| <first> (`first`) | 1.00 | 1.00 | - |" in table.markdown(asked)
    assert "no attempt that passed shows or lacks it" in table.markdown(asked)
    drawn = ET.fromstring(table.chart(result))
    circles = [e for e in drawn.iter() if e.tag.endswith("circle")]
    assert len(circles) == 2 + 2 * len(entries)  # the legend, and two values a row
    assert float(circles[2].get("cx")) > float(circles[3].get("cx"))  # ER- 1 lies right of ER+ 0
