"""Hugging Face folders (`formats.hf`, `formats.hf_export`): parity with transformers, round trips, refused folders."""

import dataclasses
import json
import logging
import shutil
import tracemalloc

import jax
import numpy as np
import pytest
import safetensors.numpy
import tiny

from jaxpost.errors import InputError
from jaxpost.formats import config_export, config_json, hf, hf_export, tensor_reader
from jaxpost.models import model as model_lib
from jaxpost.programs import weight_files

TOLERANCE = 3e-5  # of the largest logit, in float32
# Values that differ from the defaults of a config, so that an ignored field changes the logits.
BASE = dict(
  vocab_size=131,
  hidden_size=32,
  intermediate_size=48,
  num_hidden_layers=2,
  num_attention_heads=4,
  num_key_value_heads=2,
  rms_norm_eps=0.05,
  max_position_embeddings=256,
)
LLAMA3 = dict(
  rope_type='llama3',
  rope_theta=5000.0,
  factor=8.0,
  low_freq_factor=1.0,
  high_freq_factor=4.0,
  original_max_position_embeddings=32,
)
CASES = {
  'llama': ('llama', dict(rope_parameters=dict(rope_type='default', rope_theta=500.0))),
  'llama3_rope': ('llama', dict(rope_parameters=LLAMA3, tie_word_embeddings=True, head_dim=32)),
  'llama_mha': ('llama', dict(num_key_value_heads=4, head_dim=16)),
  'qwen3': ('qwen3', dict(head_dim=16, tie_word_embeddings=True)),
  'qwen3_untied': ('qwen3', dict(head_dim=16, num_key_value_heads=1)),
}


def tensors(folder):
  """Returns {name: array} of every tensor stored in a folder."""
  return {
    name: value
    for path in sorted(folder.glob('*.safetensors'))
    for name, value in safetensors.numpy.load_file(path).items()
  }


def assert_equal(a, b):
  np.testing.assert_array_equal(a, b, strict=True)


def edit(folder, **fields):
  path = folder / 'config.json'
  path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.fixture(scope='module')
def reference(tmp_path_factory):
  """reference(case) returns (folder, ids [2, 40], logits of transformers), which are made once."""
  torch = pytest.importorskip('torch')
  import transformers

  cases = {}

  def make(case):
    if case in cases:
      return cases[case]
    family, fields = CASES[case]
    name = {'llama': 'Llama', 'qwen3': 'Qwen3'}[family]
    config = getattr(transformers, f'{name}Config')(**(BASE | fields))
    torch.manual_seed(0)
    network = getattr(transformers, f'{name}ForCausalLM')(config).eval()
    with torch.no_grad():
      for path, p in network.named_parameters():
        p.copy_(0.5 * torch.randn_like(p) + ('norm' in path))
    folder = tmp_path_factory.mktemp(case)
    network.save_pretrained(folder)
    ids = tiny.tokens((2, 40))
    cases[case] = folder, ids, tiny.torch_logits(network, ids)
    return cases[case]

  return make


@pytest.mark.parametrize('case', CASES)
def test_logits_equal_those_of_transformers(reference, case):
  folder, ids, expected = reference(case)
  assert tiny.difference(tiny.logits(*tiny.load(folder), ids), expected) <= TOLERANCE


def test_far_positions_equal_those_of_transformers(reference):
  torch = pytest.importorskip('torch')
  from transformers import AutoModelForCausalLM

  folder, ids, _ = reference('llama')
  positions = np.arange(40, dtype=np.int32)[None].repeat(2, 0) * 3000
  expected = tiny.torch_logits(
    AutoModelForCausalLM.from_pretrained(folder), ids, position_ids=torch.tensor(positions).long()
  )
  actual = tiny.logits(*tiny.load(folder), ids, positions=positions)
  assert tiny.difference(actual, expected) <= TOLERANCE


def llama3_rope(**fields):
  return dict(rope_parameters=LLAMA3 | fields)


SPLIT = dict(num_attention_heads=8, num_key_value_heads=4)
# Wrong fields that fit the weights, and must change the logits.
CHANGES = [
  ('llama', dict(rope_parameters=None, rope_theta=510.0)),
  ('llama', dict(rms_norm_eps=1e-6)),
  ('llama', dict(hidden_act='gelu')),
  ('qwen3', dict(use_sliding_window=True, sliding_window=8, layer_types=['full_attention', 'sliding_attention'])),
  ('llama', SPLIT | dict(head_dim=4)),
  ('llama3_rope', llama3_rope(rope_theta=5100.0)),
  ('llama3_rope', llama3_rope(factor=9.0)),
  ('llama3_rope', llama3_rope(low_freq_factor=2.0)),
  ('llama3_rope', llama3_rope(high_freq_factor=5.0)),
  ('llama3_rope', llama3_rope(original_max_position_embeddings=64)),
  ('llama3_rope', llama3_rope(rope_type='default')),
]
# Wrong fields that must be refused.
REFUSED = [
  *[
    ('llama', x)
    for x in (
      dict(vocab_size=130),
      dict(hidden_size=64),
      dict(head_dim=4),
      dict(intermediate_size=64),
      dict(num_hidden_layers=1),
      dict(num_hidden_layers=3),
      dict(num_key_value_heads=4),
      dict(num_key_value_heads=None),
      dict(model_type='qwen3'),
      dict(hidden_act='relu'),
      dict(attention_bias=True),
    )
  ],
  ('llama', dict(tie_word_embeddings=True)),
  ('llama3_rope', dict(tie_word_embeddings=False)),
  ('llama3_rope', llama3_rope(rope_type='ntk')),
  ('qwen3', dict(model_type='llama')),
  ('qwen3', dict(head_dim=8)),
  ('qwen3', dict(layer_types=['full_attention', 'sliding_attention'])),
]


def copy_with_fields(reference, folder, case, fields):
  shutil.copytree(reference(case)[0], folder, dirs_exist_ok=True)
  edit(folder, **fields)
  return folder


@pytest.mark.parametrize('case,fields', CHANGES)
def test_a_wrong_field_changes_logits(reference, tmp_path, case, fields):
  model, params = tiny.load(copy_with_fields(reference, tmp_path, case, fields))
  _, ids, expected = reference(case)
  assert tiny.difference(tiny.logits(model, params, ids), expected) > 100 * TOLERANCE


@pytest.mark.parametrize('case,fields', REFUSED)
def test_a_wrong_field_is_refused(reference, tmp_path, case, fields):
  folder = copy_with_fields(reference, tmp_path, case, fields)
  with pytest.raises(InputError):
    hf.check(folder, hf.read_config(folder))


@pytest.mark.parametrize('case', ['llama3_rope', 'qwen3_untied'])
def test_import_and_export_give_the_same_bits(reference, tmp_path, case):
  folder, ids, theirs = reference(case)
  model, params = tiny.load(folder)
  out = tmp_path / 'export'
  hf_export.save(out, model, params, max_shard_bytes=10_000)
  assert len(list(out.iterdir())) > 6
  jax.tree.map(assert_equal, tensors(folder), tensors(out))


def test_export_keeps_the_generation_config(reference, tmp_path):
  """All of it is kept except the ids, which come from the tokenizer."""
  folder, _, _ = reference('llama')
  settings = dict(temperature=0.6, top_p=0.95, do_sample=True)
  (tmp_path / 'generation_config.json').write_text(
    json.dumps(settings | dict(eos_token_id=99, transformers_version='5', _from_model_config=True))
  )
  assert hf_export.read_generation(tmp_path) == settings
  assert hf_export.read_generation('bytes') == {}
  model, params = tiny.load(folder)
  hf_export.save(
    tmp_path / 'x', model, params, stop_ids=(7,), bos_id=1, pad_id=0, generation=hf_export.read_generation(tmp_path)
  )
  assert json.loads((tmp_path / 'x/generation_config.json').read_text()) == (
    settings | dict(bos_token_id=1, eos_token_id=[7], pad_token_id=0)
  )


@pytest.mark.parametrize('case', ['llama3_rope', 'qwen3_untied'])
def test_transformers_computes_the_same_with_an_export(reference, tmp_path, case):
  torch = pytest.importorskip('torch')
  from transformers import AutoModelForCausalLM

  folder, ids, expected = reference(case)
  model, params = tiny.load(folder)
  hf_export.save(tmp_path / 'x', model, params, stop_ids=(7, 9), bos_id=1, pad_id=0)
  network = AutoModelForCausalLM.from_pretrained(tmp_path / 'x').eval()
  assert network.dtype == torch.float32
  assert network.generation_config.eos_token_id == [7, 9]
  np.testing.assert_array_equal(tiny.torch_logits(network, ids), expected)
  network.generation_config.eos_token_id = None
  text = network.generate(torch.tensor(ids[:1, :8]).long(), max_new_tokens=16, do_sample=False)[0].numpy()
  logits = tiny.logits(model, params, text[None].astype(np.int32))[0]
  np.testing.assert_array_equal(logits.argmax(-1)[7:-1], text[8:])


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16', 'float16'])
@pytest.mark.parametrize('limit', [4 << 30, 9000])
def test_round_trip_of_our_own_parameters(tmp_path, dtype, limit):
  model = model_lib.build(tiny.config(tie_embeddings=False))
  params = jax.tree.map(lambda x: x.astype(dtype), tiny.params(model))
  folder = tmp_path / 'export'
  hf_export.save(folder, model, params, max_shard_bytes=limit)
  config = json.loads((folder / 'config.json').read_text())
  assert config['torch_dtype'] == config['dtype'] == dtype
  assert {x.dtype.name for x in tensors(folder).values()} == {dtype}
  assert tensors(folder)['lm_head.weight'].shape[0] == 131
  files = sorted(folder.glob('*.safetensors'))
  if limit == 9000:
    assert len(files) > 2
    assert all(f.stat().st_size < limit + 2000 or len(safetensors.numpy.load_file(f)) == 1 for f in files)
  else:
    assert [f.name for f in files] == ['model.safetensors']
  loaded_model, loaded_params = tiny.load(folder, dtype)
  assert loaded_model.config == dataclasses.replace(
    model.config, initializer_range=loaded_model.config.initializer_range
  )
  jax.tree.map(assert_equal, params, loaded_params)


@pytest.fixture
def export(tmp_path):
  folder, model = tmp_path / 'model', model_lib.build(tiny.config())
  hf_export.save(folder, model, tiny.params(model), max_shard_bytes=20_000)
  return folder


def test_export_replaces_an_export_and_nothing_else(export, tmp_path):
  model = model_lib.build(tiny.config())
  params = tiny.params(model, seed=1)

  def fail(folder):
    raise OSError('disk full')

  before = tensors(export)
  with pytest.raises(OSError):
    hf_export.save(export, model, params, tokenizer_save=fail)
  jax.tree.map(assert_equal, before, tensors(export))  # a failed export leaves the old one untouched
  hf_export.save(export, model, params, tokenizer_save=lambda folder: (folder / 'tokenizer.json').write_text('{}'))
  assert sorted(p.name for p in export.iterdir()) == [
    'README.md',
    'checksums.json',
    'config.json',
    'generation_config.json',
    'model.safetensors',
    'tokenizer.json',
  ]
  assert [p.name for p in tmp_path.iterdir()] == ['model']
  (export / 'README.md').unlink()
  with pytest.raises(InputError, match='not replaced'):
    hf_export.save(export, model, params)


def test_failed_export_keeps_the_previous_one(tmp_path, monkeypatch):
  target, link = tmp_path / 'big/export', tmp_path / 'run/export'
  link.parent.mkdir()

  def write(text):
    with hf_export._staging(link) as staged:
      (staged / 'config.json').write_text(text)

  target.mkdir(parents=True)
  link.symlink_to(target)
  for text in ('1', '2'):
    write(text)
    assert link.is_symlink() and (target / 'config.json').read_text() == text
  rename = hf_export.os.rename

  def failing_rename(source, destination):
    if str(source).endswith('.new'):
      raise OSError('no space left')
    rename(source, destination)

  monkeypatch.setattr(hf_export.os, 'rename', failing_rename)
  with pytest.raises(OSError, match='no space'):
    write('3')
  # This is the state after a process was killed between the two renames.
  rename(target, target.with_name('.export.old'))
  with pytest.raises(OSError, match='no space'):
    write('4')
  assert (target / 'config.json').read_text() == '2'
  assert [path.name for path in target.parent.iterdir()] == ['export']


def test_model_card_has_the_front_matter_of_the_hub(export):
  yaml = pytest.importorskip('yaml')
  _, front, text = (export / 'README.md').read_text().split('---\n')
  assert yaml.safe_load(front) == dict(
    library_name='transformers', pipeline_tag='text-generation', tags=['qwen3', 'jaxpost']
  )


def rewrite(folder, name, value):
  """Replaces a tensor in its file; None removes it."""
  for path in folder.glob('*.safetensors'):
    stored = safetensors.numpy.load_file(path)
    if stored.pop(name, None) is not None:
      stored |= {} if value is None else {name: value}
      safetensors.numpy.save_file(stored, path)


def put(folder, name, value):
  path = sorted(folder.glob('*.safetensors'))[0]
  stored = safetensors.numpy.load_file(path)
  safetensors.numpy.save_file({**stored, name: value}, path)


def index(folder, name, file):
  path = folder / 'model.safetensors.index.json'
  raw = json.loads(path.read_text())
  raw['weight_map'][name] = file
  path.write_text(json.dumps(raw))


Q = 'model.layers.1.self_attn.q_proj.weight'


def drop_weights(folder, name=None):
  for path in folder.glob('model*'):
    path.unlink()
  if name:
    (folder / name).write_bytes(b'\x80')


def cut(folder):
  path = sorted(folder.glob('*.safetensors'))[1]
  path.write_bytes(path.read_bytes()[:-100])


BROKEN = {
  'wrong shape': (lambda f: rewrite(f, Q, np.zeros((32, 31), np.float32)), [Q, '[32, 31]', '[32, 32]', 'model-0000']),
  'integers': (lambda f: rewrite(f, Q, np.zeros((32, 32), np.int32)), [Q, 'I32', 'unquantized']),
  'gone from its file': (lambda f: rewrite(f, Q, None), [Q, 'model-0000', 'lacks']),
  'extra': (
    lambda f: put(f, 'model.layers.2.mlp.up_proj.weight', np.zeros((3, 2), np.float32)),
    ['model.layers.2.mlp.up_proj.weight', '[3, 2]', '2 layers'],
  ),
  'truncated': (cut, ['model-00002', 'unreadable', 'again']),
  'garbage': (lambda f: sorted(f.glob('*.safetensors'))[0].write_bytes(b'x' * 99), ['model-00001', 'unreadable']),
  'outside': (lambda f: index(f, Q, '../x.safetensors'), ['../x.safetensors', Q]),
  'absolute': (lambda f: index(f, Q, '/etc/passwd'), ['/etc/passwd', Q]),
  'not there': (lambda f: index(f, Q, 'no.safetensors'), ['no.safetensors', 'no such']),
  'index not json': (
    lambda f: (f / 'model.safetensors.index.json').write_text('{"a": '),
    ['model.safetensors.index.json:1:', 'bad JSON'],
  ),
  'index empty': (lambda f: (f / 'model.safetensors.index.json').write_text('{}'), ['weight_map']),
  'pickles only': (lambda f: drop_weights(f, 'pytorch_model.bin'), ['pytorch_model.bin', 'convert to safetensors']),
  'nothing': (drop_weights, ['no weights', 'config.json']),
}


@pytest.mark.parametrize('what', BROKEN)
def test_broken_weights_are_named(export, what):
  hf.check(export, hf.read_config(export))  # fine until broken
  breaks, words = BROKEN[what]
  breaks(export)
  with pytest.raises(InputError) as e:
    hf.check(export, hf.read_config(export))
  message = str(e.value)
  assert '\n' not in message and all(w in message for w in words), message


def test_harmless_extra_tensors_pass(export):
  embed = tensors(export)['model.embed_tokens.weight']
  put(export, 'lm_head.weight', embed)
  put(export, 'model.layers.0.self_attn.rotary_emb.inv_freq', np.zeros(4, np.float32))
  hf.check(export, hf.read_config(export))
  put(export, 'lm_head.weight', embed[:-1])
  with pytest.raises(InputError, match='lm_head'):
    hf.check(export, hf.read_config(export))


def test_head_that_differs_from_a_tied_embedding_is_refused(export):
  """transformers would not tie the two, and servers would drop the head: the weights and config.json disagree."""
  head = tensors(export)['model.embed_tokens.weight'].copy()
  head[-1] += 1
  put(export, 'lm_head.weight', head)
  with pytest.raises(InputError, match='lm_head.weight.* the head .* differs .*tie_word_embeddings to false'):
    hf.check(export, hf.read_config(export))
  judge = dataclasses.replace(hf.read_config(export), num_labels=1)  # a reward model reads no head
  hf.check(export, judge, {p: s for p, s in model_lib.build(judge).table.items() if p != 'score'})


def test_a_copy_of_a_tensor_is_compared_in_few_reads():
  """Object stores take tens of milliseconds to answer each."""
  reads = []

  class Remote(np.ndarray):
    def __getitem__(self, index):
      reads.append(index)
      return np.asarray(self)[index]

  for rows in (1, 64, 100, 1000, 151_936):
    table = np.arange(rows, dtype=np.float32)[:, None]
    other = table.copy()
    other[-1] += 1
    a, b, c = (x.view(Remote) for x in (table, table, other))
    reads.clear()
    assert hf.same_values(a, b) and len(reads) <= 40
    assert not hf.same_values(a, c)


CONFIGS = {
  'unknown family': (dict(model_type='mamba'), 'mamba'),
  'remote code': (dict(auto_map={'AutoModel': 'x.Y'}), 'auto_map'),
  'text as number': (dict(hidden_size='32'), 'hidden_size'),
  'zero': (dict(num_hidden_layers=0), 'num_hidden_layers'),
  'heads': (dict(num_key_value_heads=3), 'num_key_value_heads'),
  'eps': (dict(rms_norm_eps=None), 'rms_norm_eps'),
  'tie': (dict(tie_word_embeddings='yes'), 'tie_word_embeddings'),
  'partial rope': (dict(rope_parameters=dict(rope_theta=1.0, partial_rotary_factor=0.5)), 'partial_rotary_factor'),
}


@pytest.mark.parametrize('what', CONFIGS)
def test_bad_config_is_named(export, what):
  fields, word = CONFIGS[what]
  edit(export, **fields)
  with pytest.raises(InputError, match=word) as e:
    hf.read_config(export)
  assert str(export / 'config.json') in str(e.value)


def test_unreadable_config_is_refused_with_its_cause(export, tmp_path):
  path = export / 'config.json'
  for text, words in (
    ('{"model_type": "qwen3"}', 'is missing'),
    ('[1]', 'JSON object'),
    ('{\n"a": 1,}', 'config.json:2:'),
  ):
    path.write_text(text)
    with pytest.raises(InputError, match=words):
      hf.read_config(export)
  path.unlink()
  with pytest.raises(InputError, match='config.json: no such file'):
    hf.read_config(export)
  drop_weights(export, 'model.pt')
  with pytest.raises(InputError, match='model.pt.*convert'):
    hf.read_config(export)
  with pytest.raises(InputError, match='no such folder'):
    hf.read_config(tmp_path / 'nowhere')


def test_unknown_fields_are_named_in_one_warning(export, caplog):
  edit(export, use_qkv_bias=True, final_softcap=30.0)
  (export / 'checksums.json').unlink()  # so that the edit is not taken for damage
  with caplog.at_level(logging.WARNING):
    hf.read_config(export)
  assert len(caplog.records) == 1
  assert 'final_softcap, use_qkv_bias' in caplog.text


# ----------------------------------------------------------------- host memory


def traced(fn):
  """Returns (the most bytes that numpy arrays took during the call beyond those before, result of fn)."""
  tracemalloc.start()
  try:
    before, _ = tracemalloc.get_traced_memory()
    result = fn()
    return tracemalloc.get_traced_memory()[1] - before, result
  finally:
    tracemalloc.stop()


@pytest.fixture
def large(tmp_path):
  """(model, parameters, bytes of the largest parameter, bytes of all, folder)."""
  model = model_lib.build(tiny.config(hidden_size=256, intermediate_size=1024, num_layers=10))
  params = model.init(jax.random.key(0))
  sizes = [x.nbytes for x in jax.tree.leaves(params)]
  assert max(sizes) < sum(sizes) / 3
  hf_export.save(tmp_path / 'large', model, params)
  return model, params, max(sizes), sum(sizes), tmp_path / 'large'


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_loading_keeps_a_piece_on_the_host(large, monkeypatch, dtype):
  """Loading also holds no parameter twice on the device.

  The device is this host, so memory that numpy still holds at the end is that of the parameters and is subtracted.
  """
  model, params, _, all_bytes, folder = large
  tensor = max(x.nbytes for x in tensors(folder).values())
  monkeypatch.setattr(tensor_reader, '_PIECE', tensor // 4)
  written, live_bytes = [], []

  def write(x, piece, start, *sharding, **options):
    live_bytes.append(sum(x.nbytes for x in jax.live_arrays()))
    out = weight_files.write_piece(x, piece, start, *sharding, **options)
    assert x is None or x.is_deleted()
    written.append(piece.nbytes)
    return out

  def read():
    return hf.load_params(folder, model, model.shardings(tiny.one_device()), dtype, write=write)

  jax.block_until_ready(read())  # compiles
  written.clear()
  live_bytes.clear()
  before = sum(x.nbytes for x in jax.live_arrays())
  peak, (loaded, kept_bytes) = traced(lambda: (jax.block_until_ready(read()), tracemalloc.get_traced_memory()[0]))
  assert peak - kept_bytes < 1.5 * tensor < all_bytes / 8
  jax.tree.map(assert_equal, loaded, jax.tree.map(lambda x: x.astype(dtype), params))
  assert max(written) <= tensor // 4 and sum(written) > all_bytes / 4
  owned = sum(x.nbytes for x in jax.tree.leaves(loaded))
  assert max(live_bytes) - before < owned + 1.5 * tensor


def test_export_keeps_one_layer_on_the_host(large, tmp_path):
  """Tensors are fetched and written one by one, also where all fit into one file."""
  model, params, largest, all_bytes, folder = large
  peak, _ = traced(lambda: hf_export.save(tmp_path / 'again', model, params))
  assert peak < 2.5 * largest / model.config.num_layers < all_bytes / 6
  names = [p.name for p in (tmp_path / 'again').glob('*.safetensors')]
  assert names == ['model.safetensors']
  assert (tmp_path / 'again/model.safetensors').read_bytes() == (folder / 'model.safetensors').read_bytes()


def test_sharded_export_has_all_tensors_and_an_index(large, tmp_path):
  model, params, largest, _, folder = large
  hf_export.save(tmp_path / 'again', model, params, max_shard_bytes=largest // 4)
  files = sorted(p.name for p in (tmp_path / 'again').glob('*.safetensors'))
  assert len(files) > 5 and files[0].startswith('model-00001-of-')
  index = json.loads((tmp_path / 'again/model.safetensors.index.json').read_text())
  assert set(index['weight_map'].values()) == set(files)
  expected, actual = tensors(folder), tensors(tmp_path / 'again')
  assert expected.keys() == actual.keys() == index['weight_map'].keys()
  for name in expected:
    assert_equal(expected[name], actual[name])


def test_model_without_windows_exports_the_window_size_transformers_needs():
  """Families with `layer_types` need a size; in the others, null says that no layer has a window."""
  for family, fields, expected in (
    ('gemma2', dict(attention_scale=0.5), 4096),
    ('olmo3', {}, 4096),
    ('qwen2', {}, 4096),
    ('mistral', {}, None),
    ('phi3', {}, None),
  ):
    config = config_export.to_hf(tiny.config(family=family, layer_windows=(), **fields))
    assert config['sliding_window'] == expected, family
    assert set(config.get('layer_types', ['full_attention'])) == {'full_attention'}
    assert not any(config_json.from_hf(config, 'x')[0].layer_windows)
