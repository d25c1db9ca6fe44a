"""Config sections of on-policy methods: sampling, RL, critic, rewards, environments. The config is in `schema.py`."""

import dataclasses

from jaxpost.stage.schema_methods import option


@dataclasses.dataclass(frozen=True)
class RolloutSection:
  """How completions are sampled for on-policy methods."""

  prompts: int = option(8, 'Prompts in a step.', lo=1, hi=2**20)
  group_size: int = option(8, 'Completions sampled for each prompt.', lo=1, hi=2**16)
  max_prompt_length: int = option(512, 'Tokens of the longest prompt; longer ones are dropped.', lo=1, hi=2**24)
  max_new_tokens: int = option(128, 'Tokens of the longest completion, including its stop token.', lo=1, hi=2**24)
  temperature: float = option(1.0, 'Temperature of sampling, and of log-probs in policy gradients.', lo=1e-3)
  top_k: int = option(0, 'Sample from this many most probable tokens only; 0: off.', lo=0)
  top_p: float = option(1.0, 'Sample from the most probable tokens of this total probability; 1: off.', lo=1e-6, hi=1.0)
  min_p: float = option(
    0.0, 'Sample only tokens with this fraction of the probability of the most probable one; 0: off.', lo=0.0, hi=1.0
  )
  forbidden_ids: tuple = option((), 'Token ids that are never sampled.', each=int)
  stop_strings: tuple = option((), 'Strings that end a completion, in addition to the stop tokens.', each=str)
  min_new_tokens: int = option(0, 'Tokens before the first stop token or stop string is allowed.', lo=0, hi=2**24)
  top_logprobs: int = option(0, 'Most probable tokens a position with log-probs in samples/; 0: none.', lo=0)
  slots: int = option(0, 'Sequences decoded at a time; 0: all, up to 512, or what fits.', lo=0, hi=2**20)
  page_size: int = option(
    0,
    'Tokens in a page of the key-value cache, a power of two; 0: no pages, each slot fits the longest text.',
    lo=0,
    hi=2**24,
  )
  cache_tokens: int = option(0, 'Tokens in all pages together; 0: half of what the slots need without pages.', lo=0)
  block: int = option(0, 'Tokens decoded in each slot per dispatch; 0: 8 on CPU, 32 elsewhere.', lo=0, hi=2**16)
  speculation: str = option(
    '',
    'Draft tokens from what samples of the same prompt have drawn (ngram), and draw those that are right in one pass; '
    "'': one token at a time. Either way the same tokens are drawn.",
    choices=('', 'ngram'),
  )
  staleness: int = option(
    0,
    'Steps that sampling may run ahead of training; 1: samples during the last update, '
    '2: also while the rollout before is graded and scored.',
    lo=0,
    hi=1000,
  )
  inflight_update_blocks: int = option(0, 'Blocks after which a rollout takes newer weights; 0: it takes none.', lo=0)
  share_base: bool = option(False, 'Sample from the frozen base weights of training, not a copy: less memory, slower.')
  weights: str = option('', "Type of the sampler's layer weights; '': model.dtype.", choices=('', 'int8', 'float8'))
  cache: str = option('', "Type of cached keys and values; '': model.dtype.", choices=('', 'int8', 'float8'))
  offload: bool = option(False, 'Keep optimizer, critic and reference on the host while sampling; automatic if needed.')


@dataclasses.dataclass(frozen=True)
class RlSection:
  """Policy gradients: advantages, surrogate loss, KL penalty, corrections of the sampler."""

  advantage: str = option(
    '',
    "How rewards become advantages; '': the method's own.",
    auto='group',
    choices=(
      *('', 'group', 'leave_one_out', 'reinforce_pp', 'reinforce_pp_baseline', 'remax', 'gae', 'best_of_n'),
      *('opo', 'gpg', 'maxrl', 'pass_at_k', 'best_minus_second', 'gdpo', 'mt_grpo', 'gigpo'),
    ),
  )
  scale_rewards: str = option(
    '',
    'Samples whose standard deviation divides the advantages: of the group or the batch, or the others of the group '
    "(leave_one_out); '': the method's own.",
    auto='group',
    choices=('', 'group', 'batch', 'none', 'leave_one_out'),
  )
  std_eps: float = option(1e-6, 'Constant added to the standard deviation of scale_rewards.', lo=0.0)
  singleton: str = option(
    'zero', 'Advantage in a group with one valid sample: zero, or the raw reward.', choices=('zero', 'raw')
  )
  loss: str = option(
    '',
    "Surrogate loss; '': the method's own.",
    auto='clip',
    choices=('', 'clip', 'cispo', 'sapo', 'gspo', 'geo_mean', 'reinforce', 'vespo', 'dro', 'dppo_tv', 'dppo_kl'),
  )
  old_policy: str = option(
    '',
    'The policy that ratios are taken to: recomputed with the weights before the update, or the sampler itself, '
    "which saves a scoring pass; '': the method's own.",
    auto='recomputed',
    choices=('', 'recomputed', 'sampler'),
  )
  clip_low: float = option(
    -1.0, "Ratios are clipped below 1 - clip_low; a divergence with dppo; -1: the loss's own.", lo=-1.0, auto=0.2
  )
  clip_high: float = option(
    -1.0, "Ratios are clipped above 1 + clip_high; a divergence with dppo; -1: the loss's own.", lo=-1.0, auto=0.2
  )
  dual_clip: float = option(
    0.0, 'Ratio above 1 at which the loss of negative advantages is bounded (dual-clip PPO); 0: off.', lo=0.0
  )
  tau_pos: float = option(1.0, 'Temperature of the gate of SAPO for positive advantages.', lo=1e-6)
  tau_neg: float = option(1.05, 'Temperature of the gate of SAPO for negative advantages.', lo=1e-6)
  dro_beta: float = option(0.1, 'Weight of the squared log-ratio to the old policy in DRO.', lo=0.0)
  aggregate: str = option(
    '',
    "Loss of a batch: mean over tokens, mean over sequences, or sum over a constant length; '': the method's own.",
    auto='token',
    choices=('', 'token', 'sequence', 'constant'),
  )
  reference: str = option('', "Teacher of opd, as init_from; '': the policy as the stage begins.")
  privileged: str = option(
    '', 'Column with a prompt that tells the teacher of opd more than the student sees (self-distillation).'
  )
  kl_coef: float = option(
    -1.0, "Weight of the KL divergence from the reference model; -1: the method's own.", lo=-1.0, auto=0.0
  )
  kl_estimator: str = option(
    '',
    'Estimator of the KL; reward and advantage take k1 only, which in a loss has no gradient on average; k1+ and k3+: '
    "the value of k1 or k3 with the gradient of k2; '': the method's own.",
    auto='k3',
    choices=('', 'k1', 'k2', 'k3', 'abs', 'k1+', 'k3+'),
  )
  kl_in: str = option(
    '',
    "Add the KL to the loss, to the reward, or token by token to the advantage; '': the method's own.",
    auto='loss',
    choices=('', 'loss', 'reward', 'advantage'),
  )
  kl_weighted: bool = option(
    False, 'Weight the KL in the loss by policy / old policy (DeepSeek-V3.2): its gradient is exact off policy, too.'
  )
  kl_target: float = option(0.0, 'KL that an adaptive kl_coef (kl_in=reward) aims at; 0: kl_coef is fixed.', lo=0.0)
  kl_horizon: float = option(10_000.0, 'Samples over which an adaptive kl_coef changes.', lo=1.0)
  entropy_coef: float = option(0.0, 'Weight of the entropy bonus.', lo=0.0)
  entropy_target: float = option(
    0.0, 'Entropy at or below which the bonus counts, with a coefficient that adapts (Skywork-OR1); 0: fixed.', lo=0.0
  )
  entropy_step: float = option(0.005, 'Change of the adaptive entropy_coef in a step.', lo=0.0)
  top_entropy: float = option(
    1.0, 'Fraction of tokens, those of the largest entropy, whose gradient is kept; 0.2 is usual.', lo=1e-6, hi=1.0
  )
  clip_cov: float = option(
    0.0,
    'Fraction of tokens that lose their gradient, drawn where cov_low < covariance < cov_high; 2e-4 is usual.',
    lo=0.0,
    hi=1.0,
  )
  cov_low: float = option(1.0, 'Smallest covariance of log-prob and advantage that clip_cov drops.', lo=0.0)
  cov_high: float = option(5.0, 'Largest covariance that clip_cov drops.', lo=0.0)
  kl_cov: float = option(
    0.0,
    'Fraction of tokens, those of the largest covariance, with a KL to the old policy; 2e-3 is usual.',
    lo=0.0,
    hi=1.0,
  )
  kl_cov_coef: float = option(1.0, 'Weight of the KL of the tokens that kl_cov chooses.', lo=0.0)
  correct_nll_coef: float = option(
    -1.0,
    "Weight of the cross entropy of completions with at least keep_reward; 0: off, -1: the method's own.",
    lo=-1.0,
    auto=0.0,
  )
  expert: bool = option(False, 'Put the completion of the data in the place of the last sample of each group (LUFFY).')
  expert_gamma: float = option(
    0.1, 'With expert, tokens of the data of probability p learn by p / (p + expert_gamma), not the surrogate.', lo=1e-6
  )
  epochs: int = option(1, 'Passes over a rollout.', lo=1, hi=10**6)
  minibatches: int = option(1, 'Updates in a pass over a rollout.', lo=1, hi=10**6)
  gamma: float = option(1.0, 'Discount of rewards per token.', lo=0.0, hi=1.0)
  lam: float = option(0.95, 'Lambda of generalized advantage estimation (GAE).', lo=0.0, hi=1.0)
  length_alpha: float = option(
    -1.0,
    "Lambda of the policy is max(0, 1 - 1 / (length_alpha x length of a completion)); 0: off, -1: the method's own.",
    lo=-1.0,
    auto=0.0,
  )
  turn_gamma: float = option(
    -1.0, "Discount of rewards per turn, with mt_grpo and gigpo; -1: the method's own.", lo=-1.0, hi=1.0, auto=1.0
  )
  step_weight: float = option(1.0, 'Weight of the advantage of a turn within its state, with gigpo.', lo=0.0)
  pass_k: int = option(4, "Samples of which one has to pass, with the advantage 'pass_at_k'.", lo=1, hi=2**16)
  correct_by: str = option(
    '', "Name of the reward that decides what is correct (rewards.md); '': the first function, or the only reward."
  )
  keep_reward: float = option(1.0, 'Value of correct_by from which rft trains on a completion.')
  dynamic_sampling: int = option(
    -1,
    "Rounds of sampling at most until correct_by differs in every group (DAPO); 0: off, -1: the method's own.",
    lo=-1,
    auto=0,
  )
  keep_surplus: int = option(
    0, 'Steps for which surplus groups of dynamic sampling are kept for training; 0: they are dropped.', lo=0, hi=1000
  )
  replay: int = option(
    0,
    'Steps for which a right sample of the policy is kept, to be the last one of a later group of wrong samples of its '
    'prompt; 0: off.',
    lo=0,
    hi=10**6,
  )
  curriculum: str = option(
    '',
    'Which prompts are drawn again: those that were not all right when last sampled (retire), or each with the '
    "probability that it was wrong (prioritized); '': all.",
    choices=('', 'retire', 'prioritized'),
  )
  sources: tuple = option(
    (),
    'Of each source of data.path, NAME?rewards=a+b&top_p=0.9: the rewards that grade its prompts, the teachers of opd '
    '(all unless given), its environment, temperature, max_new_tokens, min_new_tokens, top_k, top_p and min_p; (): all '
    'alike.',
    each=str,
  )
  mask_truncated: bool = option(False, 'Do not train on completions cut off at the length limit (overlong filtering).')
  importance: tuple = option(
    ('auto',),
    'Corrections for the difference between sampler and policy: token_truncated, sequence_truncated, icepop, '
    'token_mask, sequence_mask, product_mask, token_k2, token_k3, sequence_k2, sequence_k3, opsm. '
    "(): none; ('auto',): token_truncated if old_policy is recomputed and samples may be older (rollout.staleness, "
    'keep_surplus, replay) or the sampler computes in 8 bits (rollout.weights, rollout.cache).',
    each=str,
    auto=(),
  )
  sampling_mask: bool = option(
    False,
    'Renormalize log-probs over the tokens that sampling could draw (keep sampling mask, DeepSeek-V3.2); '
    '4 bytes x rollout.top_k a token.',
  )
  importance_cap: float = option(2.0, 'Largest importance ratio of token_truncated and sequence_truncated.', lo=1.0)
  token_low: float = option(0.5, 'Smallest token ratio that icepop and token_mask keep.', lo=0.0)
  token_high: float = option(5.0, 'Largest token ratio that icepop and token_mask keep.', lo=0.0)
  sequence_low: float = option(0.99, 'Smallest geometric mean ratio of a sequence that sequence_mask keeps.', lo=0.0)
  sequence_high: float = option(1.01, 'Largest geometric mean ratio of a sequence that sequence_mask keeps.', lo=0.0)
  product_low: float = option(0.5, 'Smallest product of the ratios of a sequence that product_mask keeps.', lo=0.0)
  product_high: float = option(2.0, 'Largest product of the ratios of a sequence that product_mask keeps.', lo=0.0)
  reject_above: float = option(0.1, 'Largest k2 or k3 that token_k2, token_k3, sequence_k2, sequence_k3 keep.', lo=0.0)
  opsm_threshold: float = option(
    0.02, 'Mean of log(sampler / policy) above which opsm drops a sequence with a negative advantage.', lo=0.0
  )


@dataclasses.dataclass(frozen=True)
class CriticSection:
  """The value function of PPO."""

  path: str = option('', "Initial weights of the critic, as init_from; '': those of the policy.")
  lr: float = option(0.0, "Learning rate of the critic; 0: the method's own, or optim.lr.", lo=0.0, auto=0.0)
  value_head: bool = option(
    False, 'Use a second head of the policy, trained in its update, instead of a critic model; exports leave it out.'
  )
  lam: float = option(
    -1.0, "Lambda of the targets of the critic; -1: the method's own, or rl.lam.", lo=-1.0, hi=1.0, auto=-1.0
  )
  coef: float = option(0.1, 'Weight of the value loss in the update of the policy, with value_head.', lo=0.0)
  value_clip: float = option(0.2, 'Largest change of a value from the old one (clipped value loss); 0: off.', lo=0.0)
  warmup_steps: int = option(0, 'First steps that train the critic only.', lo=0)


@dataclasses.dataclass(frozen=True)
class ReferenceSection:
  """A reference model that follows the policy."""

  every: int = option(0, 'Updates after which the reference moves towards the policy; 0: it stays.', lo=0)
  mix: float = option(1.0, 'Share of the policy in the new reference; 1: a copy, less: an average.', lo=0.0, hi=1.0)
  reset_optimizer: bool = option(False, 'Reset the optimizer, but not its schedule, when the reference moves (ProRL).')


@dataclasses.dataclass(frozen=True)
class RewardSection:
  """The processes that call reward functions."""

  timeout_s: float = option(30.0, 'Seconds that one reward function may take for one group.', lo=0.01, hi=604_800.0)
  workers: int = option(2, 'Processes that call reward functions.', lo=1, hi=4096)
  max_failed: float = option(
    0.25,
    'The run stops if more than this fraction of the last 100 groups (at least 20) failed, or all of the first batch.',
    lo=0.0,
    hi=1.0,
  )
  env_vars: tuple = option(
    (),
    'Names of environment variables that reward functions see, besides PATH, HOME, the locale and the like.',
    each=str,
  )


@dataclasses.dataclass(frozen=True)
class ToolsSection:
  """Multi-turn episodes with an environment."""

  workers: int = option(
    0,
    'Environments at a time, one process each; 0: as many as sequences are decoded at a time, at most 64.',
    lo=0,
    hi=4096,
  )
  timeout_s: float = option(30.0, 'Seconds that one reset, tool call or get_reward may take.', lo=0.01, hi=604_800.0)
  env_vars: tuple = option(
    (), 'Names of environment variables that environments see, besides PATH, HOME, the locale and the like.', each=str
  )
  max_turns: int = option(8, 'Turns of the model in an episode.', lo=1, hi=10**6)
  max_result_tokens: int = option(256, "Tokens of a tool's result; the rest is cut off.", lo=1, hi=2**24)
  wait_blocks: int = option(
    4,
    'Blocks after a call at which its result is used, for runs that repeat bit for bit; '
    '0: results are used as they arrive.',
    lo=0,
    hi=10**6,
  )
