"""Samples one completion of a run again from the same weights, and shows what the update learned from it.

Legend: N sequences, C completion tokens.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from etils import epath

from jaxpost import stages
from jaxpost.errors import InputError, NoCheckpointError
from jaxpost.monitor import display, start
from jaxpost.monitor.metrics import read_growing, short_number
from jaxpost.programs import score
from jaxpost.rl import batching
from jaxpost.rollout import rollout_files
from jaxpost.stage import assemble, place, prepare
from jaxpost.stage.schema import CHANGEABLE
from jaxpost.storage import object_store
from jaxpost.storage.checkpoint import Checkpointer
from jaxpost.storage.manifest import finished_steps
from jaxpost.tools import inference
from jaxpost.tools.working import working

if TYPE_CHECKING:
  from jaxpost.rl.controller import Controller
  from jaxpost.roles import Roles
  from jaxpost.stage.config import Config
  from jaxpost.types import Credit, Experience, Item

# Titles of the figures after the rewards, in order; those that a sample lacks are left out.
_FIGURES = {
  'error': 'Error of the reward',
  'advantage': 'Advantage',
  'loss': 'Loss of the sample',
  'loss_of_update': 'Loss of its update',
  'loss_share': 'Share of that loss',  # of absolute values, see `losses`
  'finished': 'Ended by itself',
  'version': 'Step of the weights',
}


def reproduce(
  run: epath.PathLike, step: int, row: int, stage: str = '', choose_mesh: Callable | None = None
) -> dict[str, Any]:
  """Samples `row` of a step again; returns it with what the update learned from it.

  Repeats the steps since the newest checkpoint before the step, or since the start of the stage, because a run is a
  function of its config. Where the config changed on a resume (`save.allow_changes`), a warning names the fields: all
  steps are repeated with the newest values. The folder of the run does not change. Relative paths in the config are
  resolved as by `inference.where_started`.

  Args:
    step: from 1, as in samples/STAGE/STEP.jsonl.
    row: from 0, the line of the sample there.
    stage: '' is the last one.
    choose_mesh: see `stages.run`.

  Returns:
    A JSON-able dict; 'identical' is True if tokens and log-probs equal those that the run has stored, bit for bit, and
    None if it has stored none of this step.
  """
  run = epath.Path(object_store.resolved(epath.Path(run).expanduser()))
  configs = inference.run_config(run)
  for field in changed_fields(read_growing(run / start.FILE)):
    logging.warning('config.%s changed when the run was resumed; all steps are repeated with its newest value', field)
  with inference.where_started(run):
    return _reproduce(run, configs, step, row, stage, choose_mesh=choose_mesh)


def changed_fields(starts: Sequence[Mapping[str, Any]]) -> list[str]:
  """Returns the fields of `save.allow_changes` in which the starts of a run differ."""

  def of_stages(facts: Mapping[str, Any], field: str) -> dict[str, Any]:
    return {stage: fields.get(field) for stage, fields in facts.get('changes', {}).items()}

  return [field for field in CHANGEABLE if any(of_stages(s, field) != of_stages(starts[0], field) for s in starts)]


def _reproduce(
  run: epath.Path, configs: dict[str, Config], step: int, row: int, stage: str, choose_mesh: Callable | None
) -> dict[str, Any]:
  """Does the work of `reproduce` in the folder where the run was started."""
  name, config = inference.pick(configs, stage, run)
  if not 1 <= step <= config.train.steps:
    raise InputError(f'--step: {step} is none of the {config.train.steps} steps of {name}')
  raw = json.loads((run / 'config.json').read_text())
  with working('reading data and the headers of weights'):
    prepared = prepare.prepare_all(raw)
  try:
    prepared = stages.with_meshes(prepared, choose_mesh)
    p = next(p for p in prepared if p.name == name)
    if not p.inputs.algorithm.on_policy:
      raise InputError(f'{run}: {name} ({config.algorithm}) samples nothing; name another --stage')
    samples = p.config.rollout.prompts * p.config.rollout.group_size
    if not 0 <= row < samples:
      raise InputError(f'--row: {row} is none of the {samples} samples of a step')
    placed = place.place_stage(p)
    placed.ledger.announce = working.compiling
    with working('loading the newest checkpoint before the step'):
      return _sample_again(placed, run, step, row)
  finally:
    for p in prepared:
      p.close()


def _sample_again(placed: place.PlacedStage, run: epath.Path, step: int, row: int) -> dict[str, Any]:
  """Returns `row` of a step, which is sampled after the steps since the newest checkpoint have been repeated."""
  name = placed.name
  roles, stream, _ = assemble.make_parts(placed, stages.initial_params(placed, run), run)
  for repeated in range(restore(run, name, step - 1, roles, stream) + 1, step):
    working.note(f'repeating step {repeated} before step {step}')
    for role, batch in next(stream).updates:
      roles.trainable[role].update(batch)
  working.note(f'sampling step {step}')
  item = next(stream)
  working.note('computing the losses of the step')
  return explain(placed, roles, stream, item, row) | dict(
    stage=name, step=step, row=row, identical=compare(run, name, step, row, item)
  )


def restore(run: epath.Path, name: str, most: int, roles: Roles, stream: Controller) -> int:
  """Restores the newest good checkpoint of at most `most` steps; returns its step, or 0 if there is none."""
  folder = run / 'checkpoints' / name
  steps = [s for s in finished_steps(folder) if s <= most]
  template = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
    {k: role.state for k, role in roles.trainable.items()},
  )
  with contextlib.closing(Checkpointer(folder)) as checkpointer:
    for step in steps:
      try:
        _, states, meta = checkpointer.restore(template, step)
      except NoCheckpointError as error:  # damaged; older ones lead to the same step
        logging.warning('%s', error)
        continue
      for key, role in roles.trainable.items():
        role.state = states[key]
      stream.restore(meta['stream'])
      return step
  return 0


def compare(run: epath.Path, name: str, step: int, row: int, item: Item) -> bool | None:
  """Returns True if the sample equals the one that the run has stored; None if it has stored none."""
  assert item.experience is not None and item.samples is not None  # the step samples
  again = item.experience.rollout
  length = again.lengths[row]
  path = run / 'rollouts' / name / f'{step}.npz'
  if path.exists():
    stored, _ = rollout_files.load(path)
    return bool(
      stored.lengths[row] == length
      and np.array_equal(again.completions[row, :length], stored.completions[row, :length])
      and np.array_equal(again.logprobs[row, :length], stored.logprobs[row, :length])
    )
  path = run / 'samples' / name / f'{step}.jsonl'
  if not path.exists():
    return None
  trained = [r for r in read_growing(path) if r['split'] == 'train']
  if row >= len(trained):  # the file has only samples of an evaluation
    return None
  sample = item.samples()[row]
  return all(trained[row][k] == sample[k] for k in ('prompt', 'completion', 'length', 'logprob'))


def explain(placed: place.PlacedStage, roles: Roles, controller: Controller, item: Item, row: int) -> dict[str, Any]:
  """Returns prompt, tokens, rewards, advantage and loss of a sample."""
  experience = item.experience
  credit = item.credit
  assert experience is not None and credit is not None and item.samples is not None  # the step samples
  rollout = experience.rollout
  length = rollout.lengths[row]
  shown = item.samples()[row]
  group_size = rollout.group_size
  prompt = rollout.prompts[row // group_size]
  ids = rollout.completions[row, :length].tolist()
  advantages = credit.arrays.get('advantages', np.zeros_like(credit.mask))
  trained = credit.mask[row] > 0
  decode = functools.partial(placed.inputs.tokenizer.decode, skip_special=False)

  def per_token(values: np.ndarray) -> list[float]:
    return [float(v) for v in values[row, :length]]

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
    **losses(placed, roles, controller, experience=experience, credit=credit, row=row),
  )


def losses(
  placed: place.PlacedStage, roles: Roles, controller: Controller, experience: Experience, credit: Credit, row: int
) -> dict[str, float | None]:
  """Returns the sample's part of the loss of the first update that it is in, with the weights before the step.

  'loss_share' is |loss| of the sample / (|loss| of samples with positive advantage + |loss| of the others).
  """
  config, algorithm = placed.config, placed.algorithm
  if algorithm.pack:  # such methods train on pairs of samples
    return dict(loss=None, loss_of_update=None, loss_share=None)
  members = next(m for m in batching.minibatches(len(credit.mask), config.rl, config.seed, experience.step) if row in m)
  weights = np.zeros_like(credit.mask)
  weights[members] = batching.token_weights(credit.mask[members], config.rl.aggregate, config.rollout.max_new_tokens)
  evaluate = score.make_evaluate(placed.model, placed.objectives['policy'], placed.train, placed.compute, placed.ledger)
  policy = roles.policy

  def loss(kept: np.ndarray) -> float:
    """Returns the loss of the update with the weights of all other samples set to 0."""
    batch = policy.place(
      batching.to_batch(experience.rollout, members, weights * kept[:, None], credit.arrays, controller.update_shape)
    )
    metrics = evaluate(policy.state.params, algorithm.prepare(batch, roles, config), policy.state.step, policy.frozen)
    return float(metrics['loss'])

  positive = (credit.arrays.get('advantages', weights) * credit.mask).sum(1) > 0
  sample_loss = loss(np.arange(len(weights)) == row)
  positive_loss = loss(positive)
  other_loss = loss(~positive)
  total = abs(positive_loss) + abs(other_loss)
  share = abs(sample_loss) / total if total else 0.0
  return dict(loss=sample_loss, loss_of_update=positive_loss + other_loss, loss_share=share)


def figures(sample: dict[str, Any]) -> dict[str, str]:
  """Returns {title: text} of the rewards of a sample of `reproduce`, and of what the update learned from it."""
  values = {'Reward': sample['reward']}
  values |= {display.title(f'rewards/{name}/mean'): value for name, value in sample['components'].items()}
  values |= {title: sample[key] for key, title in _FIGURES.items() if sample[key] is not None}
  for title, value in values.items():
    if isinstance(value, bool):
      values[title] = 'yes' if value else 'no'
    elif not isinstance(value, str):
      values[title] = short_number(value)
  return values
