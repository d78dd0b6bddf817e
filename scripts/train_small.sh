#!/usr/bin/env bash
# Trains families at 1.3M parameters on the same tokens of one corpus, scores them on its validation split and compares
# them.
#
#     scripts/train_small.sh $DATA/books runs/books "transformer_plus_plus flash_quad flash mc_tfm"
#
# Further arguments, such as --config.task=masked_lm, go to the training command. If run again, it resumes where it
# stopped.
set -euo pipefail
corpus=$1 out=$2 families=$3
shift 3
for family in $families; do
    python -m flash_lm.train --config=configs/quickstart.py --workdir="$out/$family" \
        --config.model.family="$family" --config.data.corpus=hf --config.data.path="$corpus" \
        --config.data.vocab_size=4096 --config.train.steps=1500 --config.train.warmup_steps=100 \
        --config.train.eval_every=150 --config.train.eval_steps=40 --config.train.checkpoint_every=500 "$@"
    python -m flash_lm.evaluate --workdir="$out/$family" --split=validation
done
workdirs=()
for family in $families; do workdirs+=("$out/$family"); done
python scripts/compare.py "${workdirs[@]}" --split=validation --out="$out"
