"""Frozen dataclasses that describe a run.

Every field is used by some layer or refused by `config_rules.validate`; there is no field that is accepted and ignored.
Loading from YAML and command-line overrides lives in `trace_jax.config_io`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field


class ConfigError(ValueError):
    """Bad input from the user: one line saying what, where and the mend. The command line exits with status 2."""


@dataclass(frozen=True)
class SimulatorConfig:
    """Shapes and difficulty of the simulated world (magnitudes live in `simulator.params.SimulatorParams`)."""

    days: int = 28  # length of the observation window; the first half is the baseline
    segments: int = 48  # padded number of active segments of a campaign
    siblings: int = 2  # other campaigns of the same advertiser, campaign-level tables only
    batch: int = 256  # episodes proposed per compiled call
    rng: str = "threefry2x32"  # generator of the draws; "threefry2x32_13" has fewer rounds (docs/notes/sampling.md)
    difficulty: str = "paper"  # "easy" | "paper" | "hard"; the knobs below multiply what it sets
    strength: float = 1.0  # size of every cause's effects
    noise: float = 1.0  # day and cell noise beyond the counts
    confounders: float = 1.0  # probability of each optional confounder
    confounder_strength: float = 1.0  # size of the confounders
    onset: tuple[float, float, float] = (1.0, 1.0, 1.0)  # weights of immediate, delayed and ramp onsets
    two_attribute_share: float = 0.2988  # of the segment episodes; the paper's test set has 49 of 164
    # Only episodes whose label the oracle certifies; false: all, also those in which it hardly shows or shows elsewhere
    verified: bool = True


@dataclass(frozen=True)
class DataConfig:
    """Sizes and seed of the splits. Splits draw from disjoint random streams."""

    seed: int = 2609
    train: int = 4472
    validation: int = 528
    test: int = 235
    # Difficulties ("easy" | "paper" | "hard") of equal parts of the training split, which GRPO goes through in this
    # order; empty: one part of `simulator.difficulty`, which the other splits and the teacher have in any case.
    curriculum: tuple[str, ...] = ()


@dataclass(frozen=True)
class EnvironmentConfig:
    """The agent's task and tools."""

    name: str = "ads"  # "ads": why a metric moved (arXiv 2609.10315) | "search": multi-hop questions over documents
    prompt: str = "compact"  # "compact" | "full": wording of system and user prompt
    tool_seconds: float = 60.0  # wall-clock limit of one tool call
    tool_characters: int = 8000  # tool output is cut here
    memory_limit_mb: int = 256  # of one episode database
    reward_attr: float = 0.65
    reward_full: float = 0.30
    reward_format: float = 0.05  # for an answer that can be read; of "search", a right name earns the rest of 1
    # Taken off for naming a cause that did not act, e.g. 0.3: abstaining is then the better mistake
    penalty_false_cause: float = 0.0
    # Worlds of capabilities (docs/capability.md) that take the place of the task, in equal parts, NAME or NAME@LEVEL:
    # episodes that call for the capability, effects halved every two levels, a reward that pays for exercising it
    worlds: tuple[str, ...] = ()


@dataclass(frozen=True)
class SearchConfig:
    """Shapes of the worlds of the "search" environment, each a corpus and a question."""

    documents: int = 32  # of each corpus
    min_hops: int = 2  # facts that lead from the question to its answer, drawn between these bounds
    max_hops: int = 5
    results: int = 3  # documents that a search lists
    demonstrations: float = 0.0  # share of the SFT transcripts that are the solver's; the others are the explorer's


@dataclass(frozen=True)
class TokenizerConfig:
    """The sentencepiece model trained on teacher transcripts."""

    vocab_size: int = 768
    transcripts: int = 600  # teacher transcripts it is trained on
    fragments: int = 192  # long frequent fragments kept as single pieces
    min_fragment_characters: int = 12


@dataclass(frozen=True)
class PolicyConfig:
    """Sizes and blocks of the decoder (RoPE, RMSNorm, SwiGLU)."""

    vocab_size: int = 0  # rows of the embedding; 0: as many as the tokenizer has tokens
    layers: int = 4
    width: int = 128
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    mlp_width: int = 384
    rope_theta: float = 10000.0
    norm_eps: float = 1e-6
    qk_norm: bool = True
    tie_embeddings: bool = True
    rotary_fraction: float = 1.0  # share of a head's width that is rotated, from its start
    attention_gate: bool = False  # what a head attended to is scaled by a sigmoid of the layer's input
    norm_offset: bool = False  # norms scale by 1 + weight (but that inside a delta layer)
    # What mixes tokens in each layer, "attention" or "delta" (gated delta net, arXiv 2412.06464): a pattern that is
    # repeated and cut at `layers`.
    mixers: tuple[str, ...] = ("attention",)
    delta_key_heads: int = 0
    delta_value_heads: int = 0  # a multiple of the key heads
    delta_key_dim: int = 0  # of a head
    delta_value_dim: int = 0
    conv_width: int = 4  # tokens under the causal convolution of a delta layer
    experts: int = 0  # of the feed-forward part of every layer; 0: it is dense, `mlp_width` wide
    experts_per_token: int = 0
    expert_width: int = 0
    shared_expert_width: int = 0  # of an expert that all tokens have, times a sigmoid; 0: none
    norm_topk_prob: bool = True  # the weights of a token's experts sum to 1
    param_dtype: str = "float32"  # of stored parameters; "bfloat16" only where LoRA trains, the base never changes
    max_length: int = 512  # longest sequence (positions) the policy may see
    dtype: str = "float32"  # compute type: "float32" | "bfloat16"
    # What the backward pass computes again in each layer: "none" | what is not a matmul ("dots") | all of it ("full").
    # Less memory for more time; a file may still say false or true for "none" or "full".
    remat: str = "none"


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters (arXiv 2106.09685): training changes W + alpha / rank * A B of the targets, W is frozen."""

    rank: int = 0  # 0: all parameters are trained
    alpha: float = 16.0
    # Parameters that have one: query, key, value, output, gate, up, down, expert_gate, expert_up, expert_down, ...
    targets: tuple[str, ...] = ("query", "key", "value", "output", "gate", "up", "down")
    # Adapters whose mixture is trained in place of one: a softmax gate in every layer. `capability train` sets it.
    gate: tuple[str, ...] = ()


@dataclass(frozen=True)
class ChatConfig:
    """Turns of an imported policy, which has a chat template of its own. Policies from scratch write calls and answers
    in one fixed form without thoughts."""

    thinking: str = "off"  # "off": every turn begins with an empty thought | "keep": thoughts stay in the context
    tool_format: str = "auto"  # how a call is written: "json" | "xml" (Qwen3.5) | "auto": as the template writes it


@dataclass(frozen=True)
class RolloutConfig:
    """How trajectories are sampled."""

    temperature: float = 1.0
    # Truncation of the distribution; what is left out is recorded and the learner scores the same set. It is kept token
    # by token, so top_p and min_p need a top_k.
    top_k: int = 0  # only the k likeliest tokens; 0: the whole vocabulary
    top_p: float = 1.0  # only the likeliest tokens that together reach this probability
    min_p: float = 0.0  # only tokens at least this fraction as likely as the likeliest
    max_turns: int = 12  # assistant turns including the answer
    max_turn_tokens: int = 64  # sampled tokens in one turn
    context: int = 512  # prompt + everything after it
    slots: int = 256  # trajectories in flight, each with its place in the key/value cache
    decode_steps: int = 16  # tokens a row may be sampled before the host looks for rows that have stopped
    cache_dtype: str = "float32"
    # How the sampler holds matrices of layers: "compute", in `policy.dtype` | "int8", half of the memory of bfloat16;
    # what is sampled from then differs a little from what is trained (see `grpo.correction`)
    weights: str = "compute"
    replay_routes: bool = False  # the learner uses the experts that the sampler chose (mixture-of-experts policies)
    stale_cache: str = "refill"  # new parameters in mid-trajectory: "refill" its cache at its next turn | "keep" it
    # Threads. Several of a group may wait for one that asks the same, hence more than cores; the queries themselves run
    # in about as many processes as there are cores.
    tool_workers: int = 8
    tool_queue_seconds: float = 120.0  # a tool call that waits longer for a worker ends its trajectory
    trajectory_seconds: float = 600.0  # wall-clock limit of one trajectory


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with a warm-up and a constant or cosine schedule."""

    learning_rate: float = 1e-3
    schedule: str = "constant"  # "constant" | "cosine"
    warmup_steps: int = 20
    final_fraction: float = 0.05  # of the peak rate, at the end of a cosine schedule
    b1: float = 0.9
    b2: float = 0.98
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float = 1.0


@dataclass(frozen=True)
class BatchConfig:
    """Shapes of learner micro-batches. `row_length` x `rows` tokens are the budget of each."""

    row_length: int = 512  # packed rows are this long
    rows: int = 16  # rows in one micro-batch
    # Shorter rows for shorter sequences, with more of them to a micro-batch; attention costs less there. One program
    # is compiled for each length.
    buckets: tuple[int, ...] = ()


@dataclass(frozen=True)
class SFTConfig:
    """Supervised fine-tuning on the scripted analyst's trajectories."""

    trajectories: int = 12000  # kept (label-matching) teacher trajectories
    epochs: int = 2
    batch: int = 64  # trajectories per optimizer step
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(schedule="cosine"))
    microbatch: BatchConfig = field(default_factory=BatchConfig)
    # Ablations of the advertising teacher: episode types that it gives no lessons of ("segment_2d", "no_signal", ...);
    # "stopping": it goes on asking after it has decided
    without: tuple[str, ...] = ()
    # How the advertising teacher searches slices: all attributes and pairs at once, one and then two, one only
    searches: tuple[str, ...] = ("scan", "drill", "shallow")
    teacher_workers: int = 2  # processes that run the analyst
    save_every: int = 50


@dataclass(frozen=True)
class TurnCreditConfig:
    """Credit of single tool turns from a frozen reference (arXiv 2607.13988; the equations: `learner.turn_credit`)."""

    enabled: bool = False  # ask the reference; without it every token gets its trajectory's advantage
    # What a turn earns: "log_ratio" of what was missing before and after | "raw_delta" of the log-probability |
    # "remaining_gap", share of what was missing before the turn | "remaining_gap_initial", share of that at the start
    form: str = "log_ratio"
    look_ahead: int = 3  # tool turns over which it is averaged, its own included (K)
    discount: float = 0.8  # weight of each further turn (g)
    terminal_fill: float = 2.0  # share of the outcome for turns whose look-ahead reaches the last one
    coefficient: float = 0.2  # of turn credit in a token's advantage; 0: only measured
    outcome_coefficient: float = 1.0  # of the trajectory's advantage in that of each of its tokens
    epsilon: float = 0.1  # nats a token, keeps the gap of a certain answer above 0
    reference: str = ""  # run directory whose newest policy is asked; "": the policy at the start of the stage
    microbatch: BatchConfig = field(default_factory=lambda: BatchConfig(row_length=1024, rows=8))

    @property
    def pays(self) -> bool:
        """Whether tokens get advantages of their own."""
        return self.enabled and self.coefficient > 0


@dataclass(frozen=True)
class GRPOConfig:
    """Group-relative policy optimisation (papers 2609.10315 and section 4 of the specification)."""

    steps: int = 100
    prompts: int = 32
    group: int = 8
    iterations: int = 1  # optimizer steps per batch of trajectories
    # Share of each group that reads the task's hint (capability worlds have one); it is taken out before learning
    hints: float = 0.0
    # "grpo" | "dr_grpo" | "dapo" | "gspo" | "gspo_token" | "cispo"; the other fields must agree with what it fixes
    objective: str = "grpo"
    advantage_std: bool = True  # divide by the group's population standard deviation
    baseline: str = "mean"  # "mean" | "leave_one_out": of the group's rewards, with or without the trajectory's own
    # A member that crashed or timed out: "survivors" form the group | "drop_group" leaves the whole group out
    lost_members: str = "survivors"
    # Groups whose members all have one reward: "count" in the mean (their gradient is zero) | "drop" them | "resample"
    # other prompts in their place
    constant_groups: str = "count"
    resample_limit: int = 3  # further collections a step; what is still missing then stays out
    clip_low: float = 0.2  # ratio is clipped to [1 - clip_low, 1 + clip_high]
    clip_high: float = 0.28
    dual_clip: float = 0.0  # bound of ratio x |A| where A < 0, e.g. 3; 0: none
    # The denominator of the ratio: log-probs of the "behaviour" policy as sampled | of the "learner" before the update
    old_policy: str = "behaviour"
    # What makes up for the difference between sampler and learner when `old_policy` is "learner": "none" | "truncate"
    # the weight exp(learner - sampler) at `correction_high` | "mask_tokens" | "mask_sequences" whose weight (of a
    # sequence: the geometric mean of its tokens') is outside [correction_low, correction_high]
    correction: str = "none"
    correction_low: float = 0.5
    correction_high: float = 2.0
    aggregation: str = "token_mean"  # "token_mean" | "seq_mean_token_mean" | "seq_mean_token_sum" | "seq_sum_constant"
    aggregation_constant: float = 512.0  # divisor of "seq_sum_constant" (Dr.GRPO)
    mask_truncated: bool = False  # trajectories cut off by a limit give no gradient (overlong filter)
    overlong_buffer: int = 0  # tokens before `rollout.context` in which the reward falls by up to `overlong_penalty`
    overlong_penalty: float = 1.0
    kl_coefficient: float = 0.0  # to the policy at the start of the stage
    kl_estimator: str = "k3"  # "k1" | "k2" | "k3"
    entropy_coefficient: float = 0.0
    # 0: sample, then learn. n: step k samples with the parameters of n steps before, while the steps between are still
    # being learned from
    staleness: int = 0
    # New parameters reach a collection that is under way: "between" collections (exactly repeatable) | "in_flight"
    weight_sync: str = "between"
    turn_credit: TurnCreditConfig = field(default_factory=TurnCreditConfig)
    # Share of each step's prompts (on average over steps) that is drawn from the no-signal episodes alone; the others
    # have the split's own composition
    no_signal_share: float = 0.0
    optimizer: OptimizerConfig = field(
        default_factory=lambda: OptimizerConfig(learning_rate=1e-4, warmup_steps=5, weight_decay=0.0)
    )
    microbatch: BatchConfig = field(default_factory=BatchConfig)
    validate_every: int = 20
    validation_episodes: int = 64
    validation_samples: int = 1  # of each, drawn as `evaluation` says
    save_every: int = 10
    keep_best: int = 1  # checkpoints kept for their validation reward, beside the newest


@dataclass(frozen=True)
class EvaluationConfig:
    """Held-out evaluation."""

    samples: int = 5  # answers per episode
    temperature: float = 0.6
    top_k: int = 0  # as in `rollout`
    top_p: float = 1.0
    min_p: float = 0.0
    bootstrap: int = 2000  # resamples for the confidence intervals
    confidence: float = 0.95
    set: str = ""  # the held-out episodes: "": the run's own test split | "hard": a fixed set (docs/baselines.md)
    # Thresholds of the baselines' rules, a file of `trace-jax fit-rules`; "": those that come with the set
    rules: str = ""


@dataclass(frozen=True)
class CapabilityConfig:
    """What counts as a capability that a policy lacks (arXiv 2604.05336), and who labels attempts."""

    runs: int = 10  # of labels: of the endpoint, or resamples of the tasks where labels are computed
    keep: int = 8  # runs that must select a capability
    coverage: float = 0.10  # least share of the failed attempts that lack it
    gap: float = 0.20  # least difference between failed and passed attempts in how many lack it
    # Order of the kept: "gap" as in the paper | "explained", Cov x gap: the share of failures that the gap speaks for.
    rank: str = "gap"
    labeller: str = "programmatic"  # "programmatic" | "endpoint", a model behind an OpenAI-compatible interface
    endpoint: str = ""  # its base URL, such as http://localhost:8000/v1
    model: str = ""
    key_variable: str = "OPENAI_API_KEY"  # environment variable with its key; unset: requests carry none
    temperature: float = 1.0  # of its replies
    timeout_seconds: float = 120.0  # of one request
    retries: int = 5  # of a request that failed, and of a reply that cannot be read
    workers: int = 4  # requests under way


@dataclass(frozen=True)
class EndpointConfig:
    """A prompted model behind an OpenAI-compatible interface, for `eval --agent endpoint`. Limits are the paper's."""

    url: str = ""  # its base URL, such as http://localhost:8000/v1
    model: str = ""
    key_variable: str = "OPENAI_API_KEY"  # environment variable with its key; unset: requests carry none
    protocol: str = "tools"  # "tools" of chat completions | "text": calls are fenced blocks in the model's text
    max_turns: int = 30  # assistant turns including the answer
    max_turn_tokens: int = 2048  # of one reply
    context: int = 32768  # tokens of a conversation, as the endpoint counts them
    tokens_field: str = "max_tokens"  # how the endpoint calls the limit of a reply, e.g. "max_completion_tokens"
    price_in: float = 0.0  # of a million tokens read and written, for the cost; 0: not known
    price_out: float = 0.0
    timeout_seconds: float = 300.0  # of one request
    retries: int = 8  # of a request that failed, and of a reply that cannot be read
    workers: int = 4  # conversations under way


@dataclass(frozen=True)
class MeshConfig:
    """Device mesh `data x fsdp x tensor x expert`; -1 on `data` takes the remaining devices."""

    data: int = -1
    fsdp: int = 1
    tensor: int = 1
    expert: int = 1
    # Devices set aside for sampling (the last ones of every process): learning has the others. 0: both use all.
    rollout_devices: int = 0
    # Sampling devices that share the heads of a row, and its experts. Both 1 where both roles use all devices: sampling
    # lanes have the `tensor x expert` devices of the learner's mesh.
    rollout_tensor: int = 1
    rollout_expert: int = 1


@dataclass(frozen=True)
class RunConfig:
    """One run of `trace-jax`."""

    name: str = "nano"
    seed: int = 0
    simulator: SimulatorConfig = field(default_factory=SimulatorConfig)
    data: DataConfig = field(default_factory=DataConfig)
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    search: SearchConfig = field(default_factory=SearchConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    chat: ChatConfig = field(default_factory=ChatConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    sft: SFTConfig = field(default_factory=SFTConfig)
    grpo: GRPOConfig = field(default_factory=GRPOConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    capability: CapabilityConfig = field(default_factory=CapabilityConfig)
    endpoint: EndpointConfig = field(default_factory=EndpointConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    keep_checkpoints: int = 3
    save_in_background: bool = True  # training goes on while a checkpoint is written

    def replace(self, **changes) -> RunConfig:
        """A copy with fields changed."""
        return dataclasses.replace(self, **changes)
