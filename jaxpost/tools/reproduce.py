"""One sample of a run again: drawn anew from the same weights, and explained.

Legend: N sequences, C completion tokens.
"""

import contextlib
import json

import jax
import numpy as np
from etils import epath

from jaxpost import stages
from jaxpost.errors import InputError
from jaxpost.monitor.metrics import json_lines
from jaxpost.programs import train as programs
from jaxpost.rl import batching
from jaxpost.rollout import rollout_files
from jaxpost.stage import assemble, place, prepare
from jaxpost.storage.checkpoint import Checkpointer
from jaxpost.storage.manifest import finished_steps
from jaxpost.tools import inference


def reproduce(run, step: int, row: int, stage='', choose_mesh=None) -> dict:
  """Samples `row` of a step again; returns it with what the update learned from it.

  It goes from the newest checkpoint before the step, or from the start of the
  stage, through the steps between: a run is a function of its config. Nothing
  in the folder of the run changes.

  Args:
    run: folder of the run.
    step: from 1, as in samples/STAGE/STEP.jsonl; row: from 0, its line there.
    stage: '' is the last one.
    choose_mesh: see `stages.run`.

  Returns:
    JSON-able; `identical` says whether tokens and log-probs are, to the last
    bit, those that the run has kept (None: it has kept none of this step).
  """
  run = epath.Path(run).expanduser()
  configs = inference.run_config(run)
  name, config = inference.pick(configs, stage, run)
  if not 1 <= step <= config.train.steps:
    raise InputError(f'--step: {step} is none of the {config.train.steps} steps of {name}')
  raw = json.loads((run / 'config.json').read_text())
  prepared = prepare.prepare_all(raw)
  try:
    prepared = stages.with_meshes(prepared, raw, choose_mesh)
    p = next(p for p in prepared if p.name == name)
    if not p.inputs.algorithm.on_policy:
      raise InputError(f'{run}: {name} ({config.algorithm}) samples nothing; name another --stage')
    placed = place.place_stage(p)
    roles, stream, _ = assemble.make_parts(placed, stages.initial_params(placed, run), run)
    for _ in range(restore(run, name, step - 1, roles, stream), step - 1):
      for role, batch in next(stream).updates:
        roles.trainable[role].update(batch)
    item = next(stream)
    if not 0 <= row < len(item.credit.mask):
      raise InputError(f'--row: {row} is none of the {len(item.credit.mask)} samples of a step')
    return explain(placed, roles, stream, item, row) | dict(
      stage=name, step=step, row=row, identical=compare(run, name, step, row, item)
    )
  finally:
    for p in prepared:
      p.close()


def restore(run, name: str, most: int, roles, stream) -> int:
  """The newest checkpoint of at most `most` steps, if any; its step."""
  folder = run / 'checkpoints' / name
  steps = [s for s in finished_steps(folder) if s <= most]
  if not steps:
    return 0
  template = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
    {k: role.state for k, role in roles.trainable.items()},
  )
  with contextlib.closing(Checkpointer(folder)) as checkpointer:
    step, states, meta = checkpointer.restore(template, steps[0])
  for key, role in roles.trainable.items():
    role.state = states[key]
  stream.restore(meta['stream'])
  return step


def compare(run, name: str, step: int, row: int, item) -> bool | None:
  """True if the sample equals the one that the run has kept; None if it kept none."""
  ours = item.experience.rollout
  length = ours.lengths[row]
  path = run / 'rollouts' / name / f'{step}.npz'
  if path.exists():
    theirs, _ = rollout_files.load(path)
    same = lambda x: np.array_equal(vars(ours)[x][row, :length], vars(theirs)[x][row, :length])
    return bool(theirs.lengths[row] == length and same('completions') and same('logprobs'))
  path = run / 'samples' / name / f'{step}.jsonl'
  if not path.exists():
    return None
  kept = json_lines(path)
  theirs = [r for r in kept if r['split'] == 'train'][row]
  return all(theirs[k] == item.samples()[row][k] for k in ('prompt', 'completion', 'length', 'logprob'))


def explain(placed: place.PlacedStage, roles, controller, item, row: int) -> dict:
  """Prompt, tokens, rewards, advantage and loss of a sample."""
  experience, credit = item.experience, item.credit
  rollout, length = experience.rollout, experience.rollout.lengths[row]
  shown, group = item.samples()[row], len(rollout.lengths) // experience.groups
  prompt = rollout.prompts[row // group]
  ids = rollout.completions[row, :length].tolist()
  advantages = credit.arrays.get('advantages', np.zeros_like(credit.mask))
  trained = credit.mask[row] > 0
  per_token = lambda x: [float(v) for v in x[row, :length]]
  decode = lambda x: placed.inputs.tokenizer.decode(x, skip_special=False)
  return dict(
    prompt=decode(prompt.tokens),
    prompt_ids=prompt.tokens.tolist(),
    columns=prompt.columns,
    completion=decode(ids),
    ids=ids,
    texts=[decode([i]) for i in ids],
    logprobs=per_token(rollout.logprobs),
    trained=trained[:length].tolist(),
    advantages=per_token(advantages),
    reward=shown['reward'],
    components=shown['components'],
    error=shown.get('error'),
    finished=shown['finished'],
    version=rollout.version,
    advantage=float(advantages[row][trained].mean()) if trained.any() else 0.0,
    **losses(placed, roles, controller, experience, credit, row),
  )


def losses(placed: place.PlacedStage, roles, controller, experience, credit, row: int) -> dict:
  """The sample's part of the loss of the first update that it is in.

  Computed with the weights before the step. 'loss_share' is by size: of
  |loss| of the samples that gained plus |loss| of those that lost.
  """
  config, algorithm = placed.config, placed.algorithm
  if algorithm.pack:  # trains on pairs of samples
    return dict(loss=None, loss_of_update=None, loss_share=None)
  members = next(m for m in batching.minibatches(len(credit.mask), config.rl, config.seed, experience.step) if row in m)
  weights = np.zeros_like(credit.mask)
  weights[members] = batching.token_weights(credit.mask[members], config.rl.aggregate, config.rollout.max_new_tokens)
  evaluate = programs.make_evaluate(
    placed.model, placed.objectives['policy'], placed.train, placed.compute, placed.ledger
  )
  policy = roles.policy

  def loss(kept):
    batch = policy.place(
      batching.to_batch(experience.rollout, members, weights * kept[:, None], credit.arrays, *controller.update_shape)
    )
    found = evaluate(policy.state.params, algorithm.prepare(batch, roles, config), policy.state.step, policy.frozen)
    return float(found['loss'])

  gained = (credit.arrays.get('advantages', weights) * credit.mask).sum(1) > 0
  own = loss(np.arange(len(weights)) == row)
  parts = loss(gained), loss(~gained)
  size = sum(map(abs, parts))
  return dict(loss=own, loss_of_update=sum(parts), loss_share=abs(own) / size if size else 0.0)
