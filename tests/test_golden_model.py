"""Logits and greedy text of Llama and Qwen3 models against files that other systems computed."""

import importlib.util
import json
import pathlib

import numpy as np
import pytest
import safetensors.numpy
import tiny

from jaxpost.data import tokenizer as tokenizer_lib
from jaxpost.programs.compile import Ledger
from jaxpost.rollout import native
from jaxpost.types import Prompt

GOLDEN = pathlib.Path(__file__).parent / 'golden' / 'models'
TOLERANCE = 3e-5  # of the largest logit, in float32


def make_script():
  """The module golden/models/make.py, which draws the weights of the tiny models."""
  spec = importlib.util.spec_from_file_location('make', GOLDEN / 'make.py')
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


@pytest.mark.parametrize('name', ['llama', 'qwen3'])
def test_logits_of_a_tiny_model_match_the_stored_ones(name, tmp_path):
  golden = np.load(GOLDEN / f'{name}.npz')
  (tmp_path / 'config.json').write_text(str(golden['config']))
  safetensors.numpy.save_file(make_script().weights(json.loads(str(golden['config']))), tmp_path / 'model.safetensors')
  ours = tiny.logits(*tiny.load(tmp_path), golden['tokens'].astype(np.int32))[0]
  error = tiny.largest(ours - golden['logits'])
  assert error <= TOLERANCE * tiny.largest(golden['logits'])


@pytest.fixture(scope='module')
def stories(shared_data):
  """(data folder, model folder, model, parameters) of a pretrained model, stories260K."""
  data = shared_data('stories260K')
  return data, data / 'hf', *tiny.load(data / 'hf')


def test_logits_of_a_pretrained_model_match_the_stored_ones(stories):
  data, _, model, params = stories
  golden = np.load(data / 'golden_logits.npz')
  ours = tiny.logits(model, params, golden['prompt_ids'][None])[0]
  error = tiny.largest(ours - golden['logits'])
  assert error <= TOLERANCE * tiny.largest(golden['logits'])


def test_greedy_text_of_a_pretrained_model_is_the_published_text(stories):
  """Tokens and characters are those that the author of the model published."""
  data, folder, model, params = stories
  golden = json.loads((data / 'golden_greedy.json').read_text())
  ids = golden['greedy_ids']
  tokenizer = tokenizer_lib.load(str(folder))
  assert tokenizer.bos_id == golden['bos'] == ids[0]
  settings = native.SamplerConfig(
    slots=2, max_prompt=32, max_new_tokens=len(ids) - 1, stop_ids=tokenizer.stop_ids, temperature=0.0
  )
  engine = native.NativeEngine(model, settings, tiny.one_device('rollout'), tiny.EXACT, Ledger())
  engine.load(params, version=0)
  prompts = [Prompt(i, np.array(ids[:n], np.int32), '', {}) for i, n in enumerate((1, 9))]
  rollout = engine(prompts, group_size=1, step=0, run_key=np.zeros(2, np.uint32))
  assert rollout.completions[0].tolist() == ids[1:]
  assert tokenizer.decode(rollout.completions[0]) == golden['greedy_text']
  assert rollout.completions[1].tolist()[: len(ids) - 9] == ids[9:]
