"""`bench rollout`: every key at a tiny size, the bare loop against the engine, the peer's protocol with a fake peer."""

import dataclasses
import json
import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest
from flax import nnx

from trace_jax import cli
from trace_jax.bench import rollout, rollout_compare, rollout_drive, rollout_peer, rollout_tools, text
from trace_jax.bench.rollout_drive import Shape
from trace_jax.bench.rollout_loop import BareLoop
from trace_jax.config import ConfigError, PolicyConfig, RolloutConfig
from trace_jax.policy.transformer import Transformer
from trace_jax.rollout.engine import Engine

POLICY = PolicyConfig(layers=1, width=16, heads=2, kv_heads=1, head_dim=8, mlp_width=16, max_length=128)
VOCABULARY = 50
SETTINGS = (
    "policy.layers 1, policy.width 16, policy.heads 2, policy.kv_heads 1, policy.head_dim 8, policy.mlp_width 16, "
    "policy.max_length 128, tokenizer.vocab_size 300, rollout.context 128, rollout.max_turn_tokens 8, "
    "rollout.max_turns 2, rollout.slots 8, grpo.group 2"
)
TINY = [word for setting in SETTINGS.split(", ") for word in f"--{setting}".split()]
HEADLINE = {"vs_transformers", "vs_bare_loop", "reuse_speedup", "tool_overlap", "occupancy", "compiles"}

# Counts the parameters that it was given, and "samples" what it is asked for.
FAKE = """
    import json, math, pathlib, struct, sys

    def answer(value):
        print(json.dumps(value), flush=True)

    answer({"versions": {"fake": "1"}})
    for line in sys.stdin:
        request = json.loads(line)
        if request["op"] == "load":
            raw = (pathlib.Path(request["directory"]) / "model.safetensors").read_bytes()
            size = struct.unpack("<Q", raw[:8])[0]
            header = json.loads(raw[8 : 8 + size])
            shapes = [entry["shape"] for name, entry in header.items() if name != "__metadata__"]
            settings = json.loads((pathlib.Path(request["directory"]) / "config.json").read_text())
            answer({"parameters": sum(map(math.prod, shapes))})
        elif request["op"] == "logits":
            answer({"logits": [[0.0] * settings["vocab_size"] for _ in request["prompts"]]})
        elif request["op"] == "generate":
            answer({"seconds": 0.25 * request["threads"], "tokens": request["tokens"] * len(request["prompts"])})
        elif request["op"] == "fail":
            answer({"error": "as asked"})
        elif request["op"] == "die":
            sys.exit("dead\\nof old age")
        elif request["op"] == "chatter":
            print("hello", flush=True)
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    script = tmp_path / "fake.py"
    script.write_text(textwrap.dedent(FAKE))
    monkeypatch.setattr(rollout_peer, "SCRIPT", script)
    return script


def small(monkeypatch):
    for name in ("nano", "5m"):
        monkeypatch.setitem(rollout_compare.SIZES, name, (POLICY, VOCABULARY))
    for module, name, value in (
        (rollout_compare, "ROWS", 4),
        (rollout_compare, "SHAPE", Shape(prompt=12, turn=6)),
        (rollout_compare, "REUSE_ROWS", 4),
        (rollout_compare, "REUSE_SHAPE", Shape(prompt=12, turn=4, turns=4, observation=6)),
        (rollout_compare, "SETTLE_SECONDS", 0.0),
        (rollout_tools, "SHAPE", Shape(prompt=12, turn=4, turns=3, observation=5)),
        (rollout_tools, "TOOL_SECONDS", 0.005),
    ):
        monkeypatch.setattr(module, name, value)


def bench(capsys, *words):
    assert cli.main(["bench", "rollout", "--json", "--repeats", "1", *TINY, *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    return json.loads(lines[-1]), "\n".join(lines[:-1])


def test_the_target_of_the_overlap_is_for_many_slots():
    details = {"nano": {"tokens_per_second": {"engine": 1.0, "bare_loop_1": 1.0}, "bare_loop_programs": 1}}
    headline = {"vs_transformers": None, "vs_bare_loop": {"nano": 0.9}, "reuse_speedup": 3.0, "tool_overlap": 0.5}
    headline |= {"occupancy": {}, "compiles": {}}
    for slots, targets in ((127, [0.8, 2.0, None]), (128, [0.8, 2.0, 0.85])):
        rows = rollout._table(headline, details, slots)
        assert [row.get("target") for row in rows] == targets and rows[-1]["slots"] == slots


def test_a_warning_is_the_first_line():
    result = {"kind": "rollout", "machine": dict.fromkeys(("processor", "cores", "devices", "device"), "x")}
    result |= {"sizes": {}, "floor": {}, "measured": {}, "share": {}, "warning": "others"}
    assert text(result).splitlines() == ["warning: others", "rollout on x, x cores, x x x"]


def test_every_figure_is_there_and_what_was_counted_is_what_was_expected(monkeypatch, capsys, fake):
    small(monkeypatch)
    result, shown = bench(capsys, "--peers", sys.executable)
    assert HEADLINE | {"sizes", "floor", "measured", "share", "details", "table"} <= set(result)
    assert set(result["vs_transformers"]) == set(result["vs_bare_loop"]) == {"nano", "5m"}
    assert all(value > 0 for value in (*result["vs_transformers"].values(), *result["vs_bare_loop"].values()))
    assert result["reuse_speedup"] > 0 and result["tool_overlap"] > 0
    assert set(result["occupancy"]) == {"nano", "5m", "instant_tools", "slow_tools", "config"}
    assert all(0 < share <= 1 for share in result["occupancy"].values())
    for counts in result["compiles"].values():
        assert 0 < counts["programs"] <= counts["bound"] and counts["while_timed"] >= 0

    details = result["details"]
    for name in ("nano", "5m"):
        one = details[name]
        seconds, rates = one["seconds"], one["tokens_per_second"]
        # The fake's seconds are known, so the ratio is that of our own seconds to them.
        cores = seconds["transformers"]["median"] / 0.25
        assert cores >= 1 and seconds["transformers_1_thread"]["median"] == 0.25
        assert result["vs_transformers"][name] == pytest.approx(cores * 0.25 / seconds["engine"]["median"])
        assert rates["engine"] == pytest.approx(4 * 6 / seconds["engine"]["median"])
        loops = [seconds[side]["median"] for side in seconds if side.startswith("bare_loop")]
        assert result["vs_bare_loop"][name] == pytest.approx(min(loops) / seconds["engine"]["median"])
        assert one["prefill_tokens"] == one["prefill_tokens_expected"] == 4 * 11
        assert one["logits_difference"] > 0  # the fake's logits are zero
    assert details["peer_versions"] == {"fake": "1"}
    assert details["reuse"]["prefill_tokens"]["kept"] == details["reuse"]["prefill_tokens_expected"]
    # Fed anew: the whole row before each turn, 12 + 10 n tokens but for the last.
    assert details["reuse"]["prefill_tokens"]["fed_anew"] == 4 * sum(11 + 10 * n for n in range(4))
    assert details["tools"]["trajectories"] == 12 and details["tools"]["calls"] == 12 * 2
    assert details["tools"]["tool_seconds_measured"] >= 0.005
    measured = result["measured"]
    assert measured["shared_prefill_tokens"] == measured["shared_prefill_tokens_expected"] == 4 * 39
    assert details["config"]["prefill_tokens"] == details["config"]["prefill_tokens_expected"]
    for words in ("vs_transformers nano", "vs_bare_loop 5m", "tool_overlap", "occupancy slow_tools", "compiled for"):
        assert words in shown


def test_peers_that_cannot_be_are_one_clear_line(monkeypatch, capsys, tmp_path, fake):
    def refused(*words):
        assert cli.main(["bench", *words, *TINY]) == 2
        line = capsys.readouterr().err.strip()
        assert "\n" not in line
        return line

    assert "no such file" in refused("rollout", "--peers", str(tmp_path / "absent")).lower()
    assert "leave --peers out" in refused("sim", "--peers", sys.executable)
    fake.write_text("raise SystemExit('not today')")
    assert "not today" in refused("rollout", "--peers", sys.executable)
    fake.write_text("""print('{"error": "No module named torch"}')""")
    assert "No module named torch; " in refused("rollout", "--peers", sys.executable)
    fake.unlink()
    assert "checkout" in refused("rollout", "--peers", sys.executable)


def test_a_peer_that_fails_dies_or_hangs_raises_with_its_reason(fake, monkeypatch):
    with rollout_peer.Peer(sys.executable, fake) as peer:
        assert peer.versions == {"fake": "1"}
        model = Transformer(POLICY, VOCABULARY, rngs=nnx.Rngs(0))
        assert peer.load("a", model) == VOCABULARY * 16 + 16 * (16 + 16 + 16) + 16 * 16 + 3 * 16 * 16 - 16 * 16 + 64
        with pytest.raises(RuntimeError, match="as asked"):
            peer.ask("fail")
        assert peer.ask("generate", prompts=[[1]], tokens=3, threads=1)["tokens"] == 3  # and lives on
        with pytest.raises(RuntimeError, match="hello"):
            peer.ask("chatter")
        with pytest.raises(RuntimeError, match="of old age"):
            peer.ask("die")
        with pytest.raises(RuntimeError, match="of old age"):
            peer.ask("fail")
    monkeypatch.setattr(rollout_peer, "SECONDS", 0.2)
    fake.write_text("import time; time.sleep(600)")
    with pytest.raises(ConfigError, match="no answer"):
        rollout_peer.Peer(sys.executable, fake)


def test_the_peer_script_says_what_it_lacks(tmp_path):
    """In an interpreter without torch, which a module of that name that fails stands for."""
    (tmp_path / "torch.py").write_text("raise ImportError('No module named torch')")
    done = subprocess.run(
        [sys.executable, rollout_peer.SCRIPT],
        input="",
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
    )
    assert json.loads(done.stdout) == {"error": "No module named torch"}


def test_the_bare_loop_draws_what_the_engine_draws():
    """Same weights, prompts and seeds, hence the same tokens: the baseline leaves nothing out. In parts too."""
    model = Transformer(POLICY, VOCABULARY, rngs=nnx.Rngs(1))
    shape = Shape(prompt=70, turn=9)  # longer than a chunk
    prompts = np.random.default_rng(0).integers(0, VOCABULARY, (4, shape.prompt), np.int32)
    seeds = np.array([divmod(rollout_drive.row_seed(7, row), 1 << 32) for row in range(4)], np.uint32)
    ids, logprobs = BareLoop(model, 4, shape.prompt, shape.turn)(prompts, seeds)
    assert ids.shape == logprobs.shape == (4, 9)
    halves = BareLoop(model, 4, shape.prompt, shape.turn, parts=2)(prompts, seeds)
    np.testing.assert_array_equal(halves[0], ids)
    np.testing.assert_allclose(halves[1], logprobs, atol=1e-5)

    settings = RolloutConfig(slots=4, context=shape.length, max_turn_tokens=shape.turn)
    turns = {}

    class Recorded(Engine):
        def begin(self, sampling, deliver):
            super().begin(sampling, lambda turn: (turns.setdefault(turn.row, turn), deliver(turn)))

    rollout_drive.drive(Recorded(model, settings, stop_id=VOCABULARY), shape, prompts, 7)
    np.testing.assert_array_equal(np.stack([turns[row].ids for row in range(4)]), ids)
    np.testing.assert_allclose(np.stack([turns[row].logprobs for row in range(4)]), logprobs, atol=1e-5)
    with pytest.raises(ValueError, match="equal parts"):
        BareLoop(model, 4, 8, 4, parts=3)


def test_tools_take_their_time_and_change_no_token(monkeypatch):
    small(monkeypatch)
    episode = rollout_tools._Environment(1, 0.0).open(None)
    assert [episode.step("").text, episode.step("").text] == ["1", "2"]  # observations differ from turn to turn
    chat = rollout_tools._Chat(VOCABULARY)
    assert len(chat.encode_prompt("", "3")) == 12 and not np.array_equal(
        chat.encode_observation("1"), chat.encode_observation("2")
    )
    config = rollout_config()
    result = rollout_tools.overlap(config, 1)
    assert result["trajectories"] == 12 > result["slots"] == 8
    # A tool that changed what is sampled would make the comparison one of different work.
    monkeypatch.setattr(rollout_tools._Episode, "step", lambda self, action, final_turn=False: told(self._seconds))
    with pytest.raises(RuntimeError, match="changed what was sampled"):
        rollout_tools.overlap(config, 1)


def told(seconds):
    return rollout_tools.Observation("1" if seconds else "2")


def rollout_config():
    return dataclasses.replace(
        rollout.RunConfig(),
        policy=POLICY,
        tokenizer=dataclasses.replace(rollout.RunConfig().tokenizer, vocab_size=VOCABULARY),
        rollout=RolloutConfig(slots=8),
        grpo=dataclasses.replace(rollout.RunConfig().grpo, group=2),
    )


def test_what_others_take_is_a_share_of_the_cores(monkeypatch):
    others = rollout_drive.Others(os.getppid())
    sum(range(10**6))
    share = others.share()
    assert share is None or 0 <= share < 1.5
    monkeypatch.setattr(rollout_drive.Others, "_now", lambda self: (10.0, 8.0, 2.0))
    busy = rollout_drive.Others()
    monkeypatch.setattr(rollout_drive.Others, "_now", lambda self: (12.0, 8.0 + 3.0 * (os.cpu_count() or 1), 2.0))
    assert busy.share() == pytest.approx(1.5)
    monkeypatch.setattr(rollout_drive.Others, "_now", lambda self: None)
    assert busy.share() is None and rollout_drive.Others().share() is None
