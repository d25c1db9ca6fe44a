"""The fields of a run's config: type, range, default and meaning of each.

`config.py` reads what a user wrote into these; `docs/config.md` is made from
them.
"""

import dataclasses
from typing import Any


def _f(default, help_, *, lo=None, hi=None, choices=None, each=None, auto=None):
  """A field with its help text and what values it may take.

  `each` is the type of the members of a tuple. With `auto` the default stands
  for what the algorithm brings along (`Algorithm.defaults`); `auto` is what
  holds where it brings nothing.
  """
  return dataclasses.field(
    default=default, metadata=dict(help=help_, lo=lo, hi=hi, choices=choices, each=each, auto=auto)
  )


@dataclasses.dataclass(frozen=True)
class ModelSection:
  path: str = _f('', 'Hugging Face folder or org/name[@revision]; "" starts from random weights of `preset`')
  preset: str = _f('tiny', 'shape of a random model (models/presets.py), or ./file.py:function of one of yours')
  tokenizer: str = _f('', 'folder or "bytes"; "" means the one in `path`, or "bytes" for a random model')
  dtype: str = _f(
    'bfloat16',
    'operands of matrix products; float32 is exact; '
    'float16, with a loss scale, is for GPUs before Ampere; auto '
    'is the fastest here, measured when a run begins',
    choices=('bfloat16', 'float32', 'float16', 'auto'),
  )
  param_dtype: str = _f('float32', 'master weights', choices=('float32', 'bfloat16'))
  quantize: str = _f(
    '', 'matrices that are not trained in 8 or 4 bits, as under adapters (QLoRA)', choices=('', 'int8', 'nf4')
  )
  remat: str = _f('none', 'what the backward pass recomputes', choices=('none', 'dots', 'full'))
  attention: str = _f(
    'auto', 'auto: splash on TPU, else chunked', choices=('auto', 'chunked', 'reference', 'splash', 'cudnn')
  )


@dataclasses.dataclass(frozen=True)
class DataSection:
  path: Any = _f('', 'file, folder, org/name[@revision] or generated:NAME; several as a tuple or with " + " between')
  weights: tuple = _f((), 'share of the documents from each of several; () goes by their sizes', each=float)
  columns: Any = _f('', 'renames columns: "prompt=question,completion=answer"; one for all sources or a tuple')
  map: Any = _f('', 'pkg.module:fn or ./file.py:fn applied to each row; one for all sources or a tuple')
  streaming: bool = _f(False, 'rows are read when needed, not at the start')
  shuffle: bool = _f(True, 'another order each epoch')
  packing: bool = _f(True, 'several documents a row, isolated')
  overlong: str = _f('truncate', 'documents longer than a row (counted)', choices=('truncate', 'drop', 'error'))
  train_on: str = _f('assistant', 'tokens that are trained', choices=('assistant', 'completion', 'all'))
  system_prompt: str = _f('', 'put before each conversation of an RL run')


@dataclasses.dataclass(frozen=True)
class TrainSection:
  steps: int = _f(100, 'of this stage; on-policy a step is rl.epochs x rl.minibatches updates', lo=1)
  batch_size: int = _f(8, 'rows of an update (SFT)', lo=1)
  row_length: int = _f(
    0, 'tokens of a row; 0: 512 for data, the longest prompt and completion for rollouts', lo=0, auto=0
  )
  micro_batch_size: int = _f(
    0, 'rows at a time; 0: all for data, about 8,192 tokens a device for rollouts (CPU: 2,048)', lo=0
  )
  freeze: str = _f(
    '',
    'regex of whole paths of parameters that stay as they '
    'are, such as "embed|.*norm"; with LoRA "" is all but the '
    'adapters',
  )


@dataclasses.dataclass(frozen=True)
class RouterSection:
  balance_coef: float = _f(
    0.0,
    'weight of the load-balancing loss of a mixture of experts, '
    'router_aux_loss_coef elsewhere; 0.001 is usual, but not in RL',
    lo=0.0,
  )
  z_coef: float = _f(0.0, 'weight of the squared log-normaliser of the router', lo=0.0)
  routing_replay: bool = _f(False, 'updates and scores of rollouts take the experts that were chosen while sampling')


@dataclasses.dataclass(frozen=True)
class LoraSection:
  rank: int = _f(0, 'of the adapters that are trained in place of the weights; 0: none, or that of `path`', lo=0)
  alpha: float = _f(16.0, 'adapters count alpha / rank', lo=0.0)
  rslora: bool = _f(False, 'alpha / sqrt(rank) instead')
  targets: str = _f(
    'q|k|v|o|gate|up|down', 'regex of the matrices that have one: paths, or how they end; experts/gate of experts'
  )
  dropout: float = _f(0.0, 'of what adapters read', lo=0.0, hi=0.99)
  path: str = _f('', 'PEFT folder of an adapter to start from, which decides all of the above but the dropout')


@dataclasses.dataclass(frozen=True)
class OptimSection:
  name: str = _f('adamw', 'any optimizer of optax')
  lr: float = _f(1e-5, 'peak learning rate', lo=0.0)
  schedule: str = _f('constant', 'after the warm-up', choices=('constant', 'linear', 'cosine'))
  warmup_steps: int = _f(0, 'steps from lr / warmup_steps to lr', lo=0)
  end_lr: float = _f(0.0, 'where linear and cosine end', lo=0.0)
  weight_decay: float = _f(0.0, 'of matrices and embeddings', lo=0.0)
  b1: float = _f(0.9, 'Adam', lo=0.0, hi=1.0)
  b2: float = _f(0.999, 'Adam', lo=0.0, hi=1.0)
  eps: float = _f(1e-8, 'Adam', lo=0.0)
  clip_norm: float = _f(1.0, 'global norm of the gradient', lo=0.0)
  max_skipped: int = _f(5, 'steps in a row with a gradient that is not finite before the run stops', lo=1)


@dataclasses.dataclass(frozen=True)
class RolloutSection:
  prompts: int = _f(8, 'prompts a step', lo=1)
  group_size: int = _f(8, 'completions a prompt', lo=1)
  max_prompt_length: int = _f(512, 'longer prompts are left out, counted', lo=1)
  max_new_tokens: int = _f(128, 'of a completion, stop token included', lo=1)
  temperature: float = _f(1.0, 'of sampling and of all log-probs', lo=1e-3)
  top_k: int = _f(0, '0 is off', lo=0)
  top_p: float = _f(1.0, '1 is off', lo=1e-6, hi=1.0)
  min_p: float = _f(0.0, 'share of the likeliest token; 0 is off', lo=0.0, hi=1.0)
  forbidden_ids: tuple = _f((), 'token ids that are never drawn', each=int)
  stop_strings: tuple = _f((), 'end a completion, beside the stop ids', each=str)
  min_new_tokens: int = _f(0, 'no stop id or string before', lo=0)
  top_logprobs: int = _f(0, 'of so many of the likeliest tokens at each place the log-probs go into samples/', lo=0)
  slots: int = _f(0, 'sequences in flight; 0: all of a step', lo=0)
  page_size: int = _f(0, 'cache entries of a page, a power of two; 0: every slot has room for the longest text', lo=0)
  cache_tokens: int = _f(0, 'entries of all pages; 0: half of what slots without pages have', lo=0)
  block: int = _f(8, 'tokens of every slot per dispatch', lo=1)
  staleness: int = _f(
    0,
    'updates that sampling runs ahead of; 1: samples while the last update runs, 2: while it is graded and scored, too',
    lo=0,
  )
  inflight_update_blocks: int = _f(
    0, 'blocks after which a rollout under way takes the weights of the last update; 0: the next one does', lo=0
  )
  share_base: bool = _f(False, 'sample from the frozen weights of training, with no copy of them: less memory, slower')
  offload: bool = _f(False, 'optimizer states, critic and reference wait in the memory of the host while sampling')


@dataclasses.dataclass(frozen=True)
class RlSection:
  advantage: str = _f(
    '',
    'how rewards become advantages',
    auto='group',
    choices=('', 'group', 'leave_one_out', 'reinforce_pp', 'reinforce_pp_baseline', 'remax', 'gae', 'best_of_n'),
  )
  scale_rewards: str = _f(
    '', 'whose std divides the advantages of "group"', auto='group', choices=('', 'group', 'batch', 'none')
  )
  std_eps: float = _f(1e-6, 'added to that std', lo=0.0)
  singleton: str = _f('zero', 'advantage in a group of one valid sample: 0, or the raw reward', choices=('zero', 'raw'))
  loss: str = _f('', 'surrogate', auto='clip', choices=('', 'clip', 'cispo', 'sapo', 'gspo', 'geo_mean', 'reinforce'))
  clip_low: float = _f(-1.0, 'ratio at least 1 - clip_low', lo=-1.0, auto=0.2)
  clip_high: float = _f(-1.0, 'ratio at most 1 + clip_high', lo=-1.0, auto=0.2)
  dual_clip: float = _f(0.0, 'bound c of the loss where the advantage is negative, above 1; 0 is off', lo=0.0)
  tau_pos: float = _f(1.0, 'SAPO', lo=1e-6)
  tau_neg: float = _f(1.05, 'SAPO', lo=1e-6)
  aggregate: str = _f(
    '',
    'loss of the batch: mean over tokens, over sequences, or by constant length',
    auto='token',
    choices=('', 'token', 'sequence', 'constant'),
  )
  kl_coef: float = _f(0.0, 'weight of the KL to the reference', lo=0.0)
  kl_estimator: str = _f(
    '',
    'of that KL; in a loss k1 has no gradient on average; k1+, k3+: that value, the gradient of k2',
    auto='k3',
    choices=('', 'k1', 'k2', 'k3', 'abs', 'k1+', 'k3+'),
  )
  kl_in: str = _f('', 'where it counts', auto='loss', choices=('', 'loss', 'reward'))
  kl_target: float = _f(0.0, 'KL that an adaptive kl_coef (in the reward) steers to; 0 is fixed', lo=0.0)
  kl_horizon: float = _f(10_000.0, 'samples over which it adapts', lo=1.0)
  entropy_coef: float = _f(0.0, 'entropy bonus', lo=0.0)
  epochs: int = _f(1, 'passes over a rollout', lo=1)
  minibatches: int = _f(1, 'updates of a pass', lo=1)
  gamma: float = _f(1.0, 'discount of token rewards', lo=0.0, hi=1.0)
  lam: float = _f(0.95, 'of GAE', lo=0.0, hi=1.0)
  keep_reward: float = _f(1.0, 'the best of a group is trained if its reward reaches this (rft)')
  dynamic_sampling: int = _f(
    -1, 'rounds of sampling at most, until all groups differ in reward; 0 is off', lo=-1, auto=0
  )
  mask_truncated: bool = _f(False, 'completions without an end are not trained (overlong filtering)')
  importance: tuple = _f(
    (),
    'corrections for a sampler that is not the policy: token_truncated, '
    'sequence_truncated, icepop, token_mask, sequence_mask, opsm',
    each=str,
    auto=(),
  )
  importance_cap: float = _f(2.0, 'of truncated ratios', lo=1.0)
  token_low: float = _f(0.5, 'ratio of a token: icepop, token_mask', lo=0.0)
  token_high: float = _f(5.0, 'likewise', lo=0.0)
  sequence_low: float = _f(0.99, 'geometric mean, of sequence_mask', lo=0.0)
  sequence_high: float = _f(1.01, 'likewise', lo=0.0)
  opsm_threshold: float = _f(0.02, 'mean of log sampler / policy over a sequence, of opsm', lo=0.0)


@dataclasses.dataclass(frozen=True)
class CriticSection:
  path: str = _f('', 'folder the critic starts from; "": the policy')
  lr: float = _f(0.0, 'of the critic; 0: as optim.lr', lo=0.0)
  value_head: bool = _f(
    False, 'no weights of its own: a second head of the policy, learnt in its update; exports leave it out'
  )
  coef: float = _f(0.1, 'weight of the value loss in that update', lo=0.0)
  value_clip: float = _f(0.2, 'values move at most this far from the old ones; 0 is off', lo=0.0)
  warmup_steps: int = _f(0, 'first steps that train the critic only', lo=0)


@dataclasses.dataclass(frozen=True)
class NllSection:
  kind: str = _f('nll', 'cross entropy, or dynamic fine-tuning', choices=('nll', 'dft'))
  label_smoothing: float = _f(0.0, 'share of the target spread over the vocabulary', lo=0.0, hi=1.0)
  z_loss: float = _f(0.0, 'weight of the squared log-normaliser', lo=0.0)
  neftune_alpha: float = _f(0.0, 'noise on embeddings; 5 is usual', lo=0.0)


@dataclasses.dataclass(frozen=True)
class PreferenceSection:
  losses: tuple = _f((), 'names; they are summed', each=str, auto=())
  loss_weights: tuple = _f((), 'one per loss; () is 1 each', each=float)
  beta: float = _f(0.1, 'strength of the reference', lo=1e-6)
  label_smoothing: float = _f(0.0, 'share of labels taken for flipped', lo=0.0, hi=0.5)
  gamma: float = _f(0.5, 'target margin of SimPO', lo=0.0)
  nll_coef: float = _f(-1.0, 'weight of the NLL of chosen answers', lo=-1.0, auto=0.0)
  f_divergence: str = _f(
    'reverse_kl', 'that holds the policy', choices=('reverse_kl', 'forward_kl', 'js_divergence', 'alpha_divergence')
  )
  ipo_average: bool = _f(True, 'IPO on means over tokens (TRL), not on sums')
  desirable_weight: float = _f(1.0, 'KTO', lo=0.0)
  undesirable_weight: float = _f(1.0, 'KTO', lo=0.0)
  share_prompt: bool = _f(True, 'chosen and rejected read their prompt once')
  precompute_ref: bool = _f(False, 'reference log-probs once, kept on disk: no second model in memory')


@dataclasses.dataclass(frozen=True)
class RewardModelSection:
  path: str = _f('', 'folder or RUN[@step] that grades as `reward_model` in config.reward')
  loss: str = _f('bradley_terry', 'of training one', choices=('bradley_terry', 'regression', 'process'))
  center_coef: float = _f(0.0, 'weight of (chosen + rejected)^2', lo=0.0)


@dataclasses.dataclass(frozen=True)
class DistillSection:
  teachers: tuple = _f((), 'folders', each=str)
  weights: tuple = _f((), 'one per teacher; () is equal shares', each=float)
  beta: float = _f(0.5, '0: KL(teacher, student), 1: the reverse, between: generalised Jensen-Shannon', lo=0.0, hi=1.0)
  temperature: float = _f(1.0, 'of both', lo=1e-3)
  top_k: int = _f(0, "teacher's most probable tokens, from a cache on disk; 0: the whole vocabulary", lo=0)
  nll_coef: float = _f(0.0, 'weight of cross entropy', lo=0.0)
  on_policy: float = _f(1.0, 'share of steps on its own samples (gkd)', lo=0.0, hi=1.0)


@dataclasses.dataclass(frozen=True)
class RewardSection:
  timeout_s: float = _f(30.0, 'for one group in one function', lo=0.01)
  workers: int = _f(2, 'processes that grade', lo=1)
  max_failed: float = _f(0.25, 'share of failed groups that stops the run', lo=0.0, hi=1.0)


@dataclasses.dataclass(frozen=True)
class ToolsSection:
  workers: int = _f(0, 'environments at a time, a process each; 0: as many as sequences in flight, up to 64', lo=0)
  timeout_s: float = _f(30.0, 'for one reset, call or get_reward', lo=0.01)
  max_turns: int = _f(8, 'of the model in an episode', lo=1)
  max_result_tokens: int = _f(256, 'of what a tool answers; the rest is cut', lo=1)
  wait_blocks: int = _f(
    4, 'blocks after which an answer is waited for, so that runs repeat to the bit; 0: answers count as they come', lo=0
  )


@dataclasses.dataclass(frozen=True)
class MeshSection:
  train: str = _f(
    'fsdp=-1', 'sizes of data, fsdp, expert, context, tensor; -1: the rest; auto: the fastest that fits, by compiling'
  )
  rollout: str = _f('data=-1', 'to sample on: the same devices, another shape; auto: the least split that fits')
  score: str = _f('', 'of frozen models: references, teachers, reward models; "": as train')
  rollout_devices: int = _f(0, 'the last devices, to sample only; training has the others; 0: all do both', lo=0)
  score_devices: int = _f(0, 'before those, for frozen models only; score "" is fsdp=-1 then; 0: as training', lo=0)


@dataclasses.dataclass(frozen=True)
class EvalDataSection:
  path: str = _f('', 'held-out data; "" evaluates nothing')
  columns: str = _f('', 'as data.columns, and that by default')
  map: Any = _f('', 'as data.map, and that by default')


@dataclasses.dataclass(frozen=True)
class EvalSection:
  every: int = _f(0, 'steps; 0: at the end only', lo=0)
  size: int = _f(256, 'rows at most', lo=1)
  samples: int = _f(0, 'completions a prompt for pass@k; 0: loss only', lo=0)
  temperature: float = _f(1.0, 'of those completions; 0 is greedy', lo=0.0)
  pass_reward: float = _f(1.0, 'a completion with this reward has passed')
  data: EvalDataSection = EvalDataSection()


@dataclasses.dataclass(frozen=True)
class SaveSection:
  every: int = _f(0, 'steps; 0: at the end only', lo=0)
  keep: int = _f(2, 'newest checkpoints that stay', lo=1)
  keep_best: str = _f('', 'also the best by this metric of evaluation')
  best_mode: str = _f('max', 'of keep_best', choices=('max', 'min'))
  export: bool = _f(True, 'write export/ when the last stage ends')


@dataclasses.dataclass(frozen=True)
class LogSection:
  every: int = _f(10, 'steps between console lines without a terminal', lo=1)
  samples_every: int = _f(10, 'steps between samples/*.jsonl', lo=1)
  rollouts_every: int = _f(0, 'steps between rollouts/*.npz, for config.train_on_rollouts; 0 keeps none', lo=0)
  tensorboard: bool = _f(True, '')
  wandb: bool = _f(False, '')
  watchdog_s: float = _f(
    1800.0, 'a step that takes longer ends all processes with all stacks, and who is stuck is named; 0 is off', lo=0.0
  )
  timeline_steps: int = _f(
    20, 'first steps whose phases, on the host and on devices, go to WORKDIR/timeline for Perfetto', lo=0
  )
  profile_from: int = _f(0, 'first step of a trace in WORKDIR/profile, for TensorBoard or Perfetto; 0: none', lo=0)
  profile_steps: int = _f(3, 'steps of that trace', lo=1)


@dataclasses.dataclass(frozen=True)
class Config:
  """One stage of a run, complete."""

  seed: int = _f(0, 'decides weights, data order and draws', lo=0)
  algorithm: str = _f('sft', 'a method by name, pkg.module or ./file.py')
  stages: tuple = _f((), 'names of blocks that override this one, in order', each=str)
  init_from: str = _f('', 'start from the weights of RUN[@step], stage:NAME or a folder')
  reward: Any = _f('', 'built-in name, pkg.module:fn, ./file.py:fn or reward_model; several as a tuple or with commas')
  reward_weights: tuple = _f((), 'one per reward; () is 1 each', each=float)
  environment: str = _f('', './env.py:Class or pkg.module:Class of episodes with tools; its get_reward() is a reward')
  train_on_rollouts: str = _f(
    '',
    'trains on the rollouts that RUN (with log.rollouts_every=1) kept, in place of samples; '
    'reward "" takes theirs, too',
  )
  model: ModelSection = ModelSection()
  data: DataSection = DataSection()
  train: TrainSection = TrainSection()
  router: RouterSection = RouterSection()
  lora: LoraSection = LoraSection()
  optim: OptimSection = OptimSection()
  rollout: RolloutSection = RolloutSection()
  nll: NllSection = NllSection()
  preference: PreferenceSection = PreferenceSection()
  reward_model: RewardModelSection = RewardModelSection()
  distill: DistillSection = DistillSection()
  rl: RlSection = RlSection()
  critic: CriticSection = CriticSection()
  rewards: RewardSection = RewardSection()
  tools: ToolsSection = ToolsSection()
  mesh: MeshSection = MeshSection()
  eval: EvalSection = EvalSection()
  save: SaveSection = SaveSection()
  log: LogSection = LogSection()
  # What an algorithm of one's own reads; nothing here does.
  user: dict = dataclasses.field(default_factory=dict)

  def rewards_tuple(self) -> tuple:
    """The reward functions, however they were written."""
    if isinstance(self.reward, str):
      return tuple(r.strip() for r in self.reward.split(',') if r.strip())
    return tuple(self.reward) if isinstance(self.reward, (tuple, list)) else (self.reward,)
