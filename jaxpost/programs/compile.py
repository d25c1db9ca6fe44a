"""Ahead-of-time compiled programs, and the ledger of what was compiled."""

import contextlib
import dataclasses
import logging
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxpost.distributed import coordination
from jaxpost.errors import InputError
from jaxpost.hardware import memory as memory_lib
from jaxpost.types import Batch


class TooLargeError(InputError):
  """A program needs more memory, `needed` bytes, than a device has; `ending` ends the message."""

  def __init__(self, program: str, needed: int, ending: str):
    super().__init__(f'{program} needs {needed / 2**30:.1f} GiB of memory{ending}')
    self.program, self.needed, self.ending = program, needed, ending


@dataclasses.dataclass
class Ledger:
  """All compilations of a run, which `plan.json` and the plan table show."""

  rows: list[dict] = dataclasses.field(default_factory=list)
  sealed: bool = False  # the first step is over: further compilations log a warning
  dry: bool = False  # for plans: nothing runs, and calls return `jax.ShapeDtypeStruct`s of the outputs
  look: Callable | None = None  # (name, compiled, args, calls_per_step) -> more columns of a row
  options: dict | None = None  # of the compiler
  only: tuple = ()  # names of the programs that are compiled; (): all
  announce: Callable = lambda *_: contextlib.nullcontext()  # (name, number, `planned`) -> context of a compilation
  begun: list[str] = dataclasses.field(default_factory=list)  # names of the compilations so far
  planned: int = 0  # upper bound of the compilations before the end of the first step; 0: not known yet

  def begin(self, name: str) -> contextlib.AbstractContextManager:
    """Announces a compilation, which has to run inside of the returned context."""
    self.begun.append(name)
    return self.announce(name, len(self.begun), self.planned and max(self.planned, len(self.begun)))

  def add(self, name: str, args: tuple, seconds: float, compiled: Any, flops: Any, calls: int, read: int) -> None:
    """Adds the row of a program that took `seconds` to compile; warns after the first step."""
    memory, shapes = compiled.memory_analysis(), describe(args)
    self.rows.append(
      dict(
        program=name,
        shapes=shapes,
        compile_s=round(seconds, 3),
        flops=flops,
        calls_per_step=calls,
        read=read,
        device=min(d.id for x in jax.tree.leaves(compiled.output_shardings)[:1] for d in x.device_set),
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        batch_bytes=sum(memory_lib.size(x) for x in args if isinstance(x, Batch)),
        **(self.look(name, compiled, args, calls) if self.look else {}),
      )
    )
    if self.sealed:
      logging.warning('compiled %s for new shapes %s after the first step (%.1f s)', name, shapes, seconds)

  def seal(self) -> None:
    """Ends the first step: compilations from now on log a warning."""
    self.sealed = True


@dataclasses.dataclass(eq=False)
class Program:
  """A jitted function that is compiled once per set of argument shapes and shardings.

  Attributes:
    name: the name in the plan table and in profiles.
    fn: function of arrays only; everything static is closed over.
    out_shardings: as for `jax.jit`, or a function from the shapes of the outputs to their shardings.
    donate: positions of arguments whose buffers the outputs may reuse.
    flops: arguments -> analytic FLOPs of a call (XLA's own count includes the body of a loop only once).
    calls_per_step: how often the enclosing operation calls this program.
    read: cache entries of a slot that decoding attends to; 0: those that are filled.
  """

  name: str
  fn: Callable
  ledger: Ledger
  out_shardings: Any
  _: dataclasses.KW_ONLY
  donate: tuple[int, ...] = ()
  flops: Callable | None = None
  calls_per_step: int = 1
  read: int = 0
  _compiled: dict[Any, Callable] = dataclasses.field(default_factory=dict, init=False, repr=False)

  def __call__(self, *args):
    return self.compile(*args)(*args)

  def compile(self, *args: Any) -> Callable:
    """Compiles for arrays or `jax.ShapeDtypeStruct`s (with shardings), and returns the compiled function."""
    if self.ledger.only and self.name not in self.ledger.only:
      return self.outputs
    leaves, tree = jax.tree.flatten(args)
    key = tree, tuple((x.shape, x.dtype, x.sharding) for x in leaves)
    if key not in self._compiled and coordination.process_count() > 1:
      outputs = self.outputs(*args)
      if not any(x.sharding.addressable_devices for x in jax.tree.leaves(outputs)):  # all are of other processes
        without_shards = jax.tree.map(
          lambda x: jax.make_array_from_single_device_arrays(x.shape, x.sharding, [], dtype=x.dtype), outputs
        )
        self._compiled[key] = lambda *args: without_shards
    if key not in self._compiled:
      start = time.perf_counter()
      with self.ledger.begin(self.name):
        abstract = jax.tree.map(_abstract, args)
        jitted = jax.jit(self.fn, donate_argnums=self.donate, out_shardings=self._shardings(abstract))
        try:
          compiled = jitted.lower(*abstract).compile(options(leaves, self.ledger.options))
        except jax.errors.JaxRuntimeError as error:  # XLA for TPUs compiles no program that is too large
          if needed := re.search(r'RESOURCE_EXHAUSTED.*?(?:temporaries \(|Used )([\d.]+)G', str(error)):
            raise TooLargeError(self.name, int(float(needed[1]) * 2**30), ', more than XLA compiles for') from error
          raise
      flops = self.flops(*args) if self.flops else None
      seconds = time.perf_counter() - start
      self.ledger.add(self.name, args, seconds, compiled, flops, calls=self.calls_per_step, read=self.read)
      self._compiled[key] = self.outputs if self.ledger.dry else compiled
    return self._compiled[key]

  def outputs(self, *args: Any) -> Any:
    """Returns the outputs as `jax.ShapeDtypeStruct`s with shardings, to compile programs that take them."""
    abstract = jax.tree.map(_abstract, args)
    shapes = jax.eval_shape(self.fn, *abstract)
    shardings = self._shardings(abstract)
    return jax.tree.map(
      lambda s, part: jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), part),
      shardings,
      shapes,
    )

  def _shardings(self, abstract):
    out = self.out_shardings
    return out(jax.eval_shape(self.fn, *abstract)) if callable(out) else out


def options(arguments: Sequence[Any], of_run: dict | None = None) -> dict | None:
  """Returns the compiler options of a program for the devices of its arguments; `of_run` are those of all programs."""
  device = next((d for x in arguments for d in x.sharding.device_set), None)
  if getattr(device, 'platform', '') != 'gpu':
    return of_run
  from jaxpost.hardware import gpu_options

  return gpu_options.of_program(arguments, of_run or {})


def _abstract(x):
  return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)


def describe(args: tuple) -> str:
  """Returns the distinct shapes of the arguments other than parameters, in at most 80 characters."""
  data = [arg for arg in args[1:] if not isinstance(arg, dict)]
  shapes = [x.shape for x in jax.tree.leaves(data) if x.ndim > 1]
  return ' '.join(str(list(s)) for s in dict.fromkeys(shapes))[:80]
