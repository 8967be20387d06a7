"""The likelihood ceiling: its algebra against dense Gaussians, its answers on simulated episodes, its blindness."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trace_jax.config import EnvironmentConfig, RunConfig, SimulatorConfig
from trace_jax.environments.ads.environment import AdsEnvironment
from trace_jax.evaluation import ceiling, ceiling_table, likelihood
from trace_jax.evaluation.ceiling_agent import evaluate_ceiling
from trace_jax.simulator import slices
from trace_jax.simulator.causes import CAUSE_INDEX, CAUSE_NAMES
from trace_jax.simulator.difficulty import params_of
from trace_jax.simulator.stream import paper_composition, propose
from trace_jax.warehouse.splits import EpisodeSet

CONFIG = SimulatorConfig(batch=64)
PARAMS = params_of(CONFIG)
HIDDEN = ("cause", "slice_attributes", "slice_values", "strength", "profile", "onset", "effects", "confounders")


@pytest.fixture(scope="module")
def proposals():
    """About 190 proposals of the paper's composition with their verdicts and diagnoses."""
    parts = [
        propose(CONFIG, 5, "ceiling", cause, dimensions, np.arange(count))
        for (cause, dimensions), count in paper_composition(192).items()
    ]
    batch, verdict = jax.tree.map(lambda *x: np.concatenate(x), *parts)
    return batch, verdict, ceiling.diagnose(batch, PARAMS)


def _rows(tree, rows):
    return jax.tree.map(lambda x: np.asarray(x)[rows], tree)


def _log_density(x, covariance):
    _, logdet = np.linalg.slogdet(covariance)
    return -0.5 * (x @ np.linalg.solve(covariance, x) + logdet)


def test_inverse_is_that_of_numpy():
    a = np.random.default_rng(0).normal(size=(3, 9, 20)).astype(np.float32)
    a = a @ a.transpose(0, 2, 1)
    np.testing.assert_allclose(jax.vmap(likelihood.inverse)(a), np.linalg.inv(a), atol=1e-5)


def test_gain_of_an_effect_is_the_ratio_of_dense_gaussian_densities():
    """x = level[g] + day[t] + effect + noise with a very wide prior on the levels, written out as one big Gaussian."""
    rng, days, segments = np.random.default_rng(1), 8, 4
    x = rng.normal(size=(days, segments)) * 0.3
    weight = rng.uniform(5.0, 50.0, (days, segments))
    weight[2] = 0.0  # a missing day
    member = np.array([[1, 0], [1, 1], [0, 1], [0, 0]], np.float64)
    root = rng.normal(size=(days, days)) * 0.1
    covariance, mean = root @ root.T + 0.02 * np.eye(days), rng.normal(size=days) * 0.1
    effect = np.array([0.1, 0.4, 0.8, 0.8])
    seen = likelihood.project(*(jnp.float32(v) for v in (x, weight, member, mean, covariance)))
    gain = seen.gain(jnp.float32(effect)[None])[:, 0]

    present = np.repeat(weight.sum(1) > 0, segments)
    full = 1e4 * np.kron(np.ones((days, days)), np.eye(segments)) + np.kron(covariance, np.ones((segments, segments)))
    full = full + np.diag(np.where(present, 1.0 / np.maximum(weight.ravel(), 1e-9), 1.0))
    full = full[np.ix_(present, present)]
    path = np.concatenate([np.zeros(days // 2), effect])
    flat = (x - mean[:, None]).ravel()[present]
    for r in range(2):
        shift = (path[:, None] * member[:, r]).ravel()[present]
        want = _log_density(flat - shift, full) - _log_density(flat, full)
        np.testing.assert_allclose(gain[r], want, rtol=2e-3, atol=2e-3)


def test_both_ways_to_evaluate_an_effect_agree():
    rng = np.random.default_rng(2)
    root = rng.normal(size=(3, 5, 5))
    seen = likelihood.Quadratic(score=rng.normal(size=(3, 5)), information=root @ root.transpose(0, 2, 1))
    effect = rng.normal(size=(2, 4, 5))
    by_row = seen.gain_by_row(jnp.broadcast_to(jnp.asarray(effect).reshape(1, 8, 5), (3, 8, 5)))
    np.testing.assert_allclose(seen.gain(jnp.asarray(effect)).reshape(3, 8), by_row, rtol=1e-4, atol=1e-4)


def test_gains_between_the_strengths_that_are_computed_are_right():
    """For the widest range of effects of the registry: relative changes of exp(effect) - 1 enter squared."""
    rng = np.random.default_rng(4)
    root = rng.normal(size=(1, 5, 5)) * 10
    seen = likelihood.Quadratic(score=rng.normal(size=(1, 5)) * 100, information=root @ root.transpose(0, 2, 1))
    shape = np.array([0.2, 0.4, 0.6, 0.8, 1.0])
    for low, high in ((-0.04, -1.2), (0.03, 0.8)):
        path = lambda s, a=low, b=high: jnp.expm1((a + s * (b - a))[:, None] * shape)  # noqa: E731
        fine = (np.arange(len(ceiling.STRENGTH_MATRIX)) + 0.5) / len(ceiling.STRENGTH_MATRIX)
        exact = np.asarray(seen.gain(path(fine))[0])
        between = ceiling.STRENGTH_MATRIX @ np.asarray(seen.gain(path(ceiling.STRENGTH_NODES))[0])
        np.testing.assert_allclose(between, exact, atol=2e-3 * np.abs(exact).max())


def test_effects_are_recovered_from_a_slice_without_noise():
    """A step of log size -0.5 in the CPC of one slice is where the quadratic has its maximum."""
    days, segments = 12, 6
    rng = np.random.default_rng(3)
    member = np.zeros((segments, 1))
    member[:2] = 1.0
    x = np.zeros((days, segments))
    x[days // 2 :, :2] = -0.5
    x = x + rng.normal(size=(1, segments))  # levels
    seen = likelihood.project(
        jnp.float32(x), jnp.full((days, segments), 30.0), jnp.float32(member), jnp.zeros(days), 1e-3 * jnp.eye(days)
    )
    best = np.linalg.solve(seen.information[0], seen.score[0])
    np.testing.assert_allclose(best, -0.5, rtol=1e-3)


def test_accepted_episodes_are_solvable(proposals):
    batch, verdict, diagnosis = proposals
    accepted = np.asarray(verdict.accept)
    right = ceiling_table.correct(diagnosis, batch)
    assert accepted.sum() > 100
    assert right[accepted].mean() >= 0.97


def test_nothing_is_found_where_nothing_happened():
    batch, verdict = propose(CONFIG, 6, "ceiling", "NO_SIGNAL", 0, np.arange(192))
    quiet = _rows(batch, np.asarray(verdict.accept))
    answers = ceiling.diagnose(quiet, PARAMS)
    assert len(answers.cause) > 100
    assert ceiling_table.quiet(answers).mean() >= 0.97
    assert (answers.cause == CAUSE_INDEX["NO_SIGNAL"]).mean() >= 0.9
    assert (np.asarray(answers.slice)[answers.cause == CAUSE_INDEX["NO_SIGNAL"]] == ceiling.NONE).all()


def test_faint_proposals_that_the_oracle_rejects_are_harder_and_doubt_is_honest():
    """With effects at four tenths of their size most proposals are rejected, and those are not all solvable."""
    config = SimulatorConfig(batch=64, strength=0.4)
    params = params_of(config)
    parts = [
        propose(config, 7, "ceiling", c, d, np.arange(48))
        for c, d in (("CREATIVE_FATIGUE", 1), ("AUDIENCE_SATURATION", 2))
    ]
    batch, verdict = jax.tree.map(lambda *x: np.concatenate(x), *parts)
    diagnosis = ceiling.diagnose(batch, params)
    right, rejected = ceiling_table.correct(diagnosis, batch), ~np.asarray(verdict.accept)
    assert rejected.mean() > 0.5
    assert right[rejected].mean() < 0.9
    # The mean probability of its answers is the share that is right, give or take three standard errors.
    sure = np.asarray(diagnosis.probability, float)
    assert abs(sure.mean() - right.mean()) < 3 * np.sqrt((sure * (1 - sure)).sum()) / len(sure) + 0.03


def test_the_label_is_not_read(proposals):
    batch, _, diagnosis = proposals
    some = _rows(batch, slice(0, 16))
    blind = some.replace(**{name: np.zeros_like(getattr(some, name)) for name in HIDDEN})
    for a, b in zip(
        jax.tree.leaves(ceiling.diagnose(blind, PARAMS)), jax.tree.leaves(_rows(diagnosis, slice(0, 16))), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_any_number_of_episodes_gives_the_same_answers(proposals):
    batch, _, diagnosis = proposals
    alone = ceiling.diagnose(_rows(batch, slice(17, 20)), PARAMS)
    np.testing.assert_array_equal(alone.cause, diagnosis.cause[17:20])
    np.testing.assert_array_equal(alone.slice, diagnosis.slice[17:20])
    np.testing.assert_allclose(alone.probability, diagnosis.probability[17:20], rtol=1e-3)


def test_posteriors_are_probabilities(proposals):
    _, _, diagnosis = proposals
    np.testing.assert_allclose(np.asarray(diagnosis.causes).sum(1), 1.0, rtol=1e-3)
    assert (np.asarray(diagnosis.probability) <= 1.0 + 1e-4).all()
    for cause, where in zip(diagnosis.cause, diagnosis.slice, strict=True):
        assert (where == ceiling.NONE) == (not slices.MAY_SIT[cause].any())
        assert where == ceiling.NONE or slices.MAY_SIT[cause, where]


def test_missing_days_leave_the_answer_finite_and_mostly_right(proposals):
    """Days without rows are skipped, not read as zeros."""
    batch, verdict, _ = proposals
    some = _rows(batch, np.flatnonzero(verdict.accept)[::6])
    gone = (4, 20)
    fields = ("impressions", "clicks", "orders", "spend", "sales", "budget", "in_stock", "day_mask")
    holes = {name: np.array(getattr(some, name)) for name in fields}
    siblings = {f"sibling_{n}": np.array(getattr(some, f"sibling_{n}")) for n in fields if n != "day_mask"}
    for day in gone:
        for values in holes.values():
            values[:, day] = 0
        for values in siblings.values():
            values[:, :, day] = 0
    diagnosis = ceiling.diagnose(some.replace(**holes, **siblings), PARAMS)
    assert np.isfinite(diagnosis.probability).all()
    assert ceiling_table.correct(diagnosis, some).mean() >= 0.9


def test_right_means_the_exact_slice_of_segment_causes_only(proposals):
    batch, _, _ = proposals
    label = ceiling_table.label_slices(batch)
    known = ceiling.Diagnosis(
        cause=batch.cause, slice=label, probability=np.ones(len(label)), causes=np.ones(1), slices=np.ones(1)
    )
    assert ceiling_table.correct(known, batch).all()
    moved = known.replace(slice=(label + 1) % slices.SLICES)
    segment = np.isin(batch.cause, [CAUSE_INDEX[c] for c in ceiling_table.SEGMENT_CAUSES])
    np.testing.assert_array_equal(ceiling_table.correct(moved, batch), ~segment)
    swapped = batch.replace(slice_attributes=batch.slice_attributes[:, ::-1], slice_values=batch.slice_values[:, ::-1])
    two = (batch.slice_attributes >= 0).all(1)
    np.testing.assert_array_equal(ceiling_table.label_slices(swapped)[two], label[two])


def test_table_counts_every_proposal_once_in_each_section(proposals):
    batch, verdict, diagnosis = proposals
    rows = ceiling_table.table(batch, verdict.accept, diagnosis)
    total = {s: sum(r["accepted"] + r["rejected"] for r in rows if r["section"] == s) for s in ("all", "cause")}
    assert total == {"all": 192, "cause": 192}
    something = int((np.asarray(batch.cause) != CAUSE_INDEX["NO_SIGNAL"]).sum())
    for section in ("onset", "strength"):
        assert sum(r["accepted"] + r["rejected"] for r in rows if r["section"] == section) == something
    by_cause = {r["group"]: r for r in rows if r["section"] == "cause"}
    assert list(by_cause) == list(CAUSE_NAMES)
    one = by_cause["CREATIVE_FATIGUE"]
    mask = np.asarray(verdict.accept) & (batch.cause == CAUSE_INDEX["CREATIVE_FATIGUE"])
    assert one["accepted_full"] == pytest.approx(ceiling_table.correct(diagnosis, batch)[mask].mean())


def test_its_answers_in_record_form(proposals):
    """Graded by the environment they are what `ceiling_table.correct` counts."""
    batch, verdict, diagnosis = proposals
    environment = AdsEnvironment(EpisodeSet(batch, verdict, "test"), EnvironmentConfig())
    records = evaluate_ceiling(environment, RunConfig(simulator=CONFIG), lambda done, total: None)
    assert [r.full_right for r in records] == ceiling_table.correct(diagnosis, batch).tolist()
    assert all(r.exact_parsed and r.tool_calls == 0 and 0 <= r.confidence <= 1 + 1e-6 for r in records)
