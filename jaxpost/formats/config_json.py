"""config.json -> ModelConfig, for every family in `families.FAMILIES`; `config_export` writes it.

`config_fields` reads the fields that are equal for all layers, `layer_fields` those that differ by layer (rotary
embeddings, sliding windows), and the modules that `families.own_fields` returns those of layers that Llama lacks.
"""

from typing import Any

from jaxpost.errors import InputError
from jaxpost.formats import config_fields, families, layer_fields
from jaxpost.formats.family import Family
from jaxpost.models.config import ModelConfig

# Fields that any config.json may leave out.
_DEFAULTS = dict(
  rope_theta=10_000.0, tie_word_embeddings=False, rms_norm_eps=1e-6, hidden_act='silu', max_position_embeddings=2048
)


def from_hf(raw: dict[str, Any], where: str, text_only: bool = False) -> tuple[ModelConfig, list[str]]:
  """Reads a config.json as (ModelConfig, names of fields that have no effect here).

  InputError for values that are impossible, missing or not implemented. `text_only`: of a multimodal model, reads the
  text model.
  """
  if parts := config_fields.other_parts(raw):
    if not text_only:
      raise InputError(
        f'{where}: {parts[0]} of model_type {raw.get("model_type")!r} is not supported; set '
        'config.model.text_only=True to train its text model; an export keeps the other parts unchanged'
      )
    from jaxpost.formats import multimodal

    raw = multimodal.text_config(raw)
  name: Any = raw.get('model_type')
  family = families.find(name, where)
  raw = _renamed(raw, family, where)
  try:
    return _read(raw, family, family.written_as or name, where)
  except InputError:
    raise
  except KeyError as e:
    raise InputError(f'{where}: field {e.args[0]!r} is missing') from None
  except (AttributeError, OverflowError, TypeError, ValueError) as e:
    raise InputError(f'{where}: a field has a value of the wrong type: {e}') from e


def _renamed(raw: dict, family: Family, where: str) -> dict[str, Any]:
  """Returns the fields by the names that are read; InputError for two names of one field with different values."""
  out: dict[str, Any] = {}
  for name, value in raw.items():
    field = family.aliases.get(name, name)
    if out.setdefault(field, value) != value:
      other = next(k for k in raw if family.aliases.get(k, k) == field)
      raise InputError(f'{where}: {other}={out[field]!r} and {name}={value!r} are names of one field; remove one')
  return out


def _read(raw: dict, family: Family, name: str, where: str) -> tuple[ModelConfig, list[str]]:
  fields = {**_DEFAULTS, **family.defaults, **raw}
  config_fields.check_types(fields, where)
  fields_module = families.own_fields(family)
  if hasattr(fields_module, 'completed'):
    fields = fields_module.completed(fields, family, where)
  config_fields.check(fields, family, where)
  hidden = fields['hidden_size']
  heads = fields['num_attention_heads']
  layers = fields['num_hidden_layers']
  head_dim = fields.get('head_dim') or hidden // heads
  fixed = dict(family.fixed)
  if fixed.get('embed_scale'):
    fixed['embed_scale'] = hidden**0.5
  fixed['activation'] = config_fields.activation(fields, family, where)
  fixed['biases'] = fixed.get('biases', ()) + config_fields.biases(fields, family)
  if 'use_qk_norm' in family.fields and not fields['use_qk_norm']:
    del fixed['qk_norm']
  # Latent attention rotates a separate part of each head, of its own size.
  rotated = fields['qk_rope_head_dim'] if family.latent else head_dim
  rope, unknown = layer_fields.ropes(fields, family, layers, rotated, where)
  cfg = ModelConfig(
    family=name,
    vocab_size=fields['vocab_size'],
    hidden_size=hidden,
    intermediate_size=fields['intermediate_size'],
    num_layers=layers,
    num_heads=heads,
    num_kv_heads=fields.get('num_key_value_heads') or heads,
    head_dim=head_dim,
    norm_eps=fields['rms_norm_eps'],
    tie_embeddings=fields['tie_word_embeddings'],
    max_position=fields['max_position_embeddings'],
    num_labels=_num_labels(raw, where),
    layer_windows=layer_fields.windows(fields, family, layers, rope['layer_ropes'], where),
    experts=config_fields.experts(fields, family, where),
    **rope,
    **config_fields.scalars(fields, family),
    **fixed,
  )
  if fields_module:
    cfg = fields_module.read(fields, cfg, where, family)
  unknown = [field for field in unknown if field not in family.ignored]
  return cfg, sorted([*config_fields.unread(raw, family), *unknown])


def _num_labels(raw: dict, where: str) -> int:
  """Returns 0 for a language model and 1 for a reward model."""
  if not any('ForSequenceClassification' in name for name in raw.get('architectures') or ()):
    return 0
  labels = raw.get('id2label') or (0, 1)  # transformers' default is 2
  if not isinstance(labels, (dict, list, tuple)):
    raise InputError(f'{where}: id2label={labels!r} must be an object')
  if len(labels) != 1:
    raise InputError(
      f'{where}: a classifier of {len(labels)} labels; only heads of one label (reward models) are supported'
    )
  return 1
