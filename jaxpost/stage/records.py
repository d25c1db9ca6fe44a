"""The records between a config and the training loop.

Each is frozen. In the order in which they are made:

    Source         `prepare.find_weights`  where the weights of a role are, and the shape of its model
    Inputs         `prepare.make_inputs`   config, algorithm, tokenizer, model, where weights are
    Data           `prepare.make_data`     rows, stream, first batch, held-out data
    Workers        `prepare.prepare`       processes of reward functions and environments
    PreparedStage  `prepare.prepare`       Inputs, Data and Workers of a stage
    PlacedStage    `place.place_stage`     a PreparedStage on a mesh: layouts, batch shape, ledger
    loop.Stage     `assemble.assemble`     roles, stream, evaluator, checkpoints

Plans, inference and benchmarks use the same records and replace parts of them: a plan has the shapes of the weights
and not the weights, a benchmark has random rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from etils import epath

if TYPE_CHECKING:
  from jaxpost.algorithms.base import Algorithm
  from jaxpost.data.examples import Documents
  from jaxpost.data.loader import PackedStream
  from jaxpost.data.prompts import PromptStream
  from jaxpost.data.sources import Rows
  from jaxpost.data.tokenizer import Tokenizer
  from jaxpost.environments.by_source import PoolsBySource
  from jaxpost.environments.pool import EnvironmentPool
  from jaxpost.models.config import ModelConfig
  from jaxpost.models.model import Model
  from jaxpost.programs.compile import TooLargeError
  from jaxpost.rewards.pool import RewardPool
  from jaxpost.stage.config import Config
  from jaxpost.stage.place import PlacedStage
  from jaxpost.stage.schema import ModelSection
  from jaxpost.types import Batch, Prompt


@dataclasses.dataclass(frozen=True)
class Source:
  """The origin of the weights of a model, which are random if `folder`, `checkpoints` and `stage` are all empty.

  Attributes:
    config: shape of the model.
    folder: holds safetensors files.
    checkpoints: folder of the checkpoints of a stage of another run.
    stage: name of an earlier stage of this run.
    step: of the checkpoint; None for the newest.
    seed: of random weights; None for the seed of the run.
    name: how an export refers to the folder, such as org/name.
    base: source of the parameters that this one lacks, such as the base model of an adapter.
  """

  config: ModelConfig
  folder: epath.Path | None = None
  checkpoints: epath.Path | None = None
  stage: str = ''
  step: int | None = None
  seed: int | None = None
  name: str = ''
  base: Source | None = None

  def checkpoints_in(self, workdir: epath.PathLike | None) -> epath.Path | None:
    """Returns the folder of the checkpoints with the weights, for a run in `workdir`; None if they are elsewhere."""
    return epath.Path(workdir) / 'checkpoints' / self.stage if self.stage else self.checkpoints

  def tokenizer_path(self, section: ModelSection) -> str:
    """Returns where the tokenizer is read from; '' if the config names none, which means the tokenizer 'bytes'.

    An adapter without a tokenizer has that of its base model.
    """
    if self.base and not (self.folder and (self.folder / 'tokenizer.json').exists()):
      return self.base.tokenizer_path(section)
    return section.tokenizer or str(self.folder or '')


@dataclasses.dataclass(frozen=True)
class Inputs:
  """A stage before its data is read.

  config: with the defaults of the algorithm filled in.
  sources: {role: Source}; 'policy' is always there.
  model: the decoder with the heads and adapters that the stage trains.
  """

  name: str
  config: Config
  algorithm: Algorithm
  sources: dict[str, Source]
  model: Model
  tokenizer: Tokenizer

  @property
  def outcome(self) -> Source:
    """The weights that the stage ends with."""
    return Source(
      self.model.config,
      stage=self.name,
      step=self.config.train.steps,
      seed=self.config.seed,
      base=self.sources['policy'] if self.model.frozen else None,
    )


@dataclasses.dataclass(frozen=True)
class HeldOutData:
  """Data that the stage is evaluated on.

  documents: for the held-out loss; None for an on-policy algorithm.
  prompts: their completions are sampled and graded; () if evaluation samples nothing.
  """

  rows: Rows
  documents: Documents | None = None
  prompts: tuple[Prompt, ...] = ()


@dataclasses.dataclass(frozen=True)
class Data:
  """The data of a stage, checked.

  stream: None if nothing is trained (`launch.evaluate`); a plan has `testing.RandomPrompts`.
  documents, first_batch: None for an on-policy algorithm, which learns from completions. All batches have the fields
    of `first_batch`.
  checksum: of the rows, see `sources.digest`; '' if nothing is trained.
  """

  rows: Rows | None = None
  stream: PackedStream | PromptStream | None = None
  documents: Documents | None = None
  first_batch: Batch | None = None
  held_out: HeldOutData | None = None
  checksum: str = ''


@dataclasses.dataclass(frozen=True)
class Workers:
  """Processes that run the user's functions; None if the stage has none."""

  rewards: RewardPool | None = None
  environment: EnvironmentPool | PoolsBySource | None = None

  def close(self) -> None:
    """Ends the processes."""
    if self.rewards:
      self.rewards.close()
    if self.environment:
      self.environment.close()


@dataclasses.dataclass(frozen=True)
class PreparedStage:
  """Everything about a stage that needs no device.

  by_memory: {'section.field': reason} of the config fields that were left open and then chosen to fit device memory.
  memory_scale: memory by XLA / by arithmetic, of an update and of sampling, where a program was too large by XLA.
  choose_smaller: (the placed stage, error) -> one with smaller settings of fields that were left open; raises
    InputError if there are none. None: a program that is too large ends the run.
  """

  inputs: Inputs
  data: Data = Data()
  workers: Workers = Workers()
  by_memory: Mapping[str, str] = dataclasses.field(default_factory=dict)
  memory_scale: tuple[float, float] = (1.0, 1.0)
  choose_smaller: Callable[[PlacedStage, TooLargeError], PlacedStage] | None = None

  @property
  def name(self) -> str:
    """The stage's name in the config."""
    return self.inputs.name

  @property
  def config(self) -> Config:
    """The stage's config, resolved."""
    return self.inputs.config

  @property
  def has_branches(self) -> bool:
    """True if packed documents are trees, with several branches after a shared prompt."""
    if self.data.first_batch is not None:
      return self.data.first_batch.branch_ids is not None
    return self.config.train.share_prompt or bool(self.inputs.algorithm.pack) and self.config.preference.share_prompt

  def close(self) -> None:
    """Ends the worker processes."""
    self.workers.close()
