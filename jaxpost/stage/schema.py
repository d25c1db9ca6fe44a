"""The config of one stage: type, range, default and meaning of every field.

The sections that belong to methods are in `schema_methods.py` and `schema_rl.py`. `config.py`
reads a user's config into these dataclasses; docs/config.md is generated from them.
"""

import dataclasses
from typing import Any

from jaxpost.stage import schema_methods as methods
from jaxpost.stage import schema_rl as rl_sections
from jaxpost.stage.schema_methods import option


@dataclasses.dataclass(frozen=True)
class ModelSection:
  """The model, its number formats and kernels."""

  path: str = option('', "Hugging Face folder or org/name[@revision]; '': random weights of the shape `preset`.")
  preset: str = option(
    'tiny', 'Shape of a model with random weights (models/presets.toml), or ./file.py:function of a custom model.'
  )
  text_only: bool = option(False, 'Take the text model of a multimodal folder; an export copies the other parts.')
  tokenizer: str = option('', "Folder of a tokenizer or 'bytes'; '': that of `path`, or 'bytes' for a random model.")
  dtype: str = option(
    'auto',
    'Type of the operands of matrix products; float32 is exact; float16, with loss scaling, is for GPUs '
    'before Ampere; auto: float16 on those, bfloat16 on other accelerators, the faster one on CPUs.',
    choices=('auto', 'bfloat16', 'float32', 'float16'),
  )
  param_dtype: str = option(
    'float32',
    'Type of the master weights; bfloat16 takes 2 bytes a weight less: gradients and moments stay float32, '
    'and updates are rounded stochastically.',
    choices=('float32', 'bfloat16'),
  )
  quantize: str = option('', 'Format of frozen matrices, such as the base of QLoRA.', choices=('', 'int8', 'nf4'))
  remat: str = option(
    'auto',
    'What the backward pass recomputes instead of storing it: none; dots, all but the results of projections and '
    'attention; full, all but the input of each layer; auto: none on CPU, elsewhere dots, or full to fit.',
    choices=('auto', 'none', 'dots', 'full'),
  )
  attention: str = option(
    'auto',
    'Implementation of attention; auto: splash on TPU, triton on GPU, chunked on CPU and where those are wrong.',
    choices=('auto', 'chunked', 'splash', 'triton'),
  )


@dataclasses.dataclass(frozen=True)
class DataSection:
  """Training data, and how rows become tokens."""

  path: Any = option('', "File, folder, org/name[@revision] or generated:NAME; several: a tuple, or joined by ' + '.")
  weights: tuple = option(
    (), 'Fraction of documents from each of several sources; (): in proportion to their sizes.', each=float
  )
  columns: Any = option('', "Columns to rename: 'prompt=question,completion=answer'; one for all sources, or a tuple.")
  map: Any = option(
    '', 'Function pkg.module:fn or ./file.py:fn that is applied to each row; one for all sources, or a tuple.'
  )
  max_samples: int = option(
    0, 'Rows that are used, from the first on; of several sources in proportion to their sizes; 0: all.', lo=0
  )
  streaming: bool = option(False, 'Read rows when they are needed, not all at the start.')
  shuffle: bool = option(True, 'Shuffle the rows anew in each epoch.')
  packing: bool = option(True, 'Pack several documents into a row; they do not attend to each other.')
  overlong: str = option(
    'truncate', 'What happens to documents longer than a row; they are counted.', choices=('truncate', 'drop', 'error')
  )
  train_on: str = option('assistant', 'Tokens that are trained on.', choices=('assistant', 'completion', 'all'))
  system_prompt: str = option('', 'System message put before each conversation of an RL run.')
  chat_template: str = option(
    '', "Chat template in place of the tokenizer's: chatml, llama3, gemma, mistral, plain, a .jinja file, or its text."
  )
  template_kwargs: dict = option(
    {},
    'Variables of the chat template in training data, prompts, sampling and evaluation, such as '
    'template_kwargs.enable_thinking=True; the column chat_template_kwargs overrides them for its row.',
  )


@dataclasses.dataclass(frozen=True)
class TrainSection:
  """Number and size of updates."""

  steps: int = option(100, 'Steps of this stage; an on-policy step makes rl.epochs x rl.minibatches updates.', lo=1)
  epochs: float = option(
    0.0,
    'Passes over the data, or over the prompts, that decide the steps in place of `steps`; 0: `steps` counts.',
    lo=0.0,
  )
  batch_size: int = option(8, 'Packed rows in an update of a method that trains on data.', lo=1, hi=2**20)
  row_length: int = option(
    0,
    'Tokens in a packed row; 0: 512 for data, the longest prompt and completion for rollouts.',
    lo=0,
    auto=0,
    hi=2**24,
  )
  share_prompt: bool = option(
    False, 'Pack completions of a prompt behind one copy of it: pays where attention is by Triton, or prompts are long.'
  )
  micro_batch_size: int = option(
    0,
    'Rows at a time; 0: all of data, about 16,384 tokens a device of rollouts (2,048 on CPU), but no more than fits.',
    lo=0,
    hi=2**20,
  )
  freeze: str = option(
    '',
    "Regex of whole parameter paths that are not trained, such as 'embed|.*norm'; with LoRA, '' trains "
    'the adapters only. Indexers of sparse attention are never trained.',
  )
  reduce_dtype: str = option(
    'float32',
    'Type in which gradients of weights are summed over devices; of experts over fsdp, else in float32.',
    choices=('float32', 'bfloat16'),
  )
  deterministic: bool = option(False, 'Ask XLA for the same bits in each run on GPUs, at some cost.')


@dataclasses.dataclass(frozen=True)
class RouterSection:
  """The router of a mixture of experts."""

  balance_coef: float = option(
    0.0, 'Weight of the load-balancing loss (router_aux_loss_coef elsewhere); 0.001 is usual, but not in RL.', lo=0.0
  )
  z_coef: float = option(0.0, 'Weight of the squared log-normalizer of the router.', lo=0.0)
  routing_replay: bool = option(
    False, 'Updates and scores use the experts that were chosen during sampling (rollout routing replay).'
  )


@dataclasses.dataclass(frozen=True)
class LoraSection:
  """Low-rank adapters."""

  rank: int = option(
    0, 'Rank of adapters that are trained instead of the weights; 0: none, or that of `path`.', lo=0, hi=2**16
  )
  alpha: float = option(16.0, 'Adapters are scaled by alpha / rank.', lo=0.0)
  rslora: bool = option(False, 'Scale adapters by alpha / sqrt(rank) instead (rsLoRA).')
  targets: str = option(
    'q|k|v|o|gate|up|down',
    'Regex of the matrices that have adapters, by path or end of a path; experts/gate are those of experts. Names '
    'of PEFT, such as q_proj,v_proj or all-linear, mean the same matrices.',
  )
  dropout: float = option(0.0, 'Dropout on the inputs of adapters.', lo=0.0, hi=0.99)
  path: str = option('', 'PEFT folder of an adapter to start from; it decides all fields above except the dropout.')


@dataclasses.dataclass(frozen=True)
class OptimSection:
  """Optimizer and learning rate."""

  name: str = option('adamw', 'Name of an optimizer of optax or optax.contrib, such as muon.')
  lr: float = option(-1.0, "Peak learning rate; -1: the method's own.", lo=-1.0, hi=100.0, auto=1e-5)
  schedule: str = option('constant', 'Learning rate after the warm-up.', choices=('constant', 'linear', 'cosine'))
  warmup_steps: int = option(0, 'Steps of linear warm-up, from lr / warmup_steps to lr.', lo=0)
  warmup_ratio: float = option(
    0.0, 'Fraction of the steps that are warm-up, in place of warmup_steps, rounded up.', lo=0.0, hi=1.0
  )
  end_lr: float = option(0.0, 'Learning rate at the end of linear and cosine schedules.', lo=0.0)
  weight_decay: float = option(0.0, 'Weight decay of matrices and embeddings.', lo=0.0)
  b1: float = option(-1.0, "Decay of the first moment; -1: the optimizer's own, 0.9 of adamw.", lo=-1.0, hi=0.999999)
  b2: float = option(-1.0, "Decay of the second moment; -1: the optimizer's own, 0.999 of adamw.", lo=-1.0, hi=0.999999)
  eps: float = option(-1.0, "Epsilon in the denominator; -1: the optimizer's own, 1e-8 of adamw.", lo=-1.0)
  clip_norm: float = option(1.0, 'Largest global norm of the gradient; 0: no limit.', lo=0.0)
  max_skipped: int = option(5, 'Non-finite steps that stop the run; each good step cancels a tenth of one.', lo=1)


@dataclasses.dataclass(frozen=True)
class MeshSection:
  """Device meshes of training, sampling and scoring."""

  train: str = option(
    'fsdp=-1',
    'Sizes of the axes data, fsdp, expert, context, tensor; -1: all remaining devices; auto: the fastest that fits, '
    'found by compiling.',
  )
  rollout: str = option(
    'data=-1',
    'Mesh for sampling, on the training devices unless rollout_devices is set; auto: the smallest split that fits.',
  )
  score: str = option('', "Mesh of frozen models (references, teachers, reward models); '': as train.")
  rollout_devices: int = option(
    0, 'Devices at the end of the list that only sample; training uses the others; 0: all do both.', lo=0
  )
  score_devices: int = option(
    0,
    "Devices before those for frozen models only, with score '' as fsdp=-1; 0: frozen models use the training devices.",
    lo=0,
  )


@dataclasses.dataclass(frozen=True)
class EvalDataSection:
  """Held-out data."""

  path: str = option('', "Held-out data, as data.path; '': no evaluation.")
  columns: str = option('', "Columns to rename; '': data.columns.")
  map: Any = option('', "Function applied to each row; '': data.map.")


@dataclasses.dataclass(frozen=True)
class EvalSection:
  """Evaluation during training."""

  every: int = option(0, 'Steps between evaluations; 0: only before the first step and after the last.', lo=0)
  size: int = option(256, 'Rows that are evaluated at most.', lo=1, hi=2**31)
  samples: int = option(0, 'Completions per prompt for pass@k; 0: loss only.', lo=0, hi=2**16)
  temperature: float = option(1.0, 'Temperature of the completions; 0: greedy.', lo=0.0)
  pass_reward: float = option(1.0, 'Value of rl.correct_by from which a completion counts as passed.')
  data: EvalDataSection = EvalDataSection()


# Fields on which no state depends that checkpoints hold; `resumed_run.py` has exceptions.
CHANGEABLE = (
  *('optim.lr', 'optim.schedule', 'optim.end_lr', 'optim.warmup_steps', 'optim.warmup_ratio', 'optim.weight_decay'),
  *('optim.clip_norm', 'critic.lr', 'preference.beta', 'reward', 'reward_weights', 'rl.correct_by'),
  *('rl.kl_coef', 'rl.clip_low', 'rl.clip_high', 'rl.entropy_coef', 'rollout.max_new_tokens', 'rollout.temperature'),
)


@dataclasses.dataclass(frozen=True)
class SaveSection:
  """Checkpoints, what may change when a run resumes, and the export."""

  every: int = option(0, 'Steps between checkpoints; 0: at the end only.', lo=0)
  keep: int = option(2, 'Newest checkpoints that are kept.', lo=1)
  keep_best: str = option('', "Evaluation metric by which the best checkpoint is kept, too; '': none.")
  best_mode: str = option('max', 'Whether the largest or smallest keep_best is best.', choices=('max', 'min'))
  allow_changes: tuple = option(
    (), 'Fields that a run may change as it resumes, from its next step on.', each=str, choices=CHANGEABLE
  )
  export: bool = option(True, 'Write a Hugging Face folder to export/ after the last stage.')


@dataclasses.dataclass(frozen=True)
class LogSection:
  """Console, metrics, samples, traces and the watchdog."""

  every: int = option(10, 'Steps between console lines when stdout is not a terminal.', lo=1)
  samples_every: int = option(10, 'Steps between files samples/*.jsonl.', lo=1)
  rollouts_every: int = option(
    0, 'Steps between files rollouts/*.npz, which train_on_rollouts of another run can read; 0: none.', lo=0
  )
  tensorboard: bool = option(True, 'Write metrics for TensorBoard.')
  trackers: tuple = option(
    (),
    'Trackers that get metrics, samples and report, as wandb,mlflow.',
    each=str,
    choices=('wandb', 'trackio', 'mlflow'),
  )
  project: str = option('', "Project, or experiment, in the trackers; '': jaxpost.")
  entity: str = option('', "User or team in wandb; '': your default.")
  run_name: str = option('', "Name of the run in the trackers; '': that of its folder, in wandb one that it chooses.")
  tags: tuple = option((), 'Tags of the run in the trackers; in trackio the first is its group.', each=str)
  offline: bool = option(False, 'Trackers keep the run on this machine: wandb/, mlflow.db, mlruns/ in WORKDIR.')
  watchdog_s: float = option(
    1800.0,
    'Seconds after which a step counts as stuck: all processes end with their stack traces, and the stuck '
    'process is named; 0: off.',
    lo=0.0,
    hi=2_592_000.0,
  )
  timeline_steps: int = option(
    20, 'First steps whose phases, on host and devices, are written to WORKDIR/timeline for Perfetto.', lo=0
  )
  profile_from: int = option(
    0, 'First step of a profiler trace in WORKDIR/profile, for TensorBoard or Perfetto; 0: none.', lo=0
  )
  profile_steps: int = option(3, 'Steps of the trace from profile_from on.', lo=1)


@dataclasses.dataclass(frozen=True)
class Config:
  """One stage of a run, complete."""

  seed: int = option(0, 'Seed of initial weights, data order and sampling.', lo=0, hi=2**32 - 1)
  algorithm: str = option('sft', 'Method by name, pkg.module or ./file.py.')
  stages: tuple = option((), 'Names of blocks that override fields of this config, one per stage, in order.', each=str)
  init_from: str = option('', "Start from the weights of RUN[@step], stage:NAME or a model folder; '': model.path.")
  reward: Any = option(
    '', 'Built-in reward, pkg.module:fn, ./file.py:fn or reward_model; several as a tuple or separated by commas.'
  )
  reward_weights: tuple = option((), 'Weight of each reward; (): 1 each.', each=float)
  environment: str = option(
    '', './env.py:Class or pkg.module:Class of episodes with tools; its get_reward() is a reward; several by commas.'
  )
  train_on_rollouts: str = option(
    '',
    'Train on the rollouts that RUN kept (with log.rollouts_every=1) instead of sampling; '
    "with reward '' on its rewards, too.",
  )
  model: ModelSection = ModelSection()
  data: DataSection = DataSection()
  train: TrainSection = TrainSection()
  router: RouterSection = RouterSection()
  lora: LoraSection = LoraSection()
  optim: OptimSection = OptimSection()
  rollout: rl_sections.RolloutSection = rl_sections.RolloutSection()
  nll: methods.NllSection = methods.NllSection()
  preference: methods.PreferenceSection = methods.PreferenceSection()
  reference: rl_sections.ReferenceSection = rl_sections.ReferenceSection()
  reward_model: methods.RewardModelSection = methods.RewardModelSection()
  distill: methods.DistillSection = methods.DistillSection()
  rl: rl_sections.RlSection = rl_sections.RlSection()
  critic: rl_sections.CriticSection = rl_sections.CriticSection()
  rewards: rl_sections.RewardSection = rl_sections.RewardSection()
  tools: rl_sections.ToolsSection = rl_sections.ToolsSection()
  mesh: MeshSection = MeshSection()
  eval: EvalSection = EvalSection()
  save: SaveSection = SaveSection()
  log: LogSection = LogSection()
  # Free fields for custom algorithms; nothing in this library reads them.
  user: dict = dataclasses.field(default_factory=dict)

  def rewards_tuple(self) -> tuple:
    """Returns the reward functions as a tuple."""
    if isinstance(self.reward, str):
      return tuple(r.strip() for r in self.reward.split(',') if r.strip())
    return tuple(self.reward) if isinstance(self.reward, (tuple, list)) else (self.reward,)
