"""Every field of the objective is used or refused, with what to set instead."""

import pytest

from trace_jax.config import ConfigError, GRPOConfig, TurnCreditConfig
from trace_jax.learner.objectives import grpo_objective, validate
from trace_jax.learner.surrogates import OBJECTIVES

LEARNER = {"old_policy": "learner"}
GSPO = {"objective": "gspo", "aggregation": "seq_mean_token_mean", "clip_low": 3e-4, "clip_high": 4e-4}
SUM = {"aggregation": "seq_sum_constant"}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"objective": "dr_grpo", "advantage_std": False, **SUM, "aggregation_constant": 64.0},
        {"objective": "dapo", "constant_groups": "drop", "overlong_buffer": 64, "overlong_penalty": 0.5},
        {"objective": "dapo", "constant_groups": "resample", "resample_limit": 5},
        GSPO,
        GSPO | {"objective": "gspo_token", "dual_clip": 3.0},
        {"objective": "cispo", "clip_low": 1.0, "clip_high": 4.0},
        {"dual_clip": 3.0},
        {"dual_clip": 3.0, "iterations": 2, **LEARNER},
        {"kl_coefficient": 0.1, "kl_estimator": "k1"},
        {**LEARNER, "correction": "truncate", "correction_high": 1.0},
        {**LEARNER, "correction": "mask_tokens", "correction_low": 0.0, "correction_high": 5.0},
        {**LEARNER, "correction": "mask_sequences", "correction_low": 0.999, "correction_high": 1.001},
        {"staleness": 1, "weight_sync": "in_flight"},
        {"baseline": "leave_one_out", "advantage_std": False},
        {"turn_credit": TurnCreditConfig(enabled=True, form="raw_delta", look_ahead=1)},
        {"turn_credit": TurnCreditConfig(enabled=True, coefficient=0.0), "constant_groups": "drop"},
        GSPO | {"objective": "gspo_token", "turn_credit": TurnCreditConfig(enabled=True)},
        GSPO | {"turn_credit": TurnCreditConfig(enabled=True, coefficient=0.0)},
    ],
)
def test_what_is_accepted(fields):
    assert callable(grpo_objective(GRPOConfig(**fields)))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"objective": "gspo2"}, "grpo.objective.*cispo"),
        ({"aggregation": "mean"}, "grpo.aggregation.*token_mean"),
        ({"correction": "mask"}, "grpo.correction.*mask_sequences"),
        ({"kl_estimator": "k4"}, "grpo.kl_estimator.*k2"),
        ({"objective": "dr_grpo"}, "advantage_std.*to false"),
        ({"objective": "dr_grpo", "advantage_std": False}, "grpo.aggregation.*to seq_sum_constant"),
        ({"objective": "dapo", "aggregation": "seq_mean_token_mean"}, "grpo.aggregation.*to token_mean"),
        ({"objective": "dapo"}, "grpo.constant_groups to resample or drop"),
        ({"objective": "dapo", "constant_groups": "drop", "advantage_std": False}, "advantage_std to true"),
        ({"objective": "dapo", "constant_groups": "drop", "clip_high": 0.2}, r"raise grpo.clip_high \(0.28\)"),
        ({"clip_low": 1.0}, "clip_low.*below 1"),
        ({"clip_low": 0.0}, "clip_low.*above 0"),
        ({"objective": "cispo", "clip_low": 1.1}, "clip_low.*at most 1"),
        ({"clip_high": 0.0}, "clip_high.*above 0"),
        ({**SUM, "aggregation_constant": 0.0}, "aggregation_constant.*above 0"),
        ({"aggregation_constant": 64.0}, "aggregation_constant.*seq_sum_constant.*leave it at 512"),
        ({"objective": "gspo"}, "grpo.aggregation to seq_mean_token_mean"),
        (GSPO | {"clip_low": 0.2, "clip_high": 0.28}, "set them to 0.0003 and 0.0004"),
        (GSPO | {"objective": "gspo_token", "clip_high": 0.06}, "set them to 0.0003 and 0.0004"),
        ({"dual_clip": 1.0}, r"dual_clip.*above 1 \(3\) or 0"),
        ({"dual_clip": 0.5}, r"dual_clip.*above 1 \(3\) or 0"),
        ({"dual_clip": 3.0, "objective": "cispo"}, "set grpo.dual_clip to 0"),
        ({"dual_clip": 3.0, **LEARNER}, "dual_clip.*raise grpo.iterations"),
        ({"correction": "truncate"}, "set grpo.old_policy to learner"),
        ({"correction": "mask_tokens"}, "set grpo.old_policy to learner"),
        ({"correction_high": 3.0}, "correction_high.*`grpo.correction` is none"),
        ({"correction_low": 0.1}, "correction_low.*mask_tokens"),
        ({**LEARNER, "correction": "truncate", "correction_low": 0.1}, "correction_low.*leave it at 0.5"),
        ({**LEARNER, "correction": "mask_tokens", "correction_high": 1.0}, "put 1 between"),
        ({**LEARNER, "correction": "mask_sequences", "correction_low": 1.0}, "put 1 between"),
        ({"kl_estimator": "k2"}, "`grpo.kl_coefficient` is 0.*leave it at k3"),
        ({"resample_limit": 7}, "resample_limit.*leave it at 3"),
        ({"constant_groups": "drop", "resample_limit": 7}, "resample_limit.*resample"),
        ({"overlong_penalty": 0.5}, "`grpo.overlong_buffer` is 0"),
        ({"overlong_buffer": 8, "overlong_penalty": 0.0}, r"raise grpo.overlong_penalty \(1.0\)"),
        ({"weight_sync": "in_flight"}, "`grpo.staleness` is 0.*leave it at between"),
    ],
)
def test_what_is_refused(fields, words):
    with pytest.raises(ConfigError, match=words) as error:
        validate(GRPOConfig(**fields))
    assert "\n" not in str(error.value)


def test_named_values_satisfy_their_own_rules():
    """The first value that an objective allows each field makes a config that is accepted, apart from its clips."""
    for name, named in OBJECTIVES.items():
        clips = {"clip_low": 3e-4, "clip_high": 4e-4} if named.by_sequence else {}
        fixed = {f: values[0] for f, values in named.fixes.items()}
        assert callable(grpo_objective(GRPOConfig(objective=name, **fixed, **clips)))
