"""Tests that each Python block of the documentation runs.

A block is executed as it is printed, with the files, the folder or the finished run that a reader has there. Whatever
takes minutes or another machine is replaced by a stand-in that checks the arguments of its call. A block that is only a
part of a file has a comment before it, `<!-- a part: ... -->`, which the site does not show and which names the file.
"""

import ast
import builtins
import dataclasses
import importlib
import json
import pathlib
import re
import sys
import types
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest

import jaxpost
from configs import quickstart
from jaxpost.data import tokenizer as tokenizer_lib
from jaxpost.environments.pool import EnvironmentPool
from jaxpost.errors import InputError
from jaxpost.stage import algorithms
from jaxpost.stage import config as config_lib
from jaxpost.tools import completions, inference
from jaxpost.types import Objective, Outputs, Prompt, Rollout
from launch import yaml_config

CLONE = pathlib.Path(__file__).resolve().parents[1]
PAGES = {
  str(page.relative_to(CLONE)): page.read_text('utf-8')
  for page in [CLONE / 'README.md', *sorted((CLONE / 'docs').rglob('*.md'))]
}


class Block(NamedTuple):
  """A Python block: its code, and what it is a part of ('' for a block that runs as it is)."""

  code: str
  part: str


def blocks(page: str) -> list[Block]:
  """Returns the Python blocks of docs/PAGE.md."""
  matches = re.findall(
    r'(?:^<!-- a part: ([^\n]*) -->\n)?^```python\n(.*?)^```$', PAGES[f'docs/{page}.md'], re.M | re.S
  )
  return [Block(code, part) for part, code in matches]


BLOCKS = {
  (pathlib.Path(page).stem, n): block
  for page in PAGES
  if '```python' in PAGES[page]
  for n, block in enumerate(blocks(pathlib.Path(page).stem))
}


def executed(code: str, **names: Any) -> dict[str, Any]:
  """Executes a block with these names defined, and returns all names that are defined afterwards."""
  exec(compile(code, 'block', 'exec'), names)
  return names


# ------------------------------------------------------------------- Python


def check_stages(config: dict):
  """Makes those checks of a launch that need neither data nor a model."""
  for stage in config_lib.parse(config).values():
    algorithm = algorithms.load_algorithm(stage.algorithm)
    algorithm.check(config_lib.resolve(stage, algorithm.defaults))


def run_of_a_config(code: str, monkeypatch) -> dict:
  """Executes a block that calls `jaxpost.run` once, and returns the config after its checks."""
  run = mock.create_autospec(jaxpost.run)
  monkeypatch.setattr(jaxpost, 'run', run)
  executed(code)
  ((config, workdir), _), *others = run.call_args_list
  assert not others and workdir.startswith('runs/')
  check_stages(config.to_dict())
  return config.to_dict()


def own_reward(code, monkeypatch, tmp_path):
  """Checks that the answers on this page get their rewards, and that both of its configs are accepted."""
  files = dict(re.findall(r'`(\w+\.\w+)`[^`]*\n\n```\w+\n(.*?)^```$', PAGES['docs/getting_started.md'], re.M | re.S))
  assert set(files) == {'colors.jsonl', 'colors.yaml', 'warm.py', 'warm.yaml'} and files['warm.py'] == code
  for name, text in files.items():
    (tmp_path / name).write_text(text)
  monkeypatch.chdir(tmp_path)
  rows = [json.loads(line) for line in files['colors.jsonl'].splitlines()]
  assert executed(code)['warm']([row['completion'] for row in rows]) == [1, 1, 1, 0, 0]
  sft, grpo = (yaml_config.get_config(name).to_dict() for name in ('colors.yaml', 'warm.yaml'))
  check_stages(sft)
  check_stages(grpo)
  assert grpo['reward'] == './warm.py:warm' and grpo['init_from'] == 'runs/colors'


def first_run(code, monkeypatch):
  assert run_of_a_config(code, monkeypatch)['stages'] == ('sft', 'grpo')


def notebook(code, monkeypatch):
  assert run_of_a_config(code, monkeypatch)['model']['path'] == 'Qwen/Qwen3-1.7B'


def sampling(code, monkeypatch, capsys):
  """Runs the block without weights. The tokens are given, and prompts are read like those of the quickstart."""
  config = config_lib.parse(quickstart.get_config('short').to_dict())['grpo']
  policy = types.SimpleNamespace(checkpoints=pathlib.Path('run/checkpoints/grpo'))
  inputs = types.SimpleNamespace(tokenizer=tokenizer_lib.load('bytes'), config=config, sources=dict(policy=policy))
  weights = inference.Weights(inputs, {}, None, 0)
  monkeypatch.setattr(inference, 'load', mock.create_autospec(inference.load, return_value=weights))
  calls = []

  def complete(weights, prompts, draws):
    calls.append((prompts, draws))
    n = len(prompts) * draws.n
    drawn = np.full((n, draws.max_new_tokens), ord('4'), np.int32)
    logprobs = np.full(drawn.shape, -0.5, np.float32)
    return Rollout(tuple(prompts), drawn, np.full(n, 2), logprobs, logprobs, np.ones(n, bool))

  monkeypatch.setattr(completions, 'complete', complete)
  executed(code)
  inference.load.assert_called_once_with(run='runs/quickstart')
  ((prompts, draws),) = calls
  assert len(prompts) == draws.n == 2 and all(isinstance(prompt, Prompt) for prompt in prompts)
  lines = capsys.readouterr().out.splitlines()
  chats = [f"[{{'role': 'user', 'content': '{text}'}}]" for text in ('17+25=', '3+4=')]
  assert lines[-4:] == [f'{chat} 44 -1.0' for chat in chats for _ in range(draws.n)]


def watching(code, monkeypatch, tmp_path, capsys):
  """Checks that the block prints the training rows of a run."""
  rows = [dict(stage='sft', split='train', step=1, loss=0.5), dict(stage='sft', split='eval', step=1, accuracy=1.0)]
  folder = tmp_path / 'runs/look'
  folder.mkdir(parents=True)
  (folder / 'metrics.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))
  monkeypatch.chdir(tmp_path)
  executed(code)
  assert capsys.readouterr().out == 'sft 1 0.5\n'


def your_loss(code):
  """Checks that the loss fits `Objective`, and returns a loss for each token and the entropy."""
  fn = Objective(executed(code)['loss'], reads=('entropy',), arrays=('advantages',)).fn
  outputs = Outputs(logprobs=np.array([[-1.0, -2.0]]), entropy=np.array([[0.1, 0.2]]))
  loss, figures = fn(outputs, {'advantages': np.array([[3.0, -1.0]])})
  assert loss.tolist() == [[3.0, -2.0]] and figures == {'entropy': outputs.entropy}


def your_check(code):
  """Refuses a field that only built-in methods read, and takes those that jaxpost applies itself."""
  check = executed(code, Algorithm=jaxpost.Algorithm, objective=None, credit=None)['ALGORITHM'].check
  fields = config_lib.defaults()['rl'] | dict(minibatches=2, dynamic_sampling=2, aggregate='sequence')
  (config,) = config_lib.parse({'rl': fields}).values()
  check(config)
  with pytest.raises(InputError, match=r'config.rl.kl_coef: reinforce.py would ignore it; leave it -1.0'):
    check(dataclasses.replace(config, rl=dataclasses.replace(config.rl, kl_coef=0.1)))


def your_reward(code):
  """Checks the function on messages. The reward pool calls it in tests/test_docs.py."""
  completions = [[{'role': 'assistant', 'content': text}] for text in ('4', '5', '?', '4')]
  rewards = executed(code)['right_sum'](completions=completions, answer=['4', '4', '4', None], prompts=[''] * 4)
  assert rewards == [1.0, pytest.approx(0.1), 0.0, None]


def your_model(code, monkeypatch):
  """Checks that the call is that of docs/examples/linen_decoder.py, with two of its three rules for parameters."""
  monkeypatch.syspath_prepend(str(CLONE / 'docs/examples'))
  example = importlib.import_module('linen_decoder')
  model = executed(f'model = {code}', Decoder=example.Decoder, custom=example.custom)['model']
  axes = {path: parameter.axes for path, parameter in model.table.items()}
  assert axes['embed/embedding'] == ('vocab', 'embed')
  output_axes = [spec for path, spec in axes.items() if path.endswith('/out/kernel')]
  assert len(output_axes) == 2 and set(output_axes) == {('heads', None, 'embed')}


def entry_of_a_family(code):
  """Checks that the block is an entry of the table of families. tests/test_new_family.py adds it."""
  module = importlib.import_module('jaxpost.formats.families')
  (family,) = executed(f'entry = {{{code}}}', **vars(module))['entry'].values()
  assert isinstance(family, module.Family)


def case_of_a_family(code):
  """Checks that the block is an entry of the table of tests/test_families.py."""
  (case,) = executed(f'case = {{{code}}}', LOCAL='local', FULL='full')['case'].values()
  assert len(case) == 2


# ---------------------------------------------------------- the environments


def ask(environment: Any, verb: str, **request: Any) -> Any:
  """Returns the answer of an environment process, which must not have died."""
  answer = environment.submit(verb=verb, **request).result()
  assert not answer.lost
  return answer


def play(environment: Any, number: int, policy: Callable[[list[tuple[int, str]]], int | None]) -> tuple[float, list]:
  """Plays an episode, and returns the outcome and the answers to the calls.

  Args:
    environment: a process with the environment `Guess`.
    number: the number to guess.
    policy: returns the next guess, given the previous pairs (guess, answer). None ends the episode.
  """
  row = dict(answer=str(number), question='Which number?', prompt=[{'role': 'user', 'content': 'Which number?'}])
  assert ask(environment, 'reset', row=row).value == ' Between 1 and 100.'
  history, answers = [], []
  while (guess := policy(history)) is not None:
    answers.append(ask(environment, 'call', name='guess', arguments=dict(number=guess)))
    history.append((guess, answers[-1].value))
  return ask(environment, 'reward').value, answers


def trying(history: list[tuple[int, str]]) -> int | None:
  """Guesses one number after another, whatever the answers are."""
  return len(history) + 1 if len(history) < 10 else None


def finding(history: list[tuple[int, str]]) -> int | None:
  """Halves the remaining range, and ends once it has found the number."""
  if history and history[-1][1] == 'yes':
    return None
  low = max((guess + 1 for guess, answer in history if answer == 'too low'), default=1)
  high = min((guess - 1 for guess, answer in history if answer == 'too high'), default=100)
  return (low + high) // 2


def guessing(code, monkeypatch, tmp_path):
  """The first environment rewards a found number but not mere attempts, when played in a process as in a run."""
  (tmp_path / 'guess.py').write_text(code)
  monkeypatch.chdir(tmp_path)
  pool = EnvironmentPool('./guess.py:Guess', workers=1)
  try:
    (tool,) = pool.tools
    assert tool['function']['name'] == 'guess' and pool.gives_reward and not pool.gives_turn_rewards
    for number in range(1, 101, 9):
      outcome, answers = play(pool.all[0], number, finding)
      assert outcome == 1 and len(answers) <= 7
      outcome, answers = play(pool.all[0], number, trying)
      assert outcome == 0 and [answer.error is not None for answer in answers] == [False] * 7 + [True] * 3
    assert play(pool.all[0], 2, lambda history: None)[0] == 0
  finally:
    pool.close()


def games(code, monkeypatch, tmp_path):
  """The first environment generates games to imitate, with at most two guesses. The page has the config for them."""
  (tmp_path / 'guess.py').write_text(BLOCKS['environments', 0].code)
  (config,) = re.findall(r'^```yaml\n(.*?)^```$', PAGES['docs/environments.md'], re.M | re.S)
  (tmp_path / 'guess.yaml').write_text(config)
  monkeypatch.chdir(tmp_path)
  monkeypatch.syspath_prepend(str(tmp_path))
  monkeypatch.delitem(sys.modules, 'guess', raising=False)
  executed(code)
  monkeypatch.delitem(sys.modules, 'guess')
  played, to_play = ([json.loads(row) for row in open(f'{name}.jsonl')] for name in ('played', 'games'))
  assert [row['answer'] for row in to_play] == [25, 50, 75]
  won = [any(message['content'] == 'yes' for message in row['messages']) for row in played]
  assert (sum(won), len(won)) == (15, 27)
  assert {len(row['messages']) for row in played} == {4, 6}
  check_stages(yaml_config.get_config('guess.yaml').to_dict())


def guessing_at_a_price(code, tmp_path):
  """The second environment adds two lines to the first, by which each call has a reward of its own."""
  script = BLOCKS['environments', 0].code
  (attribute,) = re.findall(r'^  turn_reward = .*\n', code, re.M)
  (price,) = re.findall(r'^    self\.turn_reward = .*\n', code, re.M)
  for line, added in (('class Guess:\n', attribute), ('    self.tries += 1\n', price)):
    assert script.count(line) == 1
    script = script.replace(line, line + added)
  (tmp_path / 'guess.py').write_text(script)
  pool = EnvironmentPool(f'{tmp_path}/guess.py:Guess', workers=1)
  try:
    assert pool.gives_turn_rewards
    outcome, answers = play(pool.all[0], 50, finding)
    assert outcome == 1 and [answer.reward for answer in answers] == [-0.1]
  finally:
    pool.close()


def agent(code, monkeypatch):
  """The agent uses the address and the key that it is given, and sends the whole conversation with each request."""
  clients, requests = [], []

  def create(model, messages):
    requests.append([message['role'] for message in messages])
    message = types.SimpleNamespace(content=f'answer {len(requests)}')
    return types.SimpleNamespace(choices=[types.SimpleNamespace(message=message)])

  def client(base_url, api_key):
    clients.append((base_url, api_key))
    return types.SimpleNamespace(chat=types.SimpleNamespace(completions=types.SimpleNamespace(create=create)))

  monkeypatch.setitem(sys.modules, 'openai', types.SimpleNamespace(OpenAI=client))
  environment = executed(code)['Agent']()
  environment.reset(question='1+1?', answer='2', prompt=[])
  environment.play(base_url='http://127.0.0.1:1/v1', api_key='key')
  assert clients == [('http://127.0.0.1:1/v1', 'key')]
  assert requests == [['user'], ['user', 'assistant', 'user']]
  assert environment.said == 'answer 2' and environment.get_reward() == 1


EXECUTE = {
  ('environments', 0): guessing,
  ('environments', 1): games,
  ('environments', 2): guessing_at_a_price,
  ('environments', 3): agent,
  ('from_notebook_to_pod', 0): notebook,
  ('getting_started', 0): own_reward,
  ('getting_started', 1): first_run,
  ('models', 0): entry_of_a_family,
  ('models', 1): case_of_a_family,
  ('sampling', 0): sampling,
  ('watching', 0): watching,
  ('your_algorithm', 0): your_loss,
  ('your_algorithm', 1): your_check,
  ('your_model', 0): your_model,
  ('your_reward', 0): your_reward,
}


@pytest.mark.parametrize('page, n', BLOCKS, ids=lambda part: str(part))
def test_python_block_runs(page, n, request):
  """Each block has its function above, which EXECUTE names."""
  function = EXECUTE[page, n]
  fixtures = function.__code__.co_varnames[1 : function.__code__.co_argcount]
  function(BLOCKS[page, n].code, **{name: request.getfixturevalue(name) for name in fixtures})


def is_whole(code: str) -> bool:
  """Returns whether a block consists of statements, leaves nothing out, and uses no name defined elsewhere."""
  try:
    nodes = list(ast.walk(ast.parse(code)))
  except SyntaxError:
    return False
  names = [node for node in nodes if isinstance(node, ast.Name)]
  known = {node.id for node in names if isinstance(node.ctx, ast.Store)} | set(dir(builtins))
  known |= {node.arg for node in nodes if isinstance(node, ast.arg)}
  known |= {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
  for node in nodes:
    if isinstance(node, (ast.Import, ast.ImportFrom)):
      known |= {alias.asname or alias.name for alias in node.names}
  left_out = any(isinstance(node, ast.Constant) and node.value is ... for node in nodes)
  return not left_out and {node.id for node in names} <= known


def test_incomplete_blocks_are_marked_and_all_blocks_are_tested():
  """Every block without the mark can be copied as it is."""
  for where, block in BLOCKS.items():
    assert is_whole(block.code) == (not block.part), where
  assert BLOCKS.keys() == EXECUTE.keys()
  assert sum(text.count('```python') for text in PAGES.values()) == len(BLOCKS)
