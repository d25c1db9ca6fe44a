"""Shows on stderr what a command does while it prints nothing else, as stdout has its results alone.

Imports no JAX, as it is shown before JAX is imported. On a terminal nothing may be printed on stdout meanwhile, as the
line that shows it would take that up.
"""

from jaxpost.monitor import activity

working = activity.Activity(activity.Console(stderr=True))
