"""Shows on stderr what a command is doing; stdout has only its results.

Imports no JAX, because it is used before JAX is imported. On a terminal, nothing may be printed on stdout at the same
time, because the status line would interfere with it.
"""

from jaxpost.monitor import activity

working = activity.Activity(activity.Console(stderr=True))
