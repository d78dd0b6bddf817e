"""The errors of layers against their layers one by one, and the verdicts from lines by hand."""

import jax
import numpy as np
import pytest
from inference.service.serving import random_model

from benchmarks.pretrained.layer_errors import measure_layers
from benchmarks.pretrained.linearise import SEEDS, THRESHOLDS, students, verdicts
from flash_lm.data.tokenizer import ByteTokenizer
from flash_lm.models.model_inputs import ModelInputs

pytestmark = pytest.mark.usefixtures("usual_promotion")
KEYS = {"model.absolute_positions": "none", "model.rotary": True, "model.max_length": 64, "model.num_layers": 2}


class Passages:
    """Three rows of bytes, as `HeldOut` has them."""

    text, split = "wiki", "test"

    def passages(self, tokenizer, count, length):
        return np.random.default_rng(0).integers(3, tokenizer.vocab_size, (count, length + 1)).astype(np.int32)


@pytest.mark.slow("compiles each form of a layer")
def test_errors_of_layers():
    """Each mixer at the teacher's own input, layer by layer without a scan; the far share is that of the weights."""
    teacher = random_model("text", "transformer_plus_plus", KEYS)
    model = random_model("text", "window_linear", KEYS | {"model.window_linear.size": 6})
    line = measure_layers(model, teacher, Passages(), 3, 40)
    ids = Passages().passages(ByteTokenizer(), 3, 40)[:, :-1]
    theirs, ours = (one.model.bind(one.params) for one in (teacher, model))
    x, context = theirs.embed(ModelInputs(ids, packed=False))
    _, our_context = ours.embed(ModelInputs(ids, packed=False))
    for layer, (block, other) in enumerate(zip(theirs.unstacked_blocks(), ours.unstacked_blocks(), strict=True)):
        h = block.norm_sublayer_0(x)
        y, actual = block.sublayer_0(h, context), other.sublayer_0(h, our_context)
        error = float(np.square(actual - y).sum() / np.square(y).sum())
        assert line["errors"][layer] == pytest.approx(error, rel=1e-4)
        weights = other.sublayer_0.weights(h, our_context)["global"]
        assert line["far_share"][layer] == pytest.approx(float(jax.numpy.sum(weights, -1).mean()), rel=1e-4)
        x, _ = block(x, context, lambda x: ())
    assert line["mean_error"] == pytest.approx(np.mean(line["errors"])) and min(line["far_share"]) > 0.01
    same = measure_layers(teacher, teacher, Passages(), 1, 40)
    assert same["errors"] == [0.0, 0.0] and same["far_share"] == [0.0, 0.0]


def lines_of(perplexities):
    """Lines of all students; a perplexity is that from 128 on, where the teacher has 20, and 30 before."""
    names = [*students(), "teacher"]
    likelihood = [
        {
            "student": name,
            "measure": "likelihood",
            "text": "wiki",
            "by_position": [
                {"from": 0, "tokens": 100, "perplexity": 30.0, "teacher_perplexity": 30.0},
                {"from": 128, "tokens": 100, "perplexity": perplexities.get(name, 21.0), "teacher_perplexity": 20.0},
            ],
        }
        for name in names
    ]
    errors = {"floor": 0.2} | {f"transfer {seed}": 0.01 * seed for seed in SEEDS}
    layers = [{"student": k, "measure": "layers", "text": "wiki", "mean_error": x} for k, x in errors.items()]
    use = []
    for name in ("teacher", "hybrid", "all"):
        use += [
            {"student": name, "measure": "questions", "right": 40 if name == "teacher" else 30},
            {"student": name, "measure": "needle", "length": 1024, "accuracy": 1.0 if name == "teacher" else 0.25},
            {
                "student": name,
                "measure": "generation",
                "text": "wiki",
                "perplexity_under_teacher": 3.0,
                "teacher_perplexity_under_teacher": 2.5,
            },
            *(
                {
                    "student": name,
                    "measure": "speed",
                    "context": 8192,
                    "rows": rows,
                    "state_bytes": {"teacher": 300, "hybrid": 90, "all": 9}[name],
                    "tokens_per_second": {"teacher": 10.0, "hybrid": 19.0, "all": 25.0}[name],
                }
                for rows in (1, 8)
            ),
        ]
    return likelihood + layers + use


def test_verdicts():
    known = {
        "floor": 25.0,
        "transfer 3": 24.5,
        "all": 22.0,
        "trained floor": 24.0,
        "all, knock-out": 22.1,
        "control": 99.0,
    }
    by_name = {line["verdict"]: line for line in verdicts(lines_of(known))}
    holds = {name: line["holds"] for name, line in by_name.items()}
    # In all positions the ratio is the geometric mean of both parts.
    assert by_name["T2b"]["value"] == pytest.approx(np.sqrt(22 / 20)) and holds["T2b"]
    assert by_name["T1"]["value"] == pytest.approx(0.03) and by_name["T1, against the floor"]["value"] == pytest.approx(
        0.15
    )
    assert [holds[f"T3, seed {seed}"] for seed in SEEDS] == [True, True, False] and holds["T3, distilled"]
    assert by_name["T3, seed 3"]["value"] == pytest.approx(24.5 / 25)
    assert (holds["T4, perplexity under the teacher"], holds["T4, questions"], holds["T5"]) == (True, True, False)
    assert (holds["T6, all"], holds["T6, hybrid"], holds["T7, all"], holds["T7, hybrid"]) == (True, True, True, False)
    assert not holds["alive after distillation"] and holds["control"]
    assert by_name["alive after distillation"]["asked"] == f"at least {THRESHOLDS['alive']:.3g}"
    # What is not measured has no verdict; a teacher that finds nothing decides nothing.
    some = [x for x in lines_of(known) if x["student"] not in ("control", "transfer 2")]
    for line in some:
        line.update({"accuracy": 0.0} if line["measure"] == "needle" else {})
    by_name = {line["verdict"]: line for line in verdicts(some)}
    assert not by_name.keys() & {"control", "T1", "T3, seed 2"} and "T3, seed 1" in by_name
    assert np.isnan(by_name["T5"]["value"]) and not by_name["T5"]["holds"]
