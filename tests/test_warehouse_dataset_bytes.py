"""The bytes of a data set are a function of its settings: any batch, any number of devices, interrupted or not."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers_dataset import contents

from trace_jax import cli
from trace_jax.config import ConfigError, DataConfig, GRPOConfig, RunConfig, SimulatorConfig
from trace_jax.recipes import simulate as recipe
from trace_jax.recipes.inspect import episode_of
from trace_jax.recipes.interrupt import Interrupted
from trace_jax.recipes.simulate import simulate
from trace_jax.simulator.accepted import CHUNK, accepted_chunks, accepted_episodes
from trace_jax.simulator.stream import composition_for
from trace_jax.warehouse.dataset import read
from trace_jax.warehouse.splits import load_split

SMALL = SimulatorConfig(batch=64)


def config(batch=64):
    return RunConfig(simulator=SimulatorConfig(batch=batch), data=DataConfig(seed=7))


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


CURRICULUM = DataConfig(seed=3, train=25, validation=5, test=3, curriculum=("easy", "hard", "easy"))
STAGED = RunConfig(simulator=SMALL, data=CURRICULUM, grpo=GRPOConfig(prompts=4))


def test_a_curriculum_is_that_of_training(tmp_path, monkeypatch):
    """The training split of a run, in its order; the other splits have none; interrupted in its second stage."""
    root, chunks = tmp_path / "d", recipe.accepted_chunks

    def stopping(config, seed, stream, *args, **options):
        for part in chunks(config, seed, stream, *args, **options):
            yield part
            if stream == "train-1-hard":
                raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(recipe, "accepted_chunks", stopping)
        with pytest.raises(KeyboardInterrupt):
            simulate(STAGED, root, names=["train", "test"], chunk=CHUNK)
    assert len((root / "unfinished.jsonl").read_text().splitlines()) == 3  # the header and a part of either stage
    simulate(STAGED, root, names=["train", "test"], chunk=CHUNK, resume=True)
    sets = read(root)
    for name in ("train", "test"):
        want = load_split(STAGED, name)
        assert sets[name].batch.campaign_id.tolist() == want.batch.campaign_id.tolist()
        assert np.array_equal(sets[name].batch.clicks, want.batch.clicks)
    entry = json.loads((root / "manifest.json").read_text())["splits"]["train"]
    assert entry["composition"] == sets["train"].composition() and entry["parts"] == 3
    assert sum(cause["accepted"] for cause in entry["acceptance"].values()) == 25
    card = (root / "README.md").read_text()
    assert all(
        f"| {difficulty} | {episodes} | {part} to {part} |" in card
        for difficulty, episodes, part in (("easy", 8, "00000"), ("hard", 8, "00001"), ("easy", 9, "00002"))
    )


def test_curriculum_stages_of_several_parts(tmp_path):
    """Each stage in chunks of 3: another order than in chunks of 1024, of the same episodes of the same stage."""
    simulate(STAGED, tmp_path / "d", names=["train"], chunk=3)
    ids, want = read(tmp_path / "d")["train"].batch.campaign_id, load_split(STAGED, "train").batch.campaign_id
    assert [sorted(x) for x in np.split(ids, [8, 16])] == [sorted(x) for x in np.split(want, [8, 16])]
    card = (tmp_path / "d/README.md").read_text()
    assert "| easy | 8 | 00000 to 00002 |" in card and "| easy | 9 | 00006 to 00008 |" in card


def test_a_set_of_its_own_has_no_curriculum(made, tmp_path):
    staged = config().replace(data=DataConfig(seed=7, curriculum=("easy", "hard")))
    simulate(staged, tmp_path / "d", episodes=40, chunk=16)
    assert contents(tmp_path / "d") == contents(made[0])


def test_inspect_finds_the_episodes_of_a_curriculum():
    want = load_split(STAGED, "train")
    for index in (0, 7, 8, 24):
        record = episode_of(STAGED, "train", index)
        assert (record.index, record.campaign_id) == (index, want[index].campaign_id)


def test_no_siblings(tmp_path):
    alone = RunConfig(simulator=SimulatorConfig(batch=64, siblings=0), data=DataConfig(seed=7))
    simulate(alone, tmp_path / "d", episodes=9)
    batch = read(tmp_path / "d")["episodes"].batch
    want, _ = accepted_episodes(alone.simulator, 7, "episodes", composition_for(alone.simulator, 9))
    assert np.array_equal(batch.impressions, want.impressions) and batch.sibling_id.shape == (9, 0)


def test_hopeless_settings_are_in_nobodys_way(tmp_path, monkeypatch):
    """The corrected command needs no cleaning up."""

    def hopeless(*args, **options):
        yield from accepted_chunks(*args, **options, max_proposals=1)

    root = tmp_path / "d"
    weak = RunConfig(simulator=SimulatorConfig(batch=64, strength=0.0), data=DataConfig(seed=7))
    with monkeypatch.context() as patch:
        patch.setattr(recipe, "accepted_chunks", hopeless)
        with pytest.raises(ConfigError, match="were accepted in .* raise simulator.strength"):
            simulate(weak, root, episodes=40, chunk=16)
    simulate(config(), root, episodes=3)


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
    for argv, message in (
        (["--episodes", "0"], "--episodes 0: it must be between 1 and 10000000"),
        (["--episodes", "10000001"], "between 1 and 10000000"),
        (["--episodes", "9" * 20], "between 1 and 10000000"),
        (["--episodes", "3", "--split", "test"], "leave out --split"),
        (["--seed", "1", "--data.seed", "2"], "--seed 1 and --data.seed 2 are the same setting: leave one out"),
        (["--simulator.difficulty=easy", "--difficulty", "hard"], "--simulator.difficulty easy are the same setting"),
    ):
        for dry in ([], ["--dry-run"]):
            assert cli.main(["simulate", "--out", out, *argv, *dry]) == 2
            said, err = capsys.readouterr()
            assert message in err and err.count("\n") == 1 and said == "" and not (tmp_path / "d").exists()
    assert cli.main(["simulate", "--dry-run", "--seed", "4", "--data.seed", "4", "--episodes", "10000000"]) == 0
    assert "seed: 4" in capsys.readouterr().out


def test_the_command_line_says_how_to_continue(capsys, monkeypatch, tmp_path):
    def stop(*args, **options):
        raise Interrupted(130)

    monkeypatch.setattr(recipe, "simulate", stop)
    for extra in ([], ["--resume"]):
        assert cli.main(["simulate", "--out", str(tmp_path), *extra]) == 130
        assert capsys.readouterr().err.strip().endswith(f"trace-jax simulate --out {tmp_path} --resume")
