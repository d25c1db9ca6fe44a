"""The chat template that the flags of a command choose, over that of the weights."""

from jaxpost.data import messages
from jaxpost.data import tokenizer as tokenizer_lib
from jaxpost.data.tokenizer import Tokenizer
from jaxpost.errors import InputError


def apply(tokenizer: Tokenizer, template: str, kwargs: str) -> Tokenizer:
  """Returns the tokenizer with another chat template and its stop tokens, and with variables of the template.

  Args:
    template: as config.data.chat_template; '' keeps that of the tokenizer. Variables keep their values.
    kwargs: a JSON object; '' changes no variable.
  """
  if template:
    try:
      tokenizer = tokenizer_lib.load(tokenizer.source, template).with_template_kwargs(tokenizer.template_kwargs)
    except InputError as error:
      raise InputError(str(error).replace('config.data.chat_template', '--chat_template')) from error
  if not kwargs:
    return tokenizer
  parsed = {'chat_template_kwargs': messages.parse_json(kwargs, '--template_kwargs')}
  return tokenizer.with_template_kwargs(messages.template_kwargs_of(parsed, '--template_kwargs'))
