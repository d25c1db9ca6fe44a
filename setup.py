"""Packaging of jaxpost: `pip install -e .` in a clone, or a wheel.

`launch/` and `configs/` stay at the top of the clone, where people look for
them, and install as `jaxpost.launch` and `jaxpost.configs`, so that no
package of a generic name is installed.
"""

import pathlib

import setuptools

README = pathlib.Path(__file__).resolve().parent / 'README.md'

# Neither torch nor tensorflow comes in by any of these, but torch by `parity`.
# jax 0.10.2 is the last release for Python 3.11; from jax 0.11.1 on, flax has
# to be 0.12.9 or newer, and that flax needs Python 3.12.
# The upper bounds exclude releases that may remove what is used here; fsspec has
# a calendar for a version. constraints/ has exact versions that were tested.
CORE = [
  'absl-py>=2.1,<3',
  'etils[epath]>=1.9,<2',
  'flax>=0.12,<0.13; python_version < "3.12"',
  'flax>=0.12.9,<0.13; python_version >= "3.12"',
  'fsspec>=2024.6',
  'grain>=0.2.12,<0.3',
  'h11>=0.16,<1',  # huggingface_hub needs it, too
  'huggingface_hub>=1.0,<3',
  'jax>=0.10.2,<0.13',
  'jinja2>=3.1.4,<4',
  'ml-collections>=1.0,<2',
  'ml-dtypes>=0.5,<1',
  'numpy>=2.0,<3',
  'optax>=0.2.6,<0.3',
  'orbax-checkpoint>=0.12.3,<0.13',
  'pyyaml>=6.0,<7',
  'rich>=13.7,<16',
  'safetensors>=0.5,<1',
  'scipy>=1.13,<2',  # jax needs it, too
  'tensorboardX>=2.6.2,<3',
  'tokenizers>=0.22,<1',
  'transformers>=5.0,<6',
]

DATA = ['array-record>=0.8', 'datasets>=4.0', 'pyarrow>=17']
NOTEBOOK = ['ipykernel>=6.29', 'matplotlib>=3.9', 'nbclient>=0.10', 'nbformat>=5.10']

EXTRAS = {
  'tpu': ['jax[tpu]'],
  'plan': ['jax[tpu]'],  # libtpu compiles for TPUs that are not there
  'cuda': ['jax[cuda13]'],
  'cuda12': ['jax[cuda12]'],  # for older drivers
  'data': DATA,
  'math': ['math-verify>=0.8'],
  'notebook': NOTEBOOK,
  'rewards': ['jsonschema>=4.18', 'referencing>=0.30'],
  # Needs TensorFlow. The PyPI name `jetstream` is another project.
  'jetstream': ['google-jetstream==0.2.2'],
  'pathways': ['pathwaysutils>=0.1'],
  'docs': ['furo>=2025.9', 'myst-nb>=1.4', 'sphinx>=8.2', 'sphinx-design>=0.6'],  # the site
  'gcs': ['gcsfs>=2024.6'],  # gs:// folders
  's3': ['s3fs>=2024.6'],  # s3:// folders
  'wandb': ['wandb>=0.19,<1'],
  'trackio': ['trackio>=0.20,<1'],
  'mlflow': ['mlflow>=3.0,<4'],
  # For the tests that compare with it; peft needs torch.
  'parity': ['peft>=0.17', 'torch>=2.6'],
  'test': [
    'chex>=0.1.90',
    'hypothesis>=6.100',
    'pytest>=8.3',
    'pytest-xdist>=3.6',
    'pyyaml>=6.0',
    'mypy>=1.11',
    'ruff>=0.8',
    *NOTEBOOK,
    'array-record>=0.8',
    'jsonschema>=4.18',
    'math-verify>=0.8',
    'pyarrow>=17',
    'referencing>=0.30',
  ],
}

setuptools.setup(
  name='jaxpost',
  version='0.1.0',
  description='Post-training of large language models, native to JAX',
  long_description=README.read_text('utf-8') if README.exists() else '',
  long_description_content_type='text/markdown',
  license='Apache-2.0',
  license_files=['LICENSE'],
  python_requires='>=3.11,<3.14',
  install_requires=CORE,
  extras_require=EXTRAS,
  packages=[*setuptools.find_packages(include=['jaxpost', 'jaxpost.*']), 'jaxpost.launch', 'jaxpost.configs'],
  package_dir={'jaxpost.launch': 'launch', 'jaxpost.configs': 'configs'},
  package_data={
    'jaxpost': [
      'data/templates/*.jinja',
      'hardware/chips.toml',
      'models/presets.toml',
      'planning/gpu_target.pbtxt',
      'monitor/alerts.toml',
      'monitor/report.css',
      'monitor/curves.toml',
      'monitor/report.html.jinja',
      'monitor/titles.toml',
      'stage/field_names.toml',
      'tools/compare.html.jinja',
      'tools/convert.toml',
      'tools/convert_defaults.toml',
      'tools/view.html',
    ],
    'jaxpost.launch': ['templates/*'],
  },
  entry_points={'console_scripts': ['jaxpost = jaxpost.launch.main:main']},
)
