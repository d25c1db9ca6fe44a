"""`--topology=NAME`: machines described by name, whose devices need not exist here."""

import dataclasses
import math
import os
import pathlib
import re
from typing import Any

from jaxpost.errors import InputError, did_you_mean
from jaxpost.hardware import host
from jaxpost.hardware.chips import CHIPS, TARGETS, Chip, before_ampere, of_kind

# GiB of a TPU that its compiler reserves.
_RESERVED = {'v4': 1.25, 'v5e': 0.25, 'v6e': 0.75, 'tpu7x': 1.25}
# Describes an absent GPU to the compiler (GpuTargetConfigProto); braces are doubled for str.format.
_TARGET = pathlib.Path(__file__).with_name('gpu_target.pbtxt')
FORMS = '8xH100, h100:8, h200:1x8x8 (slices x hosts x GPUs of a host), v5e-16 or v5e:4x4'
_MACHINE = re.compile('(?:([1-9][0-9]*)x)?([a-z][a-z0-9_]*)(?:([-:])([1-9][0-9]*(?:x[1-9][0-9]*)*))?')
_OTHER_NAMES = {'a100': 'a100_80gb', 'a100_40gb': 'a100', 'v5litepod': 'v5e'}
_HOST = 8  # GPUs of a host


@dataclasses.dataclass(frozen=True)
class Topology:
  """A described machine.

  size: chips along each dimension; of GPUs slices, hosts, GPUs a host.
  owned: the devices of this process, if the machine is real.
  """

  text: str
  name: str
  chip: Chip
  size: tuple[int, ...]
  slices: int = 1
  owned: tuple = ()

  @property
  def chips(self) -> int:
    return math.prod(self.size) * self.slices

  @property
  def devices(self) -> int:
    """Number of devices that JAX shows; each owned device counts as one."""
    return len(self.owned) or self.chips * self.chip.devices

  @property
  def gpu(self) -> bool:
    return not self.local and not self.chip.kind.startswith('TPU')

  @property
  def before_ampere(self) -> bool:
    """True for GPUs without bfloat16 and without Triton support in XLA."""
    return any(map(before_ampere, self.owned[:1])) or not self.chip.bfloat16

  @property
  def memory(self) -> float:
    """Bytes of a device that JAX may take, as reported by owned devices; 0 if unknown."""
    if self.owned:
      return self.chip.memory
    return self.chip.memory * (host.GPU_SHARE if self.gpu else 1) - _RESERVED.get(self.name, 0) * 2**30

  @property
  def local(self) -> bool:
    return self.name == 'cpu'


def here(devices: list) -> Topology:
  """Returns the machine of these devices; of an unknown chip, only the memory is known."""
  local_device = next(d for d in devices if d.process_index == devices[0].client.process_index())
  kind, stats = local_device.device_kind, local_device.memory_stats()  # not available for devices of other processes
  chip = of_kind(kind) or Chip(kind, 0.0)
  if stats:
    chip = dataclasses.replace(chip, memory=stats.get('bytes_limit', chip.memory))
  name = next((name for name, known in CHIPS.items() if known.kind == chip.kind), local_device.platform)
  slices = {d.slice_index for d in devices if d.platform == 'tpu'}
  groups = max(1, len(slices))
  return Topology(f'{len(devices)} x {kind}', name, chip, (len(devices) // groups,), groups, owned=tuple(devices))


def price(text: str) -> float:
  """Parses US dollars per chip and hour; InputError unless they are a number from 0."""
  try:
    usd = float(text)
  except ValueError:
    usd = math.nan
  if not 0 <= usd < math.inf:
    raise InputError(
      f'--price: {text!r}: write US dollars per chip and hour, as in 1.5; with --fits also as H100=2.5,v5e-8=1.2'
    )
  return usd


def parse(text: str, slices: int = 1, *, flag: str = '--topology', compiled: bool = True) -> Topology:
  """Parses one of FORMS; an InputError lists them all.

  Args:
    text: '8xH100' or 'h100:8' (one slice), 'h100:1x1x8' (slices x hosts x GPUs of a host), 'v5e-16' (a slice as the
      cloud names it), 'v5e:4x4', 'cpu:8'.
    slices: of TPUs.
    flag: the command-line flag to name in errors.
    compiled: accept only chips that programs can be compiled for, not all known ones.
  """
  match = _MACHINE.fullmatch(text.lower())
  count, name, separator, size = match.groups('') if match else ('', text.lower().partition(':')[0], '', '')
  name = _OTHER_NAMES.get(name, name)
  supported = [n for n, c in CHIPS.items() if not compiled or c.largest or n in TARGETS] + ['cpu'] * compiled
  if name not in supported:
    hint = did_you_mean(name, supported, 0.4)
    raise InputError(f'{flag}: {text!r}: there is no chip {name!r}; {hint}known: {", ".join(supported)}; write {FORMS}')
  numbers = tuple(int(n) for n in size.split('x')) if size else ()
  dashed = separator == '-'
  if name == 'cpu':
    if not match or count or dashed or len(numbers) > 1 or slices != 1:
      raise InputError(f'{flag}: {text!r}: write cpu, or cpu:8 for 8 pretended devices')
    return Topology(text, name, Chip('cpu', 0.0), numbers or (1,))
  chip = CHIPS[name]
  is_gpu = not chip.largest
  if is_gpu and slices != 1:
    raise InputError(f'--slices: of GPUs they are the first number of {flag}, as in {name}:{slices}x8x8')
  numbers, problem = (_gpus if is_gpu else _tpus)(name, numbers, count, dashed)
  if problem or not match:
    raise InputError(f'{flag}: {text!r}: {problem or "is none of the forms"}; write {FORMS}')
  return Topology(text, name, chip, numbers, slices)


def _gpus(name: str, numbers: tuple[int, ...], count: str, dashed: bool) -> tuple[tuple[int, ...], str]:
  """Returns (slices, hosts, GPUs of a host), and the problem or ''."""
  chip = CHIPS[name]
  counted_twice = bool(count and numbers)  # as in 8xH100:8
  if dashed or counted_twice or len(numbers) not in (0, 1, 3):
    return (), f'GPUs are one number, or slices x hosts x GPUs of a host, as in {name}:1x8x8'
  if len(numbers) < 3:
    number = int(count or (numbers or (1,))[0])
    if number > _HOST and number % _HOST:
      return (), f'several hosts have {_HOST} GPUs each'
    numbers = 1, max(1, number // _HOST), min(number, _HOST)
  if not chip.link and numbers[-1] > 1 or not chip.network and math.prod(numbers[:-1]) > 1:
    return (), f'how fast so many {name} are connected is not known'
  return numbers, ''


def _tpus(name: str, numbers: tuple[int, ...], count: str, dashed: bool) -> tuple[tuple[int, ...], str]:
  """Returns the chips along each dimension, and the problem or ''."""
  largest = CHIPS[name].largest
  if dashed:
    sizes = _slices(name)
    if len(numbers) != 1 or numbers[0] not in sizes:
      return (
        (),
        f'a slice {name}-N has N of {", ".join(map(str, sizes))}; others have a size, as {name}:{_text(largest)}',
      )
    return sizes[numbers[0]], ''
  if count or len(numbers) != len(largest):
    return (), f'a size of {name} has {len(largest)} numbers, as in {name}:{"16x16" if len(largest) == 2 else "8x8x8"}'
  if math.prod(numbers) > math.prod(largest):
    return (), f'the largest slice of {name} is {_text(largest)}; --slices=N joins several'
  return numbers, ''


def _slices(name: str) -> dict[int, tuple[int, ...]]:
  """Returns {number in the cloud's name of a TPU slice: chips along each dimension}."""
  largest, out = CHIPS[name].largest, {}
  rank = len(largest)
  for power in range(math.prod(largest).bit_length()):
    size = [2 ** ((power + i) // rank) for i in range(rank)]
    if power != 1 and (power or rank == 2) and max(size) <= max(largest):
      out[2**power * _cores(name)] = tuple(sorted(size, key=lambda n: (n == 1, n)))
  return out


def _cores(name: str) -> int:
  """Returns what a chip adds to the number in a slice's name: some names count cores."""
  return 2 if name in ('v4', 'v5p', 'tpu7x') else 1


def _text(size: tuple[int, ...]) -> str:
  return 'x'.join(map(str, size))


def spell(machine: Topology) -> str:
  """Returns the shortest name of a machine of one slice that `parse` reads, such as '8xH100' or 'v5e-16'."""
  number = machine.chips
  if machine.gpu:
    kind = {v: k for k, v in _OTHER_NAMES.items()}.get(machine.name, machine.name).upper()
    short = f'{number}x{kind}' if number > 1 else kind
    is_standard = machine.size == (1, max(1, number // _HOST), min(number, _HOST))
  else:
    number *= _cores(machine.name)
    short, is_standard = f'{machine.name}-{number}', _slices(machine.name).get(number) == machine.size
  return short if is_standard else f'{machine.name}:{_text(machine.size)}'


def set_environment(topology: Topology) -> None:
  """Sets the environment for described devices; called before JAX starts, so that it uses no accelerator."""
  os.environ['JAX_PLATFORMS'] = 'cpu'
  os.environ['TPU_SKIP_MDS_QUERY'] = '1'
  os.environ['ALLOW_MULTIPLE_LIBTPU_LOAD'] = '1'  # several plans at a time
  for name in ('TF_CPP_MIN_LOG_LEVEL', 'TPU_STDERR_LOG_LEVEL', 'TPU_MIN_LOG_LEVEL'):
    os.environ.setdefault(name, '3')
  if not topology.local:  # compiled programs cannot be loaded here
    os.environ['JAX_ENABLE_COMPILATION_CACHE'] = 'false'
  if topology.local and topology.chips > 1:
    os.environ['XLA_FLAGS'] = (
      os.environ.get('XLA_FLAGS', '') + f' --xla_force_host_platform_device_count={topology.chips}'
    )


def _describe_gpu() -> None:
  """Makes JAX 0.11 and later compile Triton kernels without a GPU."""
  import jax

  if jax.__version_info__ < (0, 11):
    return
  from jax._src.pallas.triton import gpu_info  # private: the public way needs a mesh around the whole lowering

  ampere = gpu_info.GpuInfo(gpu_version=gpu_info.GpuVersion.A100, arch_name='8.0', compute_capability=80)
  gpu_info.registry['cpu'] = lambda: ampere  # lowering needs no more; XLA compiles for the described chip


def devices(topology: Topology) -> list:
  """Returns the devices as JAX describes them to its compilers."""
  import jax  # after `set_environment`

  if topology.owned:
    return list(topology.owned)
  if topology.local:
    cpus = jax.devices('cpu')
    if len(cpus) < topology.chips:
      raise InputError(
        f'--topology: {topology.text}: JAX has started with {len(cpus)} devices; run launch.plan, which sets their '
        'number before JAX starts, as a notebook cannot'
      )
    return cpus[: topology.chips]
  from jax.experimental import topologies

  chip, size = topology.chip, _text(topology.size)
  try:
    if topology.gpu:
      _describe_gpu()
      figures = TARGETS[topology.name] | dict(memory=int(chip.memory), bandwidth=int(chip.bandwidth))
      target = _TARGET.read_text().format(kind=chip.kind, **figures)
      return topologies.get_topology_desc(topology.name, 'cuda', topology=size, target_config=target).devices
    options: dict[str, Any] = {'num_slices': topology.slices} if topology.slices > 1 else {}
    host_size = [math.gcd(n, 2) for n in topology.size[:2]]  # 2 x 2 chips, unless the slice does not split into these
    if 1 in host_size:
      options['chips_per_host_bounds'] = [*host_size, 1]
    if topology.name == 'v4':  # both cores of a chip as one device
      options['chip_config_name'] = 'megacore'
    return topologies.get_topology_desc(f'{topology.name}:{size}', 'tpu', **options).devices
  except (jax.errors.JaxRuntimeError, RuntimeError, ImportError) as e:
    package = "'jax[cuda13]'" if topology.gpu else "-e '.[plan]' in a clone, or 'jax[tpu]'"
    reason = str(e).splitlines()[0]
    hint = f'the compiler comes with pip install {package} and needs no device; launch.plan --fits uses arithmetic'
    if 'INVALID' in reason:
      hint = f'choose another size ({FORMS})'
    raise InputError(f'--topology: {topology.text}: {reason}; {hint}') from e


def compiler_options(topology: Topology) -> dict | None:
  """Returns compiler options without autotuning for described GPUs; None for others."""
  described = topology.gpu and not topology.owned
  return {'xla_gpu_autotune_level': 0} if described else None
