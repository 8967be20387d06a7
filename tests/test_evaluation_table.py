"""The result table: right numbers in right columns, the paper's figures kept apart."""

import dataclasses
import io

from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from trace_jax.config import EvaluationConfig
from trace_jax.evaluation import metrics, table


def summary(share: float) -> dict:
    rows = []
    for i in range(20):
        for s in range(5):
            right = s < round(5 * share)
            rows.append(
                metrics.EvalRecord(
                    index=i,
                    type="campaign",
                    cause="BID_INCREASE",
                    sample=s,
                    parsed=True,
                    cause_right=right,
                    full_right=right,
                    jaccard=None,
                    tool_calls=4,
                    status="finished",
                    predicted="BID_INCREASE",
                )  # fmt: skip
            )
    return metrics.summarise(rows, EvaluationConfig(bootstrap=50))


def test_columns_stand_in_training_order_with_the_paper_last():
    built = table.build({"grpo": summary(0.8), "mine": summary(0.2), "untrained": summary(0.0), "sft": summary(0.6)})
    assert built.columns[:4] == ("untrained", "SFT", "SFT->GRPO", "mine")
    assert all(name.startswith("paper") for name in built.columns[4:])
    cells = dict(built.rows)
    assert [c.split()[0] for c in cells["FullAttr@1"]] == [
        "0.000",
        "0.600",
        "0.800",
        "0.200",
        "0.159",
        "0.637",
        "0.757",
    ]
    assert cells["segment 2-D"] == ("-", "-", "-", "-", "0.010", "0.040", "0.270")
    assert cells["FullAttr@1"][1] == "0.600 [0.600, 0.600]"
    assert [label for label, _ in built.rows] == [
        "Cause@1", "FullAttr@1", "FullAttr@5", "Jaccard (cause right)", "campaign", "mix", "segment 1-D", "segment 2-D",
        "no-signal", "parsed", "tool calls", "right per tool call", "strict FullAttr@1", "voted FullAttr",
        "calibration error", "right at 80% coverage",
    ]  # fmt: skip
    assert any("own environment" in note for note in built.notes)
    assert any("20 held-out episodes" in note for note in built.notes)


def test_plain_text_is_aligned_and_has_no_control_characters():
    text = table.plain_text(table.build({"sft": summary(0.6)}, paper=False))
    lines = text.splitlines()
    assert "\x1b" not in text and "paper" not in text
    assert lines[0].split() == ["metric", "SFT"]
    assert len({len(line) for line in lines[1:2] + lines[3:4]}) == 1
    assert lines[3].startswith("FullAttr@1")


def test_rich_table_prints_every_row():
    out = io.StringIO()
    Console(file=out, width=200).print(table.rich_table(table.build({"sft": summary(0.6)}, intervals=False)))
    text = out.getvalue()
    assert all(label in text for label, _, _ in metrics.ROWS) and "0.757" in text
    assert "[" not in text.split("FullAttr@1", 2)[-1].split("\n")[0]


@settings(deadline=None, max_examples=50)
@given(st.lists(st.text("ab", max_size=30), min_size=1, max_size=8), st.integers(1, 120))
def test_a_wide_table_is_shown_in_pieces(columns, width):
    """Every column once and in order, all labels beside each, and no line longer than the width but for one column."""
    whole = table.ResultTable(
        tuple(columns), (("SFT", tuple(c[:3] for c in columns)), ("RL", tuple(columns))), ("note",)
    )
    pieces = table.parts(whole, width)
    assert [c for piece in pieces for c in piece.columns] == columns
    assert all([label for label, _ in piece.rows] == ["SFT", "RL"] for piece in pieces)
    assert [c for piece in pieces for c in piece.rows[1][1]] == columns
    assert [piece.notes for piece in pieces] == [()] * (len(pieces) - 1) + [("note",)]
    for piece in pieces:
        lines = table.plain_text(dataclasses.replace(piece, notes=())).splitlines()
        assert max(map(len, lines)) <= width or len(piece.columns) == 1
