"""`trace-jax capability route | eval`: which adapter the base policy chooses for each task, and what that is worth.

`eval` compares, on the same episodes and with the same luck: the base, every adapter alone, their sum, the adapters of
all worlds (`mix`) and of the task (`target`) where they were trained, the routed adapters, routing with the hidden
type of each episode known, and gates over base and adapters (`gating`) where they were trained.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from trace_jax import config_io
from trace_jax.capability import routing
from trace_jax.capability.routing import BASE
from trace_jax.config import BatchConfig, ConfigError, RunConfig
from trace_jax.config_rules import get, shown
from trace_jax.environments.base import Environment
from trace_jax.evaluation import form, store
from trace_jax.evaluation.evaluate import evaluate_policy, records_of
from trace_jax.learner.probe import Probe, Question, transformer_scores
from trace_jax.policy import lora
from trace_jax.recipes import assess, gating, places
from trace_jax.recipes.adapter_runs import GATES, MIX, TARGET, finished, finished_gates, targeted
from trace_jax.recipes.domain import domain_of
from trace_jax.recipes.interrupt import Interrupt
from trace_jax.recipes.progress import Progress
from trace_jax.recipes.rundir import RunDirectory, refuse_changes, write_text
from trace_jax.recipes.workspace import Workspace
from trace_jax.rollout.engine import Engine

SYSTEM = "Choose who should work on a task."
FILE = "routes.json"
ROUTED, ORACLE, SUM = "routed", "oracle", "sum"
OTHER = "other"  # directory of comparisons with another split or other settings than the first
_ROUTES = {
    **{"split": str, "data_seed": int, "tasks": int, "adapters": [str]},
    **{"agreement": float, "chance": float, "chosen": {str: int}, "oracle": {str: int}},
    "episodes": [{"chosen": str, "oracle": str}],
}


def read(path: Path) -> dict[str, Any]:
    """The content of a `routes.json`. ConfigError: it is damaged."""
    found = form.read(path, _ROUTES)
    labels = {*found["adapters"], "base"}
    unknown = next((e[k] for e in found["episodes"] for k in ("chosen", "oracle") if e[k] not in labels), None)
    why = f"it routes to {unknown!r}, which is none of its adapters" if unknown is not None else ""
    if len(found["episodes"]) != found["tasks"]:
        why = f"it has {len(found['episodes'])} of {found['tasks']} episodes"
    if why:
        raise ConfigError(f"{path} is damaged ({why}): {form.AGAIN}")
    return found


def route(run_dir: Path | None, config: RunConfig, *, split: str, out: Path | None = None) -> dict[str, Any]:
    """Has the base choose an adapter for every episode of a split; writes `routes.json`.

    Args:
        config: the run's.
        out: directory with `adapters/`; None: `capability` of the run directory.

    Returns:
        The content of `routes.json`, without the episodes.

    Raises:
        ConfigError: no finished adapter, or the policy cannot read so long a question.
    """
    with RunDirectory.open(run_dir, lock=False) as run, Interrupt() as interrupt:
        refuse_changes(run.config, config, (), "capability route")
        work = Workspace(run, Progress(), interrupt)
        out = run.path / "capability" if out is None else places.existing(out)
        result = _route(work, out, split, finished(out, config))
    print(markdown(result), end="")
    return {k: v for k, v in result.items() if k != "episodes"}


def _route(work: Workspace, out: Path, split: str, adapters: Sequence[str]) -> dict[str, Any]:
    """Routes of a split between some adapters; written into `out`."""
    names = targeted(adapters)
    if not names:
        raise ConfigError(f"{out / 'adapters'} has no finished adapter: run `trace-jax capability train` first")
    domain = domain_of(work.config)
    environment = work.environment(split)
    found = scores(work, environment, names)
    chosen = routing.choose(found)
    types = [str(environment.task(i).labels["type"]) for i in range(len(environment))]
    best = routing.oracle(types, [domain.worlds[n] for n in names])
    called = [*names, "base"]
    result = _about(work, split, names) | {
        "chosen": {n: int(c) for n, c in Counter(called[i] for i in chosen).items()},
        "oracle": {n: int(c) for n, c in Counter(called[i] for i in best).items()},
        "agreement": float((chosen == best).mean()),
        # of guessing with the shares of both: what agreement would be if the choice did not depend on the episode
        "chance": float(sum((chosen == i).mean() * (best == i).mean() for i in (BASE, *range(len(names))))),
        "episodes": [
            {"task": i, "chosen": called[c], "oracle": called[o], "logprobs": [round(x, 4) for x in row]}
            for i, (c, o, row) in enumerate(zip(chosen.tolist(), best.tolist(), found.tolist(), strict=True))
        ],
    }
    write_text(out / FILE, json.dumps(result, indent=1) + "\n")
    return result


def _about(work: Workspace, split: str, names: list[str]) -> dict[str, Any]:
    """What routes are of."""
    return {
        "split": split,
        "data_seed": work.config.data.seed,
        "tasks": len(work.environment(split)),
        "adapters": names,
    }


def scores(work: Workspace, environment: Environment, names: Sequence[str]) -> np.ndarray:
    """Log-probability of every label, the base's last, after every task's question: [tasks, capabilities + 1].

    Raises:
        ConfigError: the policy cannot read so long a question. Interrupted: a signal.
    """
    known = {c.name: c for c in domain_of(work.config).capabilities}
    capabilities = [known[n] for n in names]
    count = len(capabilities) + 1
    labels = routing.labels_for(count, lambda text: work.chat.encode_probe("", text)[1])
    answers = [work.chat.encode_probe("", label) for label in labels]
    questions, longest = [], 0
    for i in range(len(environment)):
        ids = work.chat.encode_prompt(SYSTEM, routing.question(environment.task(i).user, capabilities, labels))
        longest = max(longest, len(ids) + len(answers[0][0]) + 1)
        questions += [Question(np.asarray(ids, np.int32), [len(ids)], *answer) for answer in answers]
    if longest > work.config.policy.max_length:
        raise ConfigError(
            f"the question to the router has {longest} tokens and the policy reads {work.config.policy.max_length} "
            "(`policy.max_length`): route fewer adapters, or use a policy that reads more"
        )
    rows = max(1, work.config.grpo.microbatch.row_length * work.config.grpo.microbatch.rows // longest)
    ways = work.mesh.shape["data"] * work.mesh.shape["fsdp"]
    batches = BatchConfig(row_length=longest, rows=-(-rows // ways) * ways)
    probe = Probe(
        transformer_scores(nnx.graphdef(work.model)), work.start_params, work.mesh, work.axes, batches, work.frozen
    )
    found: list[float] = []
    with work.progress.bar("route", len(environment)) as bar:
        part = max(1, batches.rows)
        for start in range(0, len(environment), part):
            some = questions[start * count : (start + part) * count]
            found += [float(values[0]) for values in probe(some)]
            bar.update(min(start + part, len(environment)))
            work.interrupt.check()
    return np.array(found).reshape(len(environment), count)


def markdown(result: Mapping[str, Any]) -> str:
    """The table of `route`."""
    names, total = [*result["adapters"], "base"], sum(result["chosen"].values())
    lines = ["| adapter | chosen | with the type known |", "|---|---|---|"]
    lines += [f"| {n} | {result['chosen'].get(n, 0)} | {result['oracle'].get(n, 0)} |" for n in names]
    lines.append(
        f"\n{total} episodes of {result['split']}: the choice is that of the oracle in {result['agreement']:.0%}, by "
        f"chance it would be in {result['chance']:.0%}.\n"
    )
    if len(names) > 2 and total > 1 and max(result["chosen"].values()) == total:
        only = next(n for n, c in result["chosen"].items() if c == total)
        lines.append(
            f"The policy chose {only} for every episode, whatever the task: a policy trained from scratch "
            "reads no descriptions. Take an imported one, or `oracle` to see what routing is worth.\n"
        )
    return "\n".join(lines)


def evaluate(
    run_dir: Path | None,
    config: RunConfig,
    *,
    split: str,
    names: Sequence[str] = (),
    out: Path | None = None,
) -> dict[str, Any]:
    """Evaluates base, adapters and ways of combining them on the task; writes `evaluation/` beside the adapters, or
    into a directory of its own in `other/` where results of another split or other settings lie there.

    Args:
        config: the run's with changes to evaluation or data.
        names: which of base, routed, oracle, sum, the adapters and the gates; empty: all.

    Returns:
        The headline figures by name.

    Raises:
        ConfigError: no finished adapter, unknown names, or results of other settings in the same place.
    """
    with RunDirectory.open(run_dir, lock=False) as run, Interrupt() as interrupt:
        refuse_changes(run.config, config, ("evaluation.", "data.seed", f"data.{split}"), "capability eval")
        changed = {field: get(config, field) for field in config_io.differences(run.config, config)}
        run.config = config
        work = Workspace(run, Progress(), interrupt)
        out = run.path / "capability" if out is None else places.existing(out)
        results = out if _others(work, out, split) is None else out / OTHER / assess.label_of(split, changed)
        adapters = finished(out, config)
        every = ["base", *adapters, SUM, ORACLE, ROUTED, *finished_gates(out)]
        for name in names:
            if name not in every:
                meant = config_io.nearest(name, every)
                raise ConfigError(
                    f"--agents {name}: " + (f"did you mean {meant}?" if meant else f"choose from {', '.join(every)}")
                )
        if not adapters:
            raise ConfigError(f"{out / 'adapters'} has no finished adapter: run `trace-jax capability train` first")
        known = _known(work, results, split)
        wanted = not names or set(names) & {ROUTED, ORACLE}
        routes = _routes(work, (results, out), split, adapters) if wanted else {}
        held = Adapters(work, out, adapters)
        for name in names or every:
            _one(work, results, held, name, split, routes, known.get(name))
    found = store.load_summaries(results)
    assess.show(results)
    if results != out:
        print(f"results: {results}, as those of {out / store.FOLDER} are of other settings")
    return {name: summary for name, summary in found.items() if name in (names or every)}


def _others(work: Workspace, results: Path, split: str) -> tuple[Path, str] | None:
    """A result of another split or other settings that is there, and in what it differs. What earlier versions did not
    say is no difference."""
    asked = _asked(work, split)
    for name, summary in store.load_summaries(results).items():
        before = summary.get("settings", {})
        if other := next((k for k, v in asked.items() if k in before and before[k] != v), None):
            what = f"`{other}` is {shown(before[other])}, not {shown(asked[other])}"
            return results / store.FOLDER / f"{name}.json", what
    return None


def _known(work: Workspace, results: Path, split: str) -> dict[str, dict[str, Any]]:
    """Results that are there already, by name. ConfigError: of other settings, which new ones would replace."""
    if (found := _others(work, results, split)) is not None:
        raise ConfigError(f"{found[0]} is of other settings ({found[1]}) and would be lost: move it somewhere else")
    return store.load_summaries(results)


def _asked(work: Workspace, split: str) -> dict[str, Any]:
    """What a result depends on besides the adapters."""
    settings = {"split": split, "episodes": len(work.environment(split)), "seed": work.config.seed}
    settings |= {k: v for k, v in config_io.flatten(work.config) if k.startswith(("evaluation.", "data."))}
    return json.loads(json.dumps(settings, default=list))


def _routes(work: Workspace, directories: Sequence[Path], split: str, adapters: Sequence[str]) -> dict[str, list[str]]:
    """Adapter names of every episode, by `routed` and `oracle`; taken from a `routes.json` that is of these, written
    into the first of the directories where none is."""
    about = _about(work, split, targeted(adapters))
    there = (read(path) for folder in directories if (path := folder / FILE).exists())
    found = next((f for f in there if all(f.get(k) == v for k, v in about.items())), None)
    if found is None:
        found = _route(work, directories[0], split, adapters)
        print(markdown(found), end="")
    return {ROUTED: [e["chosen"] for e in found["episodes"]], ORACLE: [e["oracle"] for e in found["episodes"]]}


class Adapters:
    """All adapters resident beside one base, and an engine that samples with any of them; gates over them have engines
    of their own on the same base, since theirs samples with all at once."""

    def __init__(self, work: Workspace, out: Path, names: Sequence[str]):
        self.names, trained = list(names), []
        self._out, self._gates = out, {}
        first: Workspace | None = None
        self.steps = {}
        for name in names:
            with RunDirectory.open(out / "adapters" / name, lock=False) as run:
                own = Workspace(run, work.progress, work.interrupt)
                if first is None:
                    first = own
                    frozen = own.frozen
                    scale = jnp.repeat(frozen.scale, len(self.names))
                    own.__dict__["frozen"] = lora.Frozen(frozen.base, scale)
                elif own.config.lora != first.config.lora:
                    raise ConfigError(
                        f"adapters {first.run.path.name} and {name} differ in `lora` and cannot be resident together: "
                        "train them with one"
                    )
                trained.append(own.trained_params("grpo"))
                self.steps[name] = own.store("grpo").latest()
        self._first = first
        self.all, self.engine, self.chat = lora.stacked(trained), first.engine, first.chat
        chosen = [p for p, name in zip(trained, self.names, strict=True) if name not in (MIX, TARGET)]
        total = _summed(chosen or trained)
        # as many as there are scales; only the first is used
        self.sum = lora.stacked([total, *[jax.tree.map(jnp.zeros_like, total)] * (len(trained) - 1)])

    def sampler(self, name: str) -> Engine:
        """An engine with the parameters that something of this name samples with."""
        if name in GATES:
            gate = self._gate(name)
            gate.engine.set_params(gate.trained_params("grpo"), 0)
            return gate.engine
        self.engine.set_params(self.sum if name == SUM else self.all, 0)
        return self.engine

    def steps_of(self, name: str) -> dict[str, Any]:
        """Steps of what a result of this name depends on.

        Raises:
            ConfigError: a gate, and the adapters that it mixes have been trained anew.
        """
        if name not in GATES:
            return self.steps
        mixed = gating.unchanged(self._out, name)
        return {n: m["step"] for n, m in mixed.items()} | {name: self._gate(name).store("grpo").latest()}

    def mixed(self, name: str) -> tuple[str, ...]:
        """The adapters that a gate mixes."""
        return self._gate(name).config.lora.gate

    def _gate(self, name: str) -> Workspace:
        if name not in self._gates:
            with RunDirectory.open(self._out / "adapters" / name, lock=False) as run:
                gate = Workspace(run, self._first.progress, self._first.interrupt)
                gate.share(self._first, adapters=False)
                self._gates[name] = gate
        return self._gates[name]


def _summed(adapters: Sequence[lora.Pairs]) -> lora.Pairs:
    """One adapter whose product is the sum of theirs: side by side in the rank, which is wider for it."""
    return jax.tree.map(
        lambda *pairs: lora.Pair(
            jnp.concatenate([p.a for p in pairs], axis=-1), jnp.concatenate([p.b for p in pairs], axis=-2)
        ),
        *adapters,
        is_leaf=lambda x: isinstance(x, lora.Pair),
    )


def _one(
    work: Workspace,
    results: Path,
    held: Adapters,
    name: str,
    split: str,
    routes: Mapping[str, Sequence[str]],
    known: Mapping[str, Any] | None,
) -> None:
    """One row of the comparison, unless it is `known` of these adapters."""
    config = work.config
    environment, domain = work.environment(split), domain_of(config)
    count = len(environment)
    index = {n: i for i, n in enumerate(held.names)} | {"base": BASE}
    everywhere = 0 if name in (SUM, *GATES) else index.get(name)
    adapters = [index[n] for n in routes[name]] if name in routes else [everywhere] * count
    settings = _asked(work, split) | {"adapters": held.steps_of(name)}
    if known is not None:
        if known.get("settings") == settings:
            return
        print(f"note: {name} is scored again: the adapters were trained on, or the result is of an earlier version")
    engine = held.sampler(name)
    with work.progress.bar(f"evaluate {name}", count) as bar:

        def report(done: int, _: int) -> None:
            bar.update(done)
            work.interrupt.check()

        trajectories = evaluate_policy(
            engine,
            held.chat,
            environment,
            range(count),
            config.evaluation,
            config.rollout,
            seed=config.seed,
            on_progress=report,
            adapters=adapters,
        )
        work.interrupt.check()
    if name in GATES:
        gating.write(results / f"{name}.json", trajectories, held.mixed(name))
    records = records_of(trajectories, domain.kind.record_of)
    result = domain.kind.summarise(records, config.evaluation, seed=config.seed)
    store.save(results, name, result | {"settings": settings}, records)
