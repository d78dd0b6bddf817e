"""Config of the quality study: quality against step time of sixteen models. README.md has its design.

python -m studies.quality.data $DATA --out=runs/study/data
python -m studies.quality --workdir=runs/study --corpus=runs/study/data --out=runs/study/results
python -m studies.quality --out=runs/study/results    # tables and pictures, from the lines
"""

import pathlib

from ml_collections import ConfigDict

from flash_lm.configs import quickstart
from studies.protocol.hypotheses import Hypothesis
from studies.quality.run import Part

TITLE = "Quality against time, each model at its best learning rate"
SHARES_OF_TEXT = (("books", 0.4), ("wiki", 0.4), ("imdb", 0.2))
TUNING_STEPS = 320
MOST_ADDED = 1.5  # factor by which new layers may raise the deviation of the residual stream without residual_init
WORDS = 4096  # size of the vocabulary

_SCORES = {"model.divides": "scores"}  # FLASH's default today; the first models were made before that
# Most models start with a smaller last map in each sublayer (get_config). Those whose layers together add little to
# the residual stream start as initialised: most gated attention units. A test measures it; studies/quality/README.md
# says why.
_AS_INIT, _DEPTH = ({"model.residual_init": x} for x in ("as_init", "depth"))
_TABLES = {"model.max_length": 512}  # positions are parameters: one per token of a sequence
_HYBRID = ("gated_deltanet",) * 3 + ("transformer_plus_plus",)
# Sizes agree within 3 %: where positions have a table, or a family is larger, its widths are smaller.
MODELS = {
    "transformer": _TABLES | {"model.mlp_dim": 448},
    "transformer_plus": {},
    "transformer_plus_plus": {},
    "flash_quad": _AS_INIT | {"model.gau.expanded_dim": 232},
    "flash": _AS_INIT | {"model.gau.expanded_dim": 232},
    "flash_quad_scores": _AS_INIT | _SCORES | {"model.family": "flash_quad", "model.gau.expanded_dim": 232},
    "flash_scores": _AS_INIT | _SCORES | {"model.family": "flash", "model.gau.expanded_dim": 232},
    "mc_tfm": {},
    "aft_local": _TABLES | {"model.aft.bias_dim": 32, "model.mlp_dim": 320},
    "aft_conv": _TABLES | {"model.mlp_dim": 496},
    "linear_transformer": _TABLES | {"model.mlp_dim": 456},
    "performer": _TABLES | {"model.mlp_dim": 456},
    "gated_deltanet": {},
    "mamba2": {"model.ssd.expanded_dim": 192, "model.ssd.state_dim": 80},
    "retnet": {},
    "hybrid": {"model.family": "gated_deltanet", "model.pattern": _HYBRID},
}
MODELS = {name: {"model.family": name} | changes for name, changes in MODELS.items()}

# Later parts use FLASH with today's defaults.
_FLASH = MODELS["flash_scores"]
_SOFTMAX = {"model.gau.attention_function": "softmax"}
_LAPLACE = {"model.gau.attention_function": "laplace"}
ABLATIONS = {  # where the rule gives a variant another start, it is also trained with FLASH's start (_as_init)
    "flash_scores": {},
    "flash_scores/local": {"model.chunks.global_attention": False},
    "flash_scores/global": {"model.chunks.local_attention": False},
    "flash_scores/softmax": _DEPTH | _SOFTMAX,
    "flash_scores/softmax_as_init": _SOFTMAX,
    "flash_scores/laplace": _DEPTH | _LAPLACE,
    "flash_scores/laplace_as_init": _LAPLACE,
    "flash_scores/weights": {"model.divides": "weights"},
    "flash_scores/rotary": {"model.absolute_positions": "none", "model.gau.relative_bias": "none"},
    "flash_scores/chunk_64": {"model.chunks.size": 64},
    "flash_scores/chunk_256": {"model.chunks.size": 256},
    "flash_scores/heads_4": {"model.gau.heads": 4},
    "flash_scores/dense": {"model.gau.query_key": "dense", "model.gau.expanded_dim": 176},  # at the same size
}
_WIDE = {"model.model_dim": 256, "model.num_layers": 5}
LARGE = {  # 5M parameters, also within 3 % of each other
    "transformer_plus_plus/5M": MODELS["transformer_plus_plus"] | _WIDE,
    "flash_scores/5M": _FLASH | _WIDE | {"model.gau.expanded_dim": 496},
}
_REPEATED = ("transformer_plus_plus", "flash_quad", "flash", "linear_transformer")
_WITH_SCORES = ("flash_scores", "flash_quad_scores")
_LONG = ("transformer_plus_plus", *_WITH_SCORES)
_select = lambda *names: {name: MODELS[name] for name in names}
_SLICES = ("recall", "positions", "parts")


def get_config() -> ConfigDict:
    """Returns the config of all runs; studies/quality/__main__.py fills in the paths of the corpora."""
    config = quickstart.get_config()
    config.model.update(max_length=2048, residual_init="depth", divides="weights")
    config.data.update(corpus="hf", length=512, vocab_size=WORDS, tokens_per_batch=4096)
    config.train.update(warmup_steps=80, eval_every=640, eval_steps=20, checkpoint_every=640, log_every=40)
    return config


def mixture(folder: pathlib.Path) -> tuple[tuple[str, float], ...]:
    """Returns `data.mixture` for the folder that studies/quality/data.py has written."""
    return tuple((f"{folder}/{name}", share) for name, share in SHARES_OF_TEXT)


def get_parts() -> list[Part]:
    """Returns the parts of the study, by priority."""
    full = {"steps": 3200, "shares": (0.25, 0.5, 1.0), "slices": _SLICES}
    at_length = lambda length: {"data.length": length, "model.max_length": max(length, 2048)}
    others = {name: changes for name, changes in MODELS.items() if name not in _REPEATED + _WITH_SCORES}
    # FLASH-pytorch does not tie embeddings; its divisor is not the default, so others are trained, too.
    of_peer = MODELS["flash"] | {"model.tie_embeddings": False}
    divisors = {"paper": "length_everywhere", "length": "length"}  # by their names in the lines
    untied = {f"flash/untied_{name}": of_peer | {"model.normalizer": n} for name, n in divisors.items()}
    untied |= {"flash/untied": of_peer, "flash/untied_scores": of_peer | _SCORES}
    ablations = {name: _FLASH | changes for name, changes in ABLATIONS.items()}
    return [
        Part("rows_of_512", _select(*_REPEATED), {}, seeds=(0, 1, 2), **full, lengths=(2048,)),
        *(Part("rows_of_512", _select(name), {}, seeds=(0, 1, 2), **full, lengths=(2048,)) for name in _WITH_SCORES),
        Part("rows_of_512", others, {}, seeds=(0,), **full, lengths=(2048,)),
        Part("peers", _select("transformer", "transformer_plus_plus") | untied, {}, seeds=(0,), steps=1220),
        Part("rows_of_2048", _select(*_LONG), at_length(2048), seeds=(0,), **full, lengths=(512,)),
        Part(
            "rows_of_4096",
            _select(*_LONG),
            at_length(4096),
            seeds=(0,),
            steps=1220,
            lengths=(512, 2048),
            slices=_SLICES,
        ),
        Part("ablations", ablations, {}, seeds=(0, 1, 2), steps=980, lengths=(2048,)),
        Part(
            "masked",
            _select(*_LONG, "linear_transformer"),
            {"task": "masked_lm"},
            seeds=(0,),
            steps=1220,
            lengths=(2048,),
        ),
        Part("large", LARGE, {}, seeds=(0,), **full | {"steps": 6400}, lengths=(2048,)),
    ]


def get_hypotheses() -> list[Hypothesis]:
    """Returns the hypotheses of the study, with their numbers in studies/quality/README.md."""
    rows, ablations = "rows_of_512", "ablations"
    recall = {"slice": "recall", "guess": WORDS}
    return [
        Hypothesis(1, rows, "flash", "no worse", "transformer_plus_plus"),
        Hypothesis(1, rows, "flash_quad", "no worse", "transformer_plus_plus"),
        *(Hypothesis(1, rows, name, "no worse", "transformer_plus_plus") for name in _WITH_SCORES),
        Hypothesis(2, rows, "flash", "better", "transformer_plus_plus", at_equal_time=True),
        Hypothesis(2, rows, "flash_scores", "better", "transformer_plus_plus", at_equal_time=True),
        Hypothesis(3, rows, "transformer_plus_plus", "better", "linear_transformer"),
        Hypothesis(4, rows, "flash", "no worse", "transformer_plus_plus", **recall),
        Hypothesis(4, rows, "flash_scores", "no worse", "transformer_plus_plus", **recall),
        Hypothesis(5, ablations, "flash_scores/local", "better", "flash_scores/global"),
        Hypothesis(5, ablations, "flash_scores", "better", "flash_scores/local"),
        Hypothesis(6, ablations, "flash_scores", "no worse", "flash_scores/softmax"),
        Hypothesis(6, ablations, "flash_scores", "no worse", "flash_scores/softmax_as_init"),
        Hypothesis(6, ablations, "flash_scores", "no worse", "flash_scores/laplace"),
        Hypothesis(6, ablations, "flash_scores", "no worse", "flash_scores/laplace_as_init"),
        Hypothesis(6, ablations, "flash_scores", "no worse", "flash_scores/heads_4"),
        Hypothesis(6, ablations, "flash_scores", "no worse", "flash_scores/dense"),
        Hypothesis(7, ablations, "flash_scores/chunk_64", "alike", "flash_scores"),
        Hypothesis(7, ablations, "flash_scores/chunk_256", "alike", "flash_scores"),
        *(Hypothesis(8, rows, name, "better", name.removesuffix("_scores")) for name in _WITH_SCORES),
        Hypothesis(8, ablations, "flash_scores", "better", "flash_scores/weights"),
        Hypothesis(9, ablations, "flash_scores", "better", "flash_scores/rotary"),
        Hypothesis(10, rows, "flash_quad", "no worse", "transformer_plus_plus", at_equal_time=True),
        Hypothesis(10, rows, "flash_quad_scores", "no worse", "transformer_plus_plus", at_equal_time=True),
    ]
