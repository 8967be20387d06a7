"""The learner against torch doing the same updates, and against itself on padded rows.

Every round takes all sides in turn, so that a change of the machine's load meets all alike; ratios are medians over
rounds of ratios within a round. Everything is warm: what comes before the first round is not counted. Both sides begin
with the same weights and learn from the same batches: their log-probs, and after one step their gradients and
parameters, are compared first.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import safetensors.numpy
from flax import nnx

from trace_jax.bench import learner_batches, measure
from trace_jax.bench.learner_batches import Shape
from trace_jax.bench.rollout_drive import Others
from trace_jax.bench.rollout_peer import Peer
from trace_jax.config import GRPOConfig, MeshConfig, OptimizerConfig, PolicyConfig
from trace_jax.learner import objectives, sharding
from trace_jax.learner.flops import flops_per_token
from trace_jax.learner.packing import LearnerBatch
from trace_jax.learner.step import Learner, TrainState, transformer_logprobs
from trace_jax.policy import hf
from trace_jax.policy.transformer import Transformer, logical_axes


@dataclass(frozen=True)
class Size:
    """A policy, and what it learns from.

    Attributes:
        most_rounds: however many are asked for.
    """

    policy: PolicyConfig
    vocab_size: int
    shape: Shape
    most_rounds: int


SIZES = {
    "nano": Size(
        PolicyConfig(layers=4, width=128, heads=4, kv_heads=2, head_dim=32, mlp_width=384), 768, Shape(), 1000
    ),
    # Four of the 28 layers and the whole vocabulary.
    "qwen3-0.6b-4-layers": Size(
        PolicyConfig(layers=4, width=1024, heads=16, kv_heads=8, head_dim=128, mlp_width=3072, rope_theta=1e6),
        151936,
        Shape(rows=2, packed_rows=4, microbatches=1),
        3,
    ),
}
OBJECTIVE = GRPOConfig()  # its objective, clips and aggregation; the peer knows no other
OPTIMIZER = OptimizerConfig(learning_rate=1e-4, schedule="constant", warmup_steps=1)
ATTENTION = ("sdpa", "eager")  # of the peer: the faster one is timed
WARM_STEPS = 2  # of each
# Forms of a batch that the peer learns from, and whether it scores only the trained tokens, as we do. Trainers built on
# transformers take the scores of all positions, or of all after the prompt.
PEER_SIDES = {
    "torch_full": ("full", False),
    "torch_selective": ("full", True),
    "torch_packed": ("packed", False),
    "torch_padded": ("padded", False),
}
PEER_FORMS = ("full", "packed", "padded")
SETTLE_SECONDS = 0.1  # idle threads of the side before may spin for a moment
MOST_DIFFERENT = 1e-3  # of two log-probs (nats), and of the gradients as a share: beyond it is another update


def compare(name: str, repeats: int, peer: Peer | None, say: Callable[[str], None]) -> dict[str, Any]:
    """One of `SIZES`: tokens a second of whole optimizer steps by form of the batch, ours and the peer's.

    `full`: rows of one sequence without padding; `packed`, `padded` and, ours only, `bucketed`: of real lengths.

    Raises:
        RuntimeError: the peer failed, or does not compute the same update.
    """
    size = SIZES[name]
    model = Transformer(size.policy, size.vocab_size, rngs=nnx.Rngs(0))
    parameters = sum(p.size for p in jax.tree.leaves(nnx.state(model, nnx.Param)))
    ours = _Ours(model)
    forms = {form: ours.with_old(batches) for form, batches in _forms(size).items()}
    result: dict[str, Any] = {"parameters": parameters, "vocab_size": size.vocab_size}
    theirs = None
    if peer is not None:
        say("the same update on both sides")
        theirs = _Theirs(name, peer, model, parameters, forms)
        result["differences"] = _differences(ours, theirs, forms)
    del model
    say("compiling and warming up")
    for batches in forms.values():
        ours.step(batches)
    attention = theirs.fastest_attention() if theirs else None
    counts = {form: learner_batches.tokens(batches) for form, batches in forms.items()}
    # No more of the vocabulary than the update needs: the scores of trained tokens.
    full = forms["full"]
    trained = sum(b.loss_mask.sum() for b in full) / counts["full"]
    each = flops_per_token(size.policy, size.vocab_size * trained, learner_batches.attended(full))
    others = Others(None if peer is None else peer.pid)
    rounds = []
    for number in range(min(repeats, size.most_rounds)):
        say(f"round {number + 1} of {min(repeats, size.most_rounds)}")
        rounds.append(_round(ours, theirs, attention, forms))
    busy = others.share()
    if peer is not None:
        peer.ask("forget", name=name)
    return result | {
        "forms": {form: _described(batches) for form, batches in forms.items()},
        "peer_attention": attention,
        "peer_threads": theirs.threads if theirs else None,
        "seconds": {side: measure.spread([r[side] for r in rounds]) for side in rounds[0] if side != "matmul_gflops"},
        "tokens_per_second": _rates(rounds, counts),
        "matmul_gflops": measure.spread([r["matmul_gflops"] for r in rounds]),
        "flops_per_token": each,
        "matmul_share": _ratios([counts["full"] * each / 1e9 / r["full"] / r["matmul_gflops"] for r in rounds]),
        "packing_gain": _ratios([r["padded"] / r["packed"] for r in rounds]),
        "bucket_gain": _ratios([r["packed"] / r["bucketed"] for r in rounds]) if "bucketed" in forms else None,
        # The same batch on both sides without padding, real lengths as each side would have them, both in packed rows.
        "vs_torch": _against(rounds, "full", "torch_full"),
        "vs_torch_selective": _against(rounds, "full", "torch_selective"),
        "vs_torch_padded": _against(rounds, "packed", "torch_padded"),
        "vs_torch_packed": _against(rounds, "packed", "torch_packed"),
        "cores_taken_by_others": busy,
        "programs": ours.learner.compilations(),
    }


class _Ours:
    """A learner and its state."""

    def __init__(self, model: Transformer):
        self.graphdef, params = nnx.split(model, nnx.Param)
        self.learner = Learner(
            transformer_logprobs(self.graphdef),
            objectives.grpo_objective(OBJECTIVE),
            OPTIMIZER,
            total_steps=1000,
            mesh=sharding.make_mesh(MeshConfig(), jax.devices()[:1]),
            axes=logical_axes(model),
        )
        self.state: TrainState = self.learner.init(params)

    def logprobs(self, batches: Sequence[LearnerBatch]) -> list[np.ndarray]:
        return self.learner.logprobs(self.state.params, batches)

    def with_old(self, batches: Sequence[LearnerBatch]) -> list[LearnerBatch]:
        return learner_batches.with_noisy_old(batches, self.logprobs, seed=1)

    def step(self, batches: Sequence[LearnerBatch]) -> tuple[float, dict[str, float]]:
        """Seconds, and what the learner reports."""
        start = time.perf_counter()
        self.state, numbers = self.learner.step(self.state, batches)
        jax.block_until_ready(self.state.params)
        return time.perf_counter() - start, numbers

    def first_moments(self) -> Any:
        """Adam's, in the structure of the parameters."""
        structure = jax.tree.structure(self.state.params)
        nodes = jax.tree.leaves(self.state.opt_state, is_leaf=lambda n: jax.tree.structure(n) == structure)
        return next(node for node in nodes if jax.tree.structure(node) == structure)

    def save(self, tree: Any, path: Path) -> None:
        """A tree like the parameters under the names that the peer has for them."""
        safetensors.numpy.save_file(hf.tensors(nnx.merge(self.graphdef, tree)), path)


class _Theirs:
    """The peer's model of the same weights, with the same batches."""

    def __init__(
        self, name: str, peer: Peer, model: Transformer, parameters: int, forms: dict[str, list[LearnerBatch]]
    ):
        self._name, self._peer = name, peer
        counted = peer.load(name, model)
        if counted != parameters:
            raise RuntimeError(f"the peer's model has {counted} parameters, ours {parameters}")
        rates = {key: value for key, value in asdict(OPTIMIZER).items() if key in _OPTIMIZER_FIELDS}
        self.ask("optimizer", **rates, clip_low=OBJECTIVE.clip_low, clip_high=OBJECTIVE.clip_high)
        for form in PEER_FORMS:
            sent = [{key: getattr(b, key).tolist() for key in _SENT} for b in map(_filled, forms[form])]
            self.ask("batches", form=form, packed=form == "packed", batches=sent)
        self.threads: int | None = None

    def ask(self, op: str, **arguments: Any) -> dict[str, Any]:
        return self._peer.ask(op, name=self._name, **arguments)

    def step(self, form: str, attention: str, selective: bool = False) -> dict[str, Any]:
        answer = self.ask("step", form=form, attention=attention, selective=selective)
        self.threads = answer["threads"]
        return answer

    def fastest_attention(self) -> str:
        """In rows of one full sequence; warms up every side, too."""
        seconds = {a: min(self.step("full", a)["seconds"] for _ in range(WARM_STEPS)) for a in ATTENTION}
        best = min(seconds, key=seconds.get)
        for form, selective in PEER_SIDES.values():
            if (form, selective) != PEER_SIDES["torch_full"]:
                self.step(form, best, selective)
        return best


_OPTIMIZER_FIELDS = ("learning_rate", "b1", "b2", "eps", "weight_decay", "clip_norm")
_SENT = ("ids", "positions", "segments", "loss_mask", "advantages", "old_logprobs")


def _forms(size: Size) -> dict[str, list[LearnerBatch]]:
    shape = size.shape
    sequences = learner_batches.real(shape, size.vocab_size, seed=0)
    forms = {
        "full": learner_batches.full(shape, size.vocab_size, seed=0),
        "packed": learner_batches.packed(sequences, shape),
        "padded": learner_batches.padded(sequences, shape),
    }
    if shape.microbatches > 1:  # to choose among
        forms["bucketed"] = learner_batches.bucketed(sequences, shape)
    return forms


def _filled(batch: LearnerBatch) -> LearnerBatch:
    """Without rows of nothing but padding: only a program of fixed shapes must compute them."""
    used = np.asarray(batch.segments).any(axis=1)
    return jax.tree.map(lambda a: np.asarray(a)[used], batch)


def _differences(ours: _Ours, theirs: _Theirs, forms: dict[str, list[LearnerBatch]]) -> dict[str, float]:
    """Largest difference of the log-probs of trained tokens in any form (nats); after one step on the full rows, of the
    loss, of a parameter, and of the gradients (norm of the difference over the norm)."""
    logprobs = 0.0
    for form in PEER_FORMS:
        answer = theirs.ask("logprobs", form=form, attention=ATTENTION[0])["logprobs"]
        for batch, mine, other in zip(map(_filled, forms[form]), ours.logprobs(forms[form]), answer, strict=True):
            mine = mine[: len(batch.ids)]  # empty rows come last
            logprobs = max(logprobs, float(np.abs(mine - np.array(other))[batch.loss_mask].max(initial=0.0)))
    _, numbers = ours.step(forms["full"])
    answer = theirs.step("full", ATTENTION[0])
    with tempfile.TemporaryDirectory() as directory:
        files = {key: Path(directory) / f"{key}.safetensors" for key in ("parameters", "moments")}
        ours.save(ours.state.params, files["parameters"])
        ours.save(ours.first_moments(), files["moments"])
        found = theirs.ask("compare", **{key: str(path) for key, path in files.items()})
    differences = {"logprobs": logprobs, "loss": abs(numbers["loss"] - answer["loss"])} | found
    for key, what in (("logprobs", "log-probs"), ("gradient", "gradient")):
        if not differences[key] <= MOST_DIFFERENT:
            raise RuntimeError(f"the peer computes another update: its {what} differ from ours by {differences[key]}")
    return differences


def _round(ours: _Ours, theirs: _Theirs | None, attention: str | None, forms: dict[str, list[LearnerBatch]]):
    """Seconds of a step of every side and form, and the fastest matmul meanwhile."""
    times = {}
    for form, batches in forms.items():
        time.sleep(SETTLE_SECONDS)
        times[form], _ = ours.step(batches)
        for side, (learned, selective) in PEER_SIDES.items():
            if theirs is not None and learned == form:
                time.sleep(SETTLE_SECONDS)
                times[side] = theirs.step(form, attention, selective)["seconds"]
    time.sleep(SETTLE_SECONDS)
    return times | {"matmul_gflops": measure.matmul_peak("float32", 1)["matmul_gflops"]}


def _rates(rounds: Sequence[dict[str, float]], counts: dict[str, int]) -> dict[str, float]:
    """Real tokens a second by side."""
    form_of = {form: form for form in counts} | {side: form for side, (form, _) in PEER_SIDES.items()}
    medians = {side: statistics.median(r[side] for r in rounds) for side in rounds[0] if side in form_of}
    return {side: counts[form_of[side]] / seconds for side, seconds in medians.items()}


def _against(rounds: Sequence[dict[str, float]], ours: str, theirs: str) -> dict[str, float] | None:
    return _ratios([r[theirs] / r[ours] for r in rounds]) if theirs in rounds[0] else None


def _ratios(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "lowest": min(values), "highest": max(values)}


def _described(batches: Sequence[LearnerBatch]) -> dict[str, Any]:
    count = learner_batches.tokens(batches)
    padding = 1 - count / sum(b.ids.size for b in batches)
    return {"shapes": [list(b.ids.shape) for b in batches], "tokens": count, "padding": padding}
