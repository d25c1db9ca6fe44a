"""The `Family` record: how the Hugging Face folders of one family differ from Llama's."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
  from collections.abc import Mapping


def _mapping() -> Any:
  return dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class ExpertFields:
  """Names of the fields of config.json that describe a mixture of experts.

  The number of experts per token is `num_experts_per_tok` in all families.
  """

  num: str  # number of routed experts
  size: str  # intermediate size of one expert
  normalize: bool | None = None  # the chosen weights sum to 1; None: `norm_topk_prob` says
  limit: str = ''  # clipping of SwiGLU, '' where the family has none
  alpha: str = ''  # slope of its gate


@dataclasses.dataclass(frozen=True)
class Family:
  """A family of decoders as data. Every field is a difference from Llama.

  The defaults are those of Llama itself, and of models with custom code.
  """

  architecture: str = ''  # its class in `transformers`, which an export names
  classifier: str = ''  # the class with a scalar head, where it is not called after `architecture`
  written_as: str = ''  # `model_type` of an export, where it is another family's

  # config.json -> ModelConfig.
  reads: tuple[str, ...] = ()  # fields that Llama lacks; config_fields.py and layer_fields.py read them
  defaults: Mapping[str, Any] = _mapping()  # values of fields that config.json may leave out
  fixed: Mapping[str, Any] = _mapping()  # ModelConfig fields that are the same for all its models
  aliases: Mapping[str, str] = _mapping()  # other spelling of a field -> the one that is read
  ignored: tuple[str, ...] = ()  # fields without effect
  reported: tuple[str, ...] = ()  # fields without effect here, named in a warning where they are set
  activation_field: str = 'hidden_act'
  activations: Mapping[str, str] = _mapping()  # value of that field -> ModelConfig.activation
  experts: ExpertFields | None = None
  latent: bool = False  # multi-head latent attention (models/mla.py)

  # Layers that differ. `window` is the rule for the layers that see `sliding_window`
  # tokens where no `layer_types` is given: 'all', 'upper' (from `max_window_layers`
  # on), 'no_rope' (those without rotary embeddings), or n: all but every n-th.
  window: str | int | None = None
  local_rope: str = ''  # field with the rope base of sliding-window layers, which is never scaled
  rope_types: Mapping[str, str] = _mapping()  # other names of rope types

  # Tensors.
  names: Mapping[str, str] = _mapping()  # Llama's module -> the family's; parameters of one name are its rows
  # Parameter -> (tensor, first, step): all experts are in one tensor, which is not
  # transposed, and the parameter is every `step`-th entry of its last dimension.
  fused: Mapping[str, tuple[str, int, int]] = _mapping()
  quantized: str = ''  # a `quant_method` that can be read
  extra_layers: bool = False  # folders may hold layers for multi-token prediction, which are not read
