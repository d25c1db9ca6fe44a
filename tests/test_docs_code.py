"""Each Python block of the documentation runs.

A block is executed as it is printed, with what a reader has there: the files, the folder, a finished run. What takes
minutes or another machine is a stand-in that checks what it is called with. A block that is only a part of a file has a
comment before it, `<!-- a part: ... -->`, which the site does not show and which says what it is a part of.
"""

import ast
import builtins
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
  """A Python block: the code, and what it is a part of ('' if it runs as it is)."""

  code: str
  part: str


def blocks(page: str) -> list[Block]:
  """Returns the Python blocks of docs/PAGE.md."""
  found = re.findall(r'(?:^<!-- a part: ([^\n]*) -->\n)?^```python\n(.*?)^```$', PAGES[f'docs/{page}.md'], re.M | re.S)
  return [Block(code, part) for part, code in found]


BLOCKS = {
  (pathlib.Path(page).stem, n): block
  for page in PAGES
  if '```python' in PAGES[page]
  for n, block in enumerate(blocks(pathlib.Path(page).stem))
}


def executed(code: str, **names: Any) -> dict[str, Any]:
  """Executes a block with these names defined, and returns all that are then."""
  exec(compile(code, 'block', 'exec'), names)
  return names


# ------------------------------------------------------------------- Python


def check_stages(config: dict):
  """Makes the checks of a launch that need no data and no model."""
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
  """Each answer of the rows on this page has its reward, and both of its configs are accepted."""
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
  """There are no weights, and tokens are given; prompts are read as those of the quickstart."""
  config = config_lib.parse(quickstart.get_config('short').to_dict())['grpo']
  policy = types.SimpleNamespace(checkpoints=['1'])
  inputs = types.SimpleNamespace(tokenizer=tokenizer_lib.load('bytes'), config=config, sources=dict(policy=policy))
  weights = inference.Weights(inputs, {}, None, 0)
  monkeypatch.setattr(inference, 'load', mock.create_autospec(inference.load, return_value=weights))
  asked = []

  def complete(weights, prompts, draws):
    asked.append((prompts, draws))
    n = len(prompts) * draws.n
    drawn = np.full((n, draws.max_new_tokens), ord('4'), np.int32)
    logprobs = np.full(drawn.shape, -0.5, np.float32)
    return Rollout(tuple(prompts), drawn, np.full(n, 2), logprobs, logprobs, np.ones(n, bool))

  monkeypatch.setattr(completions, 'complete', complete)
  executed(code)
  inference.load.assert_called_once_with(run='runs/quickstart')
  ((prompts, draws),) = asked
  assert len(prompts) == draws.n == 2 and all(isinstance(prompt, Prompt) for prompt in prompts)
  lines = capsys.readouterr().out.splitlines()
  chats = [f"[{{'role': 'user', 'content': '{text}'}}]" for text in ('17+25=', '3+4=')]
  assert lines[-4:] == [f'{chat} 44 -1.0' for chat in chats for _ in range(draws.n)]


def watching(code, monkeypatch, tmp_path, capsys):
  """It prints the rows of training of a run."""
  rows = [dict(stage='sft', split='train', step=1, loss=0.5), dict(stage='sft', split='eval', step=1, accuracy=1.0)]
  folder = tmp_path / 'runs/look'
  folder.mkdir(parents=True)
  (folder / 'metrics.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))
  monkeypatch.chdir(tmp_path)
  executed(code)
  assert capsys.readouterr().out == 'sft 1 0.5\n'


def your_loss(code):
  """It is what `Objective` takes, and gives a loss and an entropy for each token."""
  fn = Objective(executed(code)['loss'], reads=('entropy',), arrays=('advantages',)).fn
  outputs = Outputs(logprobs=np.array([[-1.0, -2.0]]), entropy=np.array([[0.1, 0.2]]))
  loss, figures = fn(outputs, {'advantages': np.array([[3.0, -1.0]])})
  assert loss.tolist() == [[3.0, -2.0]] and figures == {'entropy': outputs.entropy}


def your_reward(code):
  """A function of messages; the reward pool calls it in tests/test_docs.py."""
  said = [[{'role': 'assistant', 'content': text}] for text in ('4', '5', '?', '4')]
  found = executed(code)['right_sum'](completions=said, answer=['4', '4', '4', None], prompts=[''] * 4)
  assert found == [1.0, pytest.approx(0.1), 0.0, None]


def your_model(code, monkeypatch):
  """It is the call of docs/examples/linen_decoder.py, with two of its three rules for parameters."""
  monkeypatch.syspath_prepend(str(CLONE / 'docs/examples'))
  example = importlib.import_module('linen_decoder')
  model = executed(f'model = {code}', Decoder=example.Decoder, custom=example.custom)['model']
  axes = {path: parameter.axes for path, parameter in model.table.items()}
  assert axes['embed/embedding'] == ('vocab', 'embed')
  outs = [spec for path, spec in axes.items() if path.endswith('/out/kernel')]
  assert len(outs) == 2 and set(outs) == {('heads', None, 'embed')}


def entry_of_a_family(code):
  """An entry of a table; tests/test_new_family.py adds it."""
  module = importlib.import_module('jaxpost.formats.families')
  (family,) = executed(f'entry = {{{code}}}', **vars(module))['entry'].values()
  assert isinstance(family, module.Family)


def case_of_a_family(code):
  """Another one, of tests/test_families.py."""
  (case,) = executed(f'case = {{{code}}}', LOCAL='local', FULL='full')['case'].values()
  assert len(case) == 2


# ---------------------------------------------------------- the environments


def ask(environment: Any, verb: str, **request: Any) -> Any:
  """Returns the answer of an environment process, which has not died."""
  answer = environment.submit(verb=verb, **request).result()
  assert not answer.lost
  return answer


def play(environment: Any, number: int, policy: Callable[[list[tuple[int, str]]], int | None]) -> tuple[float, list]:
  """Plays an episode; returns the outcome, and the answers to the calls.

  Args:
    environment: a process that has the environment `Guess`.
    number: to be found.
    policy: gives the next guess after (guess, what was said to it) of those before; None ends the episode.
  """
  row = dict(answer=str(number), question='Which number?', prompt=[{'role': 'user', 'content': 'Which number?'}])
  assert ask(environment, 'reset', row=row).value == ' Between 1 and 100.'
  said, answers = [], []
  while (guess := policy(said)) is not None:
    answers.append(ask(environment, 'call', name='guess', arguments=dict(number=guess)))
    said.append((guess, answers[-1].value))
  return ask(environment, 'reward').value, answers


def trying(said: list[tuple[int, str]]) -> int | None:
  """Says one number after another, whatever the answers are."""
  return len(said) + 1 if len(said) < 10 else None


def finding(said: list[tuple[int, str]]) -> int | None:
  """Halves what is left, and ends once it has found the number."""
  if said and said[-1][1] == 'yes':
    return None
  low = max((guess + 1 for guess, answer in said if answer == 'too low'), default=1)
  high = min((guess - 1 for guess, answer in said if answer == 'too high'), default=100)
  return (low + high) // 2


def guessing(code, monkeypatch, tmp_path):
  """The first environment pays for finding, not for trying, as a process of a run plays it."""
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
    assert play(pool.all[0], 2, lambda said: None)[0] == 0
  finally:
    pool.close()


def games(code, monkeypatch, tmp_path):
  """The first environment plays the games to imitate, with at most two guesses; the page has their config."""
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
  found = [any(message['content'] == 'yes' for message in row['messages']) for row in played]
  assert (sum(found), len(found)) == (15, 27)
  assert {len(row['messages']) for row in played} == {4, 6}
  check_stages(yaml_config.get_config('guess.yaml').to_dict())


def guessing_at_a_price(code, tmp_path):
  """The second one is the first with two lines more, by which each call has a reward of its own."""
  whole = BLOCKS['environments', 0].code
  (attribute,) = re.findall(r'^  turn_reward = .*\n', code, re.M)
  (price,) = re.findall(r'^    self\.turn_reward = .*\n', code, re.M)
  for line, more in (('class Guess:\n', attribute), ('    self.tries += 1\n', price)):
    assert whole.count(line) == 1
    whole = whole.replace(line, line + more)
  (tmp_path / 'guess.py').write_text(whole)
  pool = EnvironmentPool(f'{tmp_path}/guess.py:Guess', workers=1)
  try:
    assert pool.gives_turn_rewards
    outcome, answers = play(pool.all[0], 50, finding)
    assert outcome == 1 and [answer.reward for answer in answers] == [-0.1]
  finally:
    pool.close()


def agent(code, monkeypatch):
  """It uses the address and the key that it is given, and repeats the conversation with each request."""
  made, asked = [], []

  def create(model, messages):
    asked.append([message['role'] for message in messages])
    message = types.SimpleNamespace(content=f'answer {len(asked)}')
    return types.SimpleNamespace(choices=[types.SimpleNamespace(message=message)])

  def client(base_url, api_key):
    made.append((base_url, api_key))
    return types.SimpleNamespace(chat=types.SimpleNamespace(completions=types.SimpleNamespace(create=create)))

  monkeypatch.setitem(sys.modules, 'openai', types.SimpleNamespace(OpenAI=client))
  one = executed(code)['Agent']()
  one.reset(question='1+1?', answer='2', prompt=[])
  one.play(base_url='http://127.0.0.1:1/v1', api_key='key')
  assert made == [('http://127.0.0.1:1/v1', 'key')]
  assert asked == [['user'], ['user', 'assistant', 'user']]
  assert one.said == 'answer 2' and one.get_reward() == 1


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
  ('your_model', 0): your_model,
  ('your_reward', 0): your_reward,
}


@pytest.mark.parametrize('page, n', BLOCKS, ids=lambda part: str(part))
def test_a_block_of_python_runs(page, n, request):
  """Each block of the pages has its function above."""
  function = EXECUTE[page, n]
  wanted = function.__code__.co_varnames[1 : function.__code__.co_argcount]
  function(BLOCKS[page, n].code, **{name: request.getfixturevalue(name) for name in wanted})


def is_whole(code: str) -> bool:
  """Returns whether a block consists of statements, leaves nothing out, and uses no name from elsewhere."""
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


def test_a_block_that_is_a_part_says_so():
  """Every other one can be copied as it is; no block stands where the tests above do not look."""
  for where, block in BLOCKS.items():
    assert is_whole(block.code) == (not block.part), where
  assert BLOCKS.keys() == EXECUTE.keys()
  assert sum(text.count('```python') for text in PAGES.values()) == len(BLOCKS)
