"""Tests of text models in multimodal folders: they are read, trained, and exported with the other parts unchanged."""

import json
import pathlib

import jax
import numpy as np
import pytest
import safetensors.torch
import tiny
import torch
import transformers

import jaxpost
from jaxpost.errors import InputError
from jaxpost.formats import hf, hf_export, multimodal
from jaxpost.models import config as config_lib
from jaxpost.models import model as model_lib
from jaxpost.stage import model_folders, schema, weight_sources
from jaxpost.storage import seals

TEXT = dict(
  vocab_size=259,
  hidden_size=24,
  intermediate_size=20,
  num_hidden_layers=2,
  num_attention_heads=4,
  num_key_value_heads=2,
  head_dim=6,
  max_position_embeddings=512,
)
VISION = dict(hidden_size=16, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2, image_size=28)
QWEN_VISION = dict(depth=1, hidden_size=16, intermediate_size=12, num_heads=2, out_hidden_size=24)
QWEN_IDS = dict(image_token_id=255, video_token_id=256, vision_start_token_id=257, vision_end_token_id=258)
SECTIONS = dict(rope_type='default', mrope_section=[1, 1, 1])


def gemma3():
  text = TEXT | dict(query_pre_attn_scalar=6, sliding_window=8, layer_types=['sliding_attention', 'full_attention'])
  config = transformers.Gemma3Config(
    text_config=text, vision_config=VISION | dict(patch_size=14), mm_tokens_per_image=4, image_token_index=258
  )
  return transformers.Gemma3ForConditionalGeneration(config)


def qwen3_vl():
  vision = QWEN_VISION | dict(patch_size=4)
  config = transformers.Qwen3VLConfig(
    text_config=TEXT | dict(rope_parameters=SECTIONS | dict(rope_theta=5e5)),
    vision_config=vision | dict(deepstack_visual_indexes=[0], num_position_embeddings=16),
    tie_word_embeddings=True,
    **QWEN_IDS,
  )
  return transformers.Qwen3VLForConditionalGeneration(config)


def mistral3():
  config = transformers.Mistral3Config(
    text_config=TEXT | dict(model_type='mistral', sliding_window=None),
    vision_config=VISION | dict(model_type='pixtral', patch_size=14, head_dim=8),
    image_token_index=258,
  )
  return transformers.Mistral3ForConditionalGeneration(config)


def qwen2_5_vl():
  text = {k: v for k, v in TEXT.items() if k != 'head_dim'}
  vision = QWEN_VISION | dict(patch_size=14)
  config = transformers.Qwen2_5_VLConfig(
    text_config=text | dict(rope_parameters=SECTIONS | dict(rope_theta=1e4), use_sliding_window=False),
    vision_config=vision | dict(fullatt_block_indexes=[0], window_size=28),
    tie_word_embeddings=False,
    **QWEN_IDS,
  )
  return transformers.Qwen2_5_VLForConditionalGeneration(config)


def qwen3_5():
  states = dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=10, linear_value_head_dim=6)
  rope = SECTIONS | dict(rope_theta=5e5, partial_rotary_factor=0.5, mrope_interleaved=True)
  layers = dict(head_dim=12, rms_norm_eps=0.02, layer_types=['linear_attention', 'full_attention'])
  vision = QWEN_VISION | dict(patch_size=4)
  config = transformers.Qwen3_5Config(
    text_config=TEXT | states | layers | dict(rope_parameters=rope),
    vision_config=vision | dict(num_position_embeddings=16),
    tie_word_embeddings=True,
    **QWEN_IDS,
  )
  return transformers.Qwen3_5ForConditionalGeneration(config)


def gemma4():
  sizes = dict(global_head_dim=10, hidden_size_per_layer_input=4, vocab_size_per_layer_input=259, pad_token_id=0)
  layers = dict(num_hidden_layers=4, num_kv_shared_layers=2, sliding_window=8)
  layers |= dict(layer_types=['sliding_attention', 'full_attention'] * 2)
  config = transformers.Gemma4Config(
    text_config=TEXT | sizes | layers,
    vision_config={k: v for k, v in VISION.items() if k != 'image_size'} | dict(head_dim=8, patch_size=4),
    image_token_id=255,
    video_token_id=256,
    audio_token_id=257,
  )
  return transformers.Gemma4ForConditionalGeneration(config)


def llama4():
  text = TEXT | dict(intermediate_size_mlp=28, num_local_experts=3, interleave_moe_layer_step=2, attention_chunk_size=5)
  config = transformers.Llama4Config(
    text_config=text | dict(no_rope_layer_interval=2, floor_scale=5, pad_token_id=0),
    vision_config=VISION | dict(patch_size=14, projector_input_dim=16, projector_output_dim=16, vision_output_dim=16),
    image_token_index=258,
  )
  return transformers.Llama4ForConditionalGeneration(config)


MAKERS = {f.__name__: f for f in (gemma3, gemma4, llama4, qwen3_vl, mistral3, qwen2_5_vl, qwen3_5)}
IDS = np.random.RandomState(0).randint(0, 250, (2, 13))


@pytest.fixture(scope='module', params=MAKERS)
def multimodal_model(request, tmp_path_factory):
  """Returns the folder and the logits [2, 13, V] of a random multimodal model."""
  torch.manual_seed(0)
  model = MAKERS[request.param]().eval()
  with torch.no_grad():  # no parameter keeps its initial value
    for p in model.parameters():
      p.add_(torch.randn_like(p) * 0.05)
  folder = tmp_path_factory.mktemp(request.param) / 'model'
  model.save_pretrained(folder)
  if request.param == 'gemma4':  # as published, a layer that reads the keys of another layer has keys of its own
    weights = tensors(folder) | {'model.language_model.layers.2.self_attn.k_proj.weight': torch.ones(12, 24)}
    safetensors.torch.save_file(weights, folder / 'model.safetensors', metadata={'format': 'pt'})
  (folder / 'preprocessor_config.json').write_text('{"size": 28}')
  return folder, logits(model)


def logits(model):
  with torch.no_grad():
    try:
      return model(input_ids=torch.tensor(IDS), attention_mask=torch.ones(IDS.shape, dtype=torch.long)).logits.numpy()
    except AttributeError as error:
      if error.name != 'image_outputs':
        raise
      pytest.skip(f'transformers {transformers.__version__} reads a field that the output of its Llama 4 does not have')


def config_of(folder):
  """Returns the config of two steps of SFT with an export at the end."""
  over = dict(model=dict(text_only=True, tokenizer='bytes'), train=dict(steps=2), save=dict(export=True))
  return tiny.merged(tiny.run_config(str(folder)), over)


def test_logits_match_those_of_transformers(multimodal_model):
  folder, expected = multimodal_model
  config = hf.read_config(folder, text_only=True)
  model = model_lib.build(config)
  params = hf.load_params(folder, model, model.shardings(tiny.one_device()), np.float32)
  actual = np.asarray(tiny.logits(model, params, IDS))[..., : expected.shape[-1]]
  assert np.abs(actual - expected).max() <= 3e-5 * np.abs(expected).max()


def test_multimodal_folder_without_text_only_is_refused(multimodal_model):
  """The message names the part and the field to set."""
  with pytest.raises(InputError, match='vision_config of .* set config.model.text_only=True'):
    weight_sources.find(str(multimodal_model[0]), 'config.model.path', {})


@pytest.mark.long
def test_export_replaces_only_the_text_model(multimodal_model, tmp_path):
  """transformers loads the export as the multimodal model."""
  folder, before = multimodal_model
  jaxpost.run(config_of(folder), tmp_path / 'run')
  (export,) = (tmp_path / 'run').glob('**/model.safetensors.index.json')
  export = export.parent
  old, new = tensors(folder), tensors(export)
  index = json.loads((export / 'model.safetensors.index.json').read_text())
  assert index['metadata']['total_size'] == sum(x.nbytes for x in new.values())
  assert index['weight_map'].keys() == new.keys()
  assert old.keys() == new.keys()
  changed = {name for name in old if not torch.equal(old[name], new[name])}
  assert changed and all('visual' not in n and 'vision' not in n and 'projector' not in n for n in changed)
  assert all('layer' in n or 'norm' in n or 'embed' in n or 'lm_head' in n for n in changed)
  assert (export / 'config.json').read_text() and json.loads((export / 'config.json').read_text()) == json.loads(
    (folder / 'config.json').read_text()
  )
  assert (export / 'preprocessor_config.json').read_text() == '{"size": 28}'
  model_class = getattr(transformers, json.loads((export / 'config.json').read_text())['architectures'][0])
  model, info = model_class.from_pretrained(export, dtype=torch.float32, output_loading_info=True)
  assert not info['missing_keys'] and not info['unexpected_keys'] and not info['mismatched_keys']
  after = logits(model.eval())
  assert np.abs(after - before).max() > 1e-3
  # Read again as a text model, the export has the logits of the multimodal model.
  config = hf.read_config(export, text_only=True)
  text_model = model_lib.build(config)
  params = hf.load_params(export, text_model, text_model.shardings(tiny.one_device()), np.float32)
  actual = np.asarray(tiny.logits(text_model, params, IDS))[..., : after.shape[-1]]
  assert np.abs(actual - after).max() <= 3e-5 * np.abs(after).max()


def test_experts_stacked_in_one_tensor_are_read(tmp_path):
  """Qwen 3.5 is published in this form. An export has a tensor for each expert, as `transformers` writes it."""
  experts = config_lib.Experts(5, 2, 6, shared=1, shared_size=6, shared_gate=True)
  model = model_lib.build(tiny.hybrid('qwen3_5_moe_text', experts=experts))
  params = tiny.params(model)
  hf_export.save(tmp_path, model, params)
  per_expert = {name.replace('model.', 'model.language_model.', 1): x for name, x in tensors(tmp_path).items()}
  stacked = {name: x for name, x in per_expert.items() if '.experts.' not in name}
  for layer in range(3):
    block = f'model.language_model.layers.{layer}.mlp.experts.'
    gate, up, down = (
      torch.stack([per_expert[f'{block}{i}.{side}_proj.weight'] for i in range(5)]) for side in ('gate', 'up', 'down')
    )
    stacked |= {f'{block}gate_up_proj': torch.cat([gate, up], 1), f'{block}down_proj': down}
  safetensors.torch.save_file(stacked, tmp_path / 'model.safetensors', metadata={'format': 'pt'})
  (tmp_path / seals.NAME).unlink()
  loaded = hf.load_params(tmp_path, model, model.shardings(tiny.one_device()), np.float32)
  jax.tree.map(np.testing.assert_array_equal, loaded, params)
  with multimodal.Origin(tmp_path) as origin:
    assert {origin.name(name.replace('language_model.', '', 1)) for name in per_expert} == per_expert.keys()
    assert not origin.others((), '')


def tensors(folder):
  return {
    k: v for path in pathlib.Path(folder).glob('*.safetensors') for k, v in safetensors.torch.load_file(path).items()
  }


@pytest.mark.parametrize('path', ['', 'run', 'run@2', 'text', 'adapter'])
def test_text_only_has_no_effect_on_text_models(path, tmp_path):
  """Random weights, runs, folders of text models, and adapters on these are exported as text models."""
  tiny.folder(tmp_path / 'text')
  (tmp_path / 'run' / 'checkpoints').mkdir(parents=True)
  (tmp_path / 'adapter').mkdir()
  (tmp_path / 'adapter' / 'adapter_config.json').write_text(
    json.dumps(dict(peft_type='LORA', base_model_name_or_path=str(tmp_path / 'text')))
  )
  section = schema.ModelSection(path=path and str(tmp_path / path), text_only=True)
  assert model_folders.origin(section, tiny.config()) is None


def test_export_of_a_quantized_folder_has_no_quantization_config(tmp_path):
  """The text model is exported in floats, which `transformers` would otherwise read as blocks of float8."""
  quantized = dict(quantization_config=dict(quant_method='fp8', weight_block_size=[128, 128]))
  config = dict(model_type='mistral3', vision_config=dict(depth=2), text_config=dict(hidden_size=8) | quantized)
  (tmp_path / 'config.json').write_text(json.dumps(config | quantized))
  safetensors.torch.save_file({'vision_tower.x.weight': torch.zeros(2)}, tmp_path / 'model.safetensors')
  with multimodal.Origin(tmp_path) as origin:
    assert origin.completed({}) == config | dict(text_config=dict(hidden_size=8))
    assert [*origin.others((), '')] == ['vision_tower.x.weight']
