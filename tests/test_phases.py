"""`distributed.phases.order_devices`: which axis of a mesh crosses hosts and slices, for described TPUs and GPUs."""

import dataclasses
import itertools

import numpy as np
import pytest

from jaxpost.distributed import phases
from jaxpost.distributed.mesh import AXES
from jaxpost.distributed.phases import parse_mesh
from jaxpost.errors import InputError


@dataclasses.dataclass(frozen=True)
class Device:
  """The attributes of a JAX device that decide its place in a mesh."""

  id: int
  process_index: int
  coords: tuple = (0, 0, 0)
  slice_index: int = 0
  platform: str = 'tpu'
  device_kind: str = 'TPU v5 lite'
  core_on_chip: int = 0


def tpus(x, y, z=1, slices=1, kind='TPU v5 lite'):
  """Slices of x * y * z chips in the order of JAX; each host has 2 x 2 of them."""
  devices = []
  for s, k, j, i, b, a in itertools.product(range(slices), range(z), range(y // 2), range(x // 2), (0, 1), (0, 1)):
    devices.append(Device(len(devices), len(devices) // 4, (2 * i + a, 2 * j + b, k), s, device_kind=kind))
  return devices


def gpus(hosts, each=8):
  return [Device(n, n // each, platform='gpu', device_kind='NVIDIA H200') for n in range(hosts * each)]


def placed(devices, mesh):
  """(array of the devices in their mesh, {axis name: axis of the array})."""
  sizes = parse_mesh(mesh, len(devices), 'config.mesh.train')
  ordered = phases.order_devices(devices, tuple(sizes.values()))
  assert ordered.shape == tuple(sizes.values())
  assert {d.id for d in ordered.flat} == {d.id for d in devices}
  return ordered, {axis: at for at, axis in enumerate(AXES)}


def along(ordered, axis):
  """[lines, size of the axis]: in each line, the devices differ in this axis only."""
  return np.moveaxis(ordered, axis, -1).reshape(-1, ordered.shape[axis])


# Mesh on 4 slices of 4 x 4 chips -> the axis that crosses the network between slices.
CROSSES = {
  'data=4,fsdp=16': 'data',
  'data=4,fsdp=4,tensor=4': 'data',
  'data=8,fsdp=8': 'data',
  'fsdp=64': 'fsdp',
  'fsdp=16,tensor=4': 'fsdp',
  'data=2,fsdp=32': 'fsdp',
  'fsdp=8,expert=2,context=2,tensor=2': 'fsdp',
  'data=2,fsdp=2,tensor=16': 'tensor',
}


@pytest.mark.parametrize('kind', ['TPU v5 lite', 'TPU v4'])
@pytest.mark.parametrize('mesh', CROSSES)
def test_outermost_axis_that_fits_crosses_slices(mesh, kind):
  devices = tpus(4, 4, slices=4, kind=kind)
  ordered, axes = placed(devices[::-1], mesh)
  slow = axes[CROSSES[mesh]]
  for at in axes.values():
    for line in along(ordered, at):
      slices = [d.slice_index for d in line]
      if at != slow:
        assert len(set(slices)) == 1, (mesh, at)
      else:  # slices are in order, so that a ring crosses from each to the next only once
        assert slices == sorted(slices) and set(slices) == set(range(4))


@pytest.mark.parametrize('mesh', ['fsdp=4,tensor=4', 'fsdp=16', 'data=2,fsdp=2,tensor=4'])
def test_innermost_axis_goes_from_neighbor_to_neighbor(mesh):
  """Not in the order of their ids, as the chips of a slice are numbered host by host."""
  devices = tpus(4, 4)
  ordered, _ = placed(devices, mesh)
  inner = max(at for at, n in enumerate(ordered.shape) if n > 1)

  def steps(order):
    return {
      sum(abs(a - b) for a, b in zip(x.coords, y.coords))
      for line in along(order, inner)
      for x, y in zip(line, line[1:])
    }

  assert steps(ordered) == {1}
  assert steps(np.array(devices).reshape(ordered.shape)) > {1}


@pytest.mark.parametrize(
  'mesh, inside',
  [
    ('data=2,fsdp=2,tensor=8', ['tensor']),
    ('fsdp=4,tensor=8', ['tensor']),
    ('data=4,fsdp=8', ['fsdp']),
    ('fsdp=4,context=2,tensor=4', ['context', 'tensor']),
    ('fsdp=-1', []),
  ],
)
def test_inner_axes_stay_within_a_host_of_gpus(mesh, inside):
  ordered, axes = placed(gpus(4), mesh)
  for axis in AXES:
    hosts = [len({d.process_index for d in line}) for line in along(ordered, axes[axis])]
    if ordered.shape[axes[axis]] == 1 or axis in inside:
      assert set(hosts) == {1}, axis
    else:
      assert set(hosts) == {min(4, ordered.shape[axes[axis]])}, axis


def test_a_phase_may_have_some_of_the_slices():
  ordered, axes = placed(tpus(4, 4, slices=3)[16:], 'data=2,fsdp=16')
  assert [d.slice_index for d in along(ordered, axes['data'])[0]] == [1, 2]


HOLES = [d for d in tpus(4, 4, slices=2) if d.id % 16 < 12]


@pytest.mark.parametrize(
  'devices, mesh, message',
  [
    (
      tpus(2, 2, slices=8),
      'data=4,fsdp=4,tensor=2',
      "no axis of {'data': 4, 'fsdp': 4, 'expert': 1, 'context': 1, 'tensor': 2}"
      ' is a multiple of the 8 slices; data or fsdp should be',
    ),
    (
      tpus(4, 4, slices=2)[:24],
      'fsdp=24',
      '24 devices of a phase, [16, 8] by slice, have no order in a mesh (do '
      'they fill equal blocks?): Number of devices 16 must equal',
    ),
    (tpus(4, 4)[:12], 'fsdp=12', '12 devices of a phase, [12] by slice, have no order in a mesh'),
    (HOLES, 'data=2,fsdp=12', '24 devices of a phase, [12, 12] by slice, have no order in a mesh'),
  ],
  ids=['axes', 'uneven', 'hole', 'holes'],
)
def test_mesh_that_does_not_fit_slices_is_refused(devices, mesh, message):
  with pytest.raises(InputError) as caught:
    placed(devices, mesh)
  line = str(caught.value)
  assert line.startswith('config.mesh: ' + message) and '\n' not in line
  assert len(line) < 300
