"""The runs of the claims on FLASH and its parts: three seeds of each, about a minute per run on two cores.

    python -m flash_lm.sweep --config=studies/claims/configs/books.py --split=test --workdir=runs/books \
        --config.data.corpus=hf --config.data.path=$DATA/books
    python -m studies.claims --study=books --workdir=runs/books

A sweep continues where it stopped, so the runs can be spread over days. A claim without finished runs says so.
The other files of this folder are those of FLASH's divisor and positions, and of AFT.
"""

from ml_collections import ConfigDict

from flash_lm.configs import quickstart

SEEDS = (0, 1, 2)
_LENGTH_4096 = {"model.max_length": 4096, "data.tokens_per_batch": 4096, "train.steps": 250, "train.warmup_steps": 25}

# name -> keys that differ from the FLASH of `get_config`
RUNS = {
    "flash": {},
    "flash_local": {"model.chunks.global_attention": False},
    "flash_global": {"model.chunks.local_attention": False},
    "flash_quad": {"model.family": "flash_quad"},
    "transformer_plus_plus": {"model.family": "transformer_plus_plus"},
    "mc_tfm": {"model.family": "mc_tfm"},
    "transformer_plus": {"model.family": "transformer_plus"},
    "quad_softmax": {"model.family": "flash_quad", "model.gau.attention_function": "softmax"},
    "quad_laplace": {"model.family": "flash_quad", "model.gau.attention_function": "laplace"},
    "chunk_64": {"model.chunks.size": 64},
    "chunk_256": {"model.chunks.size": 256},
    "chunk_512": {"model.chunks.size": 512},
    "gau_heads_4": {"model.gau.heads": 4},
    "dense_query_key": {"model.gau.query_key": "dense"},
    "overlapping_chunks": {"model.chunks.overlapping": True},
    "layers_3": {"model.num_layers": 3},
    "linear_transformer": {"model.family": "linear_transformer"},
    "transformer": {"model.family": "transformer"},
    "flash_4096": _LENGTH_4096,
    "transformer_plus_plus_4096": {"model.family": "transformer_plus_plus", **_LENGTH_4096},
}


def get_config() -> ConfigDict:
    config = quickstart.get_config()
    config.model.update(
        family="flash",
        num_layers=2,
        model_dim=64,
        num_heads=4,
        gau={"shared_dim": 64},
        chunks={"size": 128},
        linear={"chunk_size": 128},
        max_length=512,
    )
    # As in the recorded runs.
    config.model.update(residual_init="as_init", scale_init="as_init", divides="weights")
    config.data.vocab_size = 2048
    config.train.update(steps=500, warmup_steps=50, eval_every=100, eval_steps=20)
    return config


def get_runs(config: ConfigDict) -> dict[str, dict]:
    # One seed of every run first, so that finished runs can be compared.
    return {f"{name}_seed_{seed}": {**changes, "seed": seed} for seed in SEEDS for name, changes in RUNS.items()}
