"""Families of `transformers` that are refused by name, and the feature each needs that is not implemented here."""

# model_type of a text model, or of the folder that holds it -> the missing feature.
NEEDED = {
  'deepseek_v2': 'groups of experts that are ranked by their best expert',
  'falcon_h1': 'attention and Mamba-2 side by side in each layer',
  'jamba': 'Mamba-1, whose decay differs by channel',
  'zamba2': 'one block of attention for several layers',
  'minimax': 'linear attention with a fixed decay (lightning attention)',
  'gemma3n_text': 'several residual streams (AltUp) and low-rank layers beside attention (LAuReL)',
  'apertus': 'an activation with trained parameters (xIELU)',
}
NEEDED |= {'gemma3n': NEEDED['gemma3n_text']}
