"""Processes that run untrusted or user-written code: workers that can be killed, and a sandbox.

`process` starts and kills worker processes, `call` loads and calls a reward function inside one, `user_code` describes
its errors, and `reaper` ends the workers if their parent dies. `sandbox` runs programs written by a model;
`supervisor`, `jail`, `namespaces`, `seccomp` and `runner` are its inner side. Outside of the sandbox, `dialog` judges
the programs by tests that `checks` has parsed, on plain `values` that it gets from the `solution`.

rewards/ and environments/ import from here. This room imports the standard library and jaxpost.errors. It never imports
JAX or any package that does: a worker must start in milliseconds and must not touch a device. What is graded or
played does not belong here.
"""
