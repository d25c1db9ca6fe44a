"""The figures of golden/losses.json: `INPUTS`, and in `CASES` what other libraries computed from them, in float32."""

import functools
import json
import pathlib

import numpy as np

_GOLDEN = json.loads((pathlib.Path(__file__).parent / 'golden' / 'losses.json').read_text())
INPUTS = {k: np.array(v, np.float32) for k, v in _GOLDEN['inputs'].items()}
CASES = _GOLDEN['cases']
close = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-6)
