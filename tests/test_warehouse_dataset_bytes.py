"""The bytes of a data set are a function of its settings: any batch, any number of devices, interrupted or not."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from trace_jax import cli
from trace_jax.config import ConfigError, DataConfig, RunConfig, SimulatorConfig
from trace_jax.recipes import simulate as recipe
from trace_jax.recipes.interrupt import Interrupted
from trace_jax.recipes.simulate import simulate
from trace_jax.simulator.accepted import accepted_episodes
from trace_jax.simulator.stream import composition_for
from trace_jax.warehouse.dataset import read

SMALL = SimulatorConfig(batch=64)


def config(batch=64):
    return RunConfig(simulator=SimulatorConfig(batch=batch), data=DataConfig(seed=7))


def contents(root):
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("made") / "d"
    return root, simulate(config(), root, episodes=40, chunk=16)


def test_what_is_written_is_the_accepted_set(made):
    root, result = made
    episodes = read(root)["episodes"]
    want, _ = accepted_episodes(SMALL, 7, "episodes", composition_for(SMALL, 40))
    # The chunks of the two have other borders: the same episodes in another order.
    assert sorted(episodes.batch.campaign_id.tolist()) == sorted(want.campaign_id.tolist())
    assert episodes.verdict.accept.all() and len(np.unique(episodes.batch.campaign_id)) == 40
    manifest = json.loads((root / "manifest.json").read_text())
    assert manifest["settings"]["seed"] == 7 and "batch" not in manifest["settings"]["simulator"]
    acceptance = manifest["splits"]["episodes"]["acceptance"]
    assert sum(entry["accepted"] for entry in acceptance.values()) == 40
    assert result["simulated"] >= sum(entry["proposed"] for entry in acceptance.values()) >= 40
    assert result["splits"] == manifest["splits"] and result["episodes_per_s"] > 0


def test_batch_and_interruption_change_no_byte(made, tmp_path, monkeypatch):
    """Interrupted after its second part by a signal, then continued at another batch size."""
    root, chunks = tmp_path / "d", recipe.accepted_chunks

    def interrupted(*args, **options):
        for part in chunks(*args, **options):
            if part.number == 1:
                os.kill(os.getpid(), signal.SIGINT)
            yield part

    with monkeypatch.context() as patch:
        patch.setattr(recipe, "accepted_chunks", interrupted)
        with pytest.raises(Interrupted):
            simulate(config(192), root, episodes=40, chunk=16)
    assert not (root / "manifest.json").exists()
    with pytest.raises(ConfigError, match="--resume"):
        simulate(config(192), root, episodes=40, chunk=16)
    with pytest.raises(ConfigError, match="other settings"):
        simulate(config(192), root, episodes=41, chunk=16, resume=True)
    result = simulate(config(192), root, episodes=40, chunk=16, resume=True)
    assert result["simulated"] == 192  # the 8 episodes of the last part, not all again
    assert contents(root) == contents(made[0])


def test_devices_change_no_byte(made, tmp_path):
    script = Path(__file__).with_name("dataset_devices.py")
    done = subprocess.run([sys.executable, script, tmp_path / "d"], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    assert contents(tmp_path / "d") == contents(made[0])


def test_configured_splits(tmp_path):
    sizes = DataConfig(seed=3, train=9, validation=5, test=3)
    simulate(RunConfig(simulator=SMALL, data=sizes), tmp_path / "d", names=["test", "train", "test"])
    sets = read(tmp_path / "d")
    assert {name: len(episodes) for name, episodes in sets.items()} == {"test": 3, "train": 9}
    assert not np.isin(sets["test"].batch.strength, sets["train"].batch.strength).any()


def test_balanced_composition(tmp_path):
    result = simulate(config(), tmp_path / "d", episodes=32, composition="balanced")
    assert set(result["splits"]["episodes"]["composition"].values()) == {2}


def test_command_line(tmp_path, capsys, monkeypatch):
    """Flags reach the recipe; --seed and --difficulty are fields of the configuration; mistakes are one line."""
    seen = []
    monkeypatch.setattr(recipe, "simulate", lambda config, out, **options: seen.append((config, out, options)) or {})
    out = str(tmp_path / "d")
    assert cli.main(["simulate", "--out", out, "--episodes", "5", "--seed", "4", "--difficulty", "hard"]) == 0
    ((got, where, options),) = seen
    assert (got.data.seed, got.simulator.difficulty, where) == (4, "hard", tmp_path / "d")
    assert options == {"names": (), "episodes": 5, "composition": "paper", "resume": False}
    capsys.readouterr()
    for argv, message in (
        (["--seed", "x"], "data.seed"),
        (["--seed", "-1"], "data.seed"),
        (["--difficulty", "extreme"], "simulator.difficulty"),
        (["--composition", "odd"], "--composition"),
        (["--episodes", "many"], "--episodes"),
    ):
        assert cli.main(["simulate", "--out", out, *argv]) == 2
        err = capsys.readouterr().err
        assert message in err and err.count("\n") == 1
    monkeypatch.undo()
    for argv, message in ((["--episodes", "0"], "use 1 or more"), (["--episodes", "3", "--split", "test"], "--split")):
        assert cli.main(["simulate", "--out", out, *argv]) == 2
        assert message in capsys.readouterr().err


def test_the_command_line_says_how_to_continue(capsys, monkeypatch, tmp_path):
    def stop(*args, **options):
        raise Interrupted(130)

    monkeypatch.setattr(recipe, "simulate", stop)
    for extra in ([], ["--resume"]):
        assert cli.main(["simulate", "--out", str(tmp_path), *extra]) == 130
        assert capsys.readouterr().err.strip().endswith(f"trace-jax simulate --out {tmp_path} --resume")
