"""A sample of text at every evaluation: the model continues a prompt with the likeliest tokens."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from flash_lm.config.registry import CORPORA, TASKS
from flash_lm.data.answers import CONTINUE
from flash_lm.errors import InputError
from flash_lm.training.setup import Experiment
from flash_lm.training.train_state import Params


def make_sampler(experiment: Experiment) -> Callable[[Params], str] | None:
    """Makes a function of parameters that returns the continuation of train.sample_prompt; None: there is no prompt.

    Raises:
        InputError: the model does not continue texts, or prompt and sample are longer than it can read.
    """
    config, tokenizer = experiment.config, experiment.corpus.tokenizer
    prompt, count = config.train.sample_prompt, config.train.sample_tokens
    if not prompt:
        return None
    abstract = experiment.model.abstract
    if TASKS[config.task].answers is not CONTINUE or CORPORA[config.data.corpus].answers != "text" or abstract.encoder:
        raise InputError(
            f"train.sample_prompt is for models that continue a text, not task={config.task} with data.corpus="
            f"{config.data.corpus}: leave it empty"
        )
    try:
        abstract.check_decodable()
        ids = np.concatenate([[tokenizer.begin], *tokenizer.encode([prompt])]).astype(np.int32)
        capacity = len(ids) + count
    except InputError as error:
        raise InputError(f"train.sample_prompt: {error}: leave it empty") from None
    if capacity > config.model.max_length:
        raise InputError(
            f"train.sample_prompt has {len(ids)} tokens, and with train.sample_tokens={count} that is more than "
            f"model.max_length={config.model.max_length}: shorten one of them"
        )

    @jax.jit
    def sample(params: Params) -> jax.Array:
        model = experiment.model.bind(params)
        lengths_B = jnp.full(1, len(ids), jnp.int32)
        logits_BxV, state = model.prefill_last(jnp.asarray(ids)[None], model.init_state(1, capacity), lengths_B)

        def step(carry, _):
            logits_BxV, state = carry
            tokens_B = jnp.argmax(logits_BxV, axis=-1).astype(jnp.int32)
            return model.step(tokens_B, state), tokens_B[0]

        return jax.lax.scan(step, (logits_BxV, state), length=count)[1]

    def text(params: Params) -> str:
        new = jax.device_get(sample(params)).tolist()
        end = new.index(tokenizer.end) if tokenizer.end in new else len(new)
        return tokenizer.decode(new[:end])

    return text
