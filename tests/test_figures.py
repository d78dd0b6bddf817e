"""Figures that README and the pages write out, against the files of results that they link.

A figure is written as a link to its file, `[2.9 times](…/results/….jsonl)`; the ratios of a claim, such as 0.925
(0.914–0.941), are those of results/CLAIMS.md. Tables that the site builds from the files cannot differ from them, and
what studies/findings.py writes into README is tested beside it.
"""

import json
import re

import pytest
from small import ROOT

PAGES = {path.name: path.read_text() for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]}
GENERATED = re.compile(r"<!-- (\w+): written by python -m studies report -->.*?<!-- end of \1 -->", re.DOTALL)
CLAIMS = (ROOT / "results" / "CLAIMS.md").read_text()
RATIO = r"\d\.\d{3} \(\d\.\d{3}–\d\.\d{3}"
Figures = list[tuple[str, str]]


def lines(path: str, **where) -> list[dict]:
    found = [json.loads(line) for line in (ROOT / "results" / path).read_text().splitlines()]
    return [line for line in found if where.items() <= line.items()]


def one(path: str, **where) -> dict:
    (line,) = lines(path, **where)
    return line


def speedup(family: str, length: int) -> float:
    return one("performance/step_time/steps.jsonl", family=family, length=length)["speedup"]


def decoding(path: str, slow: str, fast: str, context: int = 16384, batch: int = 16) -> float:
    """Tokens a second of the fast one over those of the slow one, after so many tokens."""
    cell = {"context": context, "batch": batch}
    return one(path, family=slow, **cell)["ms_a_token"] / one(path, family=fast, **cell)["ms_a_token"]


BASELINES = ("transformer_plus_plus", "transformer_plus_plus+num_kv_heads=2")


def over_grouped(context: int = 16384, batch: int = 16) -> tuple[float, ...]:
    """The same of FLASH, over the Transformer++ with all heads of keys and with two."""
    return tuple(decoding("decode/decode.jsonl", name, "flash", context, batch) for name in BASELINES)


def readme() -> Figures:
    steps, demo, decode = "performance/step_time/steps.jsonl", "demo/results.jsonl", "decode/decode.jsonl"
    assert all(speedup("flash_quad", length) < 1.05 for length in (512, 1024, 2048, 4096, 8192))
    for path, size in ((steps, 8.4), (decode, 8.4), (GPU_STEPS, 110)):  # machine and size as they are written
        softmax = lines(path, family="transformer_plus_plus")
        assert {
            round(line.get("params", line.get("parameters")) / 1e6, 1 if size < 10 else None) for line in softmax
        } == {size}
        assert {line["device"] for line in softmax} == {"NVIDIA H200" if size > 10 else f"{XEON}, 2 threads"}
    assert {(x["tokens_per_step"], x["dtype"]) for x in lines(steps)} == {(8192, "float32")}
    assert {(x["tokens_per_step"], x["dtype"], x["dirty"]) for x in lines(GPU_STEPS)} == {(65536, "bfloat16", True)}
    softmax = [form for form in {x["family"] for x in lines(GPU_STEPS)} if form.startswith("transformer")]
    lengths = (512, 2048, 8192, 16384)
    assert all(max(softmax, key=lambda form: on_gpu(form, length)) == CUDNN for length in lengths)
    ours, all_at_once, alone = one("performance/sdpa/peers.jsonl", length=4096), over_grouped(), over_grouped(batch=1)
    assert (ours["tokens_per_step"], ours["device"]) == (4096, f"{XEON}, 2 threads")
    assert 1.45 < speedup("flash", 4096) * ours["speedup"] < 1.55
    return [
        *((f"{one(demo, run=name)['perplexity']:.1f}", demo) for name in ("transformer_plus_plus", "flash")),
        *((f"{on_gpu('flash', length) / on_gpu(CUDNN, length):.2f}", GPU_STEPS) for length in lengths),
        (f"{1 / ours['speedup']:.2f} times", "performance/sdpa/peers.jsonl"),
        *((f"{speedup('flash', length):.1f} times", steps) for length in (4096, 512, 8192)),
        (f"{speedup('flash_quad', 8192):.1f} times", steps),
        *((f"{both[i]:.1f} times", decode) for i in (0, 1) for both in (all_at_once, alone)),
        *((f"{ratio:.2f} times", decode) for ratio in over_grouped(1024, batch=1)),
    ]


XEON = "Intel(R) Xeon(R) Processor"
GPU_STEPS = "gpu/step_time/steps.jsonl"
CUDNN = "transformer_plus_plus+quadratic.implementation=cudnn"


def on_gpu(form: str, length: int = 16384) -> float:
    return one(GPU_STEPS, family=form, length=length)["speedup"]


def kernels() -> Figures:
    assert all(on_gpu(CUDNN, length) > on_gpu("flash", length) for length in (512, 2048))
    took = {line["length"]: line["median_ms"] for line in lines(GPU_STEPS, family="flash")}
    assert round(100 * (max(took.values()) / min(took.values()) - 1)) == 4 and took.keys() == {512, 2048, 8192, 16384}
    assert 0.9 < on_gpu("flash", 8192) / on_gpu(CUDNN, 8192) < 1.1 < on_gpu("flash") / on_gpu(CUDNN)
    path = "gpu/peers/peers.jsonl"
    return [(f"{one(path, peer='sdpa', length=2048)['speedup']:.2f} times", path)]


def quality() -> Figures:
    spread = [line["iqr_ms"] for line in lines("families/results.jsonl")]
    of_bytes = "small/wikitext2_bytes/results.jsonl"
    learned, rotary = (one(of_bytes, family=name)["bits_per_byte"] for name in ("transformer", "transformer_plus"))
    rises: dict[str, list[float]] = {"constant": [], "count": []}
    for line in lines("long_text.jsonl", start=7680):
        first = one("long_text.jsonl", run=line["run"], start=0)
        assert min(line["distinct"], first["distinct"]) > 0.99
        rises[line["run"].split("_")[1]].append(line["nll"] - first["nll"])
    cost = [
        (f"{100 * (perplexity(path, after) / perplexity(path, before) - 1):.1f} %".replace("-", "−"), path)
        for before, after in (("flash_quad", "flash"), ("transformer_plus_plus", "mc_tfm"))
        for path in ("small/books/results.jsonl", "small/wikitext2/results.jsonl")
    ]
    return [
        (f"{min(spread):.0f} to {max(spread):.0f} ms", "families/results.jsonl"),
        (f"{learned - rotary:.1f} bits", of_bytes),
        *((f"{min(found):.2f} to {max(found):.2f} nats", "long_text.jsonl") for found in rises.values()),
        *cost,
    ]


def perplexity(path: str, family: str) -> float:
    return one(path, family=family)["perplexity"]


def families() -> Figures:
    path = "families/results.jsonl"
    sizes = [line["parameters"] for line in lines(path) if line["run"] not in ("aft_full", "aft_local")]
    return [(f"{100 * (max(sizes) / min(sizes) - 1):.0f} %", path)]


def tasks() -> Figures:
    path = "experiments/copy/validation.jsonl"
    first = {}
    for run in ("aft_local", "transformer", "flash", "linear_transformer"):
        low = max(line["step"] for line in lines(path, run=run) if line["accuracy"] < 0.99)
        first[run] = min(line["step"] for line in lines(path, run=run) if line["step"] > low)
    seconds = [line["train_seconds"] for line in lines("experiments/mnist/results.jsonl")]
    minutes = f"{min(seconds) / 60:.0f} and {max(seconds) / 60:.0f} minutes"
    return [*((str(step), path) for step in first.values()), (minutes, "experiments/mnist/results.jsonl")]


def runs() -> Figures:
    path = "survival/kills.jsonl"
    totals = [line for line in lines(path) if "kills" in line]
    assert [(line["family"], line["kills"], line["equal"]) for line in totals] == [
        ("flash", 20, True),
        ("aft_local", 20, True),
    ]
    return [(f"{line['median_s_to_next_step']:.0f} s", path) for line in totals]


def decode() -> Figures:
    bfloat16, dtype = "decode_bfloat16/decode.jsonl", "+state_dtype=bfloat16"
    path, growth = "decode/decode.jsonl", []
    for line in lines(path, context=65536):
        same = {key: line[key] for key in ("family", "batch", "state_bytes")}
        growth += [line["ms_a_token"] / short["ms_a_token"] for short in lines(path, context=1024, **same)]
    return [
        *((f"{ratio:.1f} times", "decode/decode.jsonl") for batch in (16, 1) for ratio in over_grouped(batch=batch)),
        *((f"{context}", "decode/decode.jsonl") for batch in (16, 1) for context in overtaken(batch)),
        *((f"{decoding(bfloat16, name + dtype, 'flash' + dtype):.0f} times", bfloat16) for name in BASELINES),
        (f"{min(growth):.2f} and {max(growth):.2f} times", "decode/decode.jsonl"),
    ]


def overtaken(batch: int) -> tuple[int, int]:
    """The last context where FLASH is slower than the Transformer++, and the first where it is faster."""
    contexts = sorted({line["context"] for line in lines("decode/decode.jsonl", family="flash")} - {65536})
    slower = [
        context
        for context in contexts
        if one("decode/decode.jsonl", family="flash", batch=batch, context=context)["ms_a_token"]
        > one("decode/decode.jsonl", family="transformer_plus_plus", batch=batch, context=context)["ms_a_token"]
    ]
    assert slower == contexts[: len(slower)]
    return slower[-1], contexts[len(slower)]


def step_time() -> Figures:
    first, second = "performance/step_time/steps.jsonl", "step_time/steps.jsonl"
    pairs = [
        (line["median_ms"], other["median_ms"])
        for line in lines(first)
        for other in lines(second, family=line["family"], length=line["length"])
    ]
    shares = [line["peak_fraction"] for line in lines(first, family="flash")]
    today = "step_time_today/steps.jsonl"
    took = lambda family: one(today, family=family, length=2048)["median_ms"]
    words = {"retnet": " times", "gla": "", "gated_deltanet": "", "mamba2": " times"}
    over = [(f"{took(family) / took('linear_transformer'):.2f}{word}", today) for family, word in words.items()]
    return [
        (f"{100 * min(shares):.0f} to {100 * max(shares):.0f} %", first),
        (f"{100 * max(abs(b / a - 1) for a, b in pairs):.0f} %", second),
        *over,
    ]


def study() -> Figures:
    now, before, other = "study/tuning/best.jsonl", "study_as_init/tuning/best.jsonl", "study_depth/flash.jsonl"
    searched = [line["model"] for line in lines(now) if not line["model"].startswith("flash")]
    best = [(f"{one(path, model=model)['loss']:.4f}", path) for model in searched for path in (before, now)]
    of = lambda value: one("study/rates/flash.jsonl", round=1, value=value)["loss"]
    worse = [line["loss"] - of(line["value"]) for line in lines(other)]
    faster = one("study/rates/transformer.jsonl", round=3, value=0.006)["loss"]
    return [
        *best,
        (f"{min(worse):.2f} to {max(worse):.2f} nats", other),
        (f"{faster:.4f}", "study/rates/transformer.jsonl"),
        (f"{on_gpu(CUDNN, 512) / on_gpu('flash', 512):.2f} times", GPU_STEPS),
        *((f"{one(now, model=name)['loss']:.4f}", now) for name in ("flash_scores", "flash", "transformer_plus_plus")),
    ]


def controls() -> Figures:
    path = "controls/runs/anchor_transformer_seed_0.jsonl"
    return [(f"{one(path, split='validation')['loss']:.3f} nats", path)]


EXPECTED = {
    "README.md": readme,
    "controls.md": controls,
    "decoding.md": decode,
    "families.md": families,
    "kernels.md": kernels,
    "quality.md": quality,
    "runs.md": runs,
    "step_time.md": step_time,
    "study.md": study,
    "tasks.md": tasks,
}


@pytest.mark.parametrize("name", PAGES)
def test_the_figures_of_a_page_are_those_of_its_files(name):
    """In their order, each rounded as it is written."""
    page = GENERATED.sub("", PAGES[name])
    typed = re.findall(r"\[([^\]]*\d[^\]]*)\]\((?:\.\./)?results/([\w./]+\.jsonl)\)", page)
    assert typed == (EXPECTED[name]() if name in EXPECTED else [])


def test_the_ratios_of_claims_are_those_of_the_page_of_claims():
    found = re.findall(rf"of (\w+(?: \([^)]*\))?) ({RATIO}), \d seeds\) × that of (\w+)", CLAIMS)
    ratios = {(name, base): f"{ratio})" for name, ratio, base in found}
    places = ("rows_of_512", "rows_of_512 scored on rows of 2048", "rows_of_512 scored on rows of 8192")
    places += ("rows_of_2048", "rows_of_2048 scored on rows of 8192", "documents")
    models = ("flash", "flash_quad")
    asked = [(f"{model}_scores ({place})", f"{model}_count") for place in places for model in models]
    asked += [(f"{model}_scores (masked)", f"{model}_constant") for model in models]
    asked += [(f"{model}_constant ({place})", f"{model}_count") for place in places for model in models]
    asked += [(f"{model}_count (rows_of_512)", f"{model}_rotary") for model in models]
    asked += [("window_32", "simple"), ("window_32", "full"), ("window_8", "window_32"), ("window_128", "window_32")]
    typed = {name: re.findall(rf"{RATIO}\)", page) for name, page in PAGES.items()}
    assert {name: ratios for name, ratios in typed.items() if ratios} == {
        "quality.md": [ratios[pair] for pair in asked]
    }


def test_the_ratios_of_the_demo_are_those_of_its_lines():
    text = " ".join(PAGES["start.md"].split())
    typed = re.search(
        r"after 40 steps FLASH has ([\d.]+) times its perplexity .*?, after 240 steps ([\d.]+) times", text
    )
    after = lambda run, step: one("demo/validation.jsonl", run=run, step=step)["perplexity"]
    ratios = [after("flash", step) / after("transformer_plus_plus", step) for step in (40, 240)]
    assert [f"{ratio:.2f}" for ratio in ratios] == [*typed.groups()]


def test_the_losses_of_a_step_on_a_mesh_agree():
    """To 1e-6, as scaling.md says."""
    losses = [line["losses"] for line in lines("mesh/mesh.jsonl")]
    assert all(abs(a / b - 1) < 1e-6 for row in losses for a, b in zip(row, losses[0], strict=True))


def test_the_first_run_in_readme_is_what_was_printed():
    """Its lines are those of the file, in their order; … stands for lines left out."""
    (block,) = re.findall(r"^```text\n(\$ .*?)^```$", PAGES["README.md"], re.MULTILINE | re.DOTALL)
    printed = iter((ROOT / "results" / "first_run" / "output.txt").read_text().splitlines())
    for line in block.splitlines():
        beginning = line.removesuffix("…")  # of a command
        assert not beginning or any(whole.startswith(beginning) for whole in printed), line
    score = one("first_run/results.jsonl")
    assert not score["dirty"] and not score["trained_dirty"]


def test_the_verdicts():
    """The counts in README are those of the page of claims."""
    counts = re.search(r"Of (\d+) claims: (.*?)\. Written", CLAIMS)
    text = " ".join(PAGES["README.md"].split())
    assert counts and f"Of {counts[1]} claims" in text
    for part in counts[2].split(", "):
        count, word = re.match(r"(\d+) (\w+(?: \w+)*?)(?: at small scale)?$", part).groups()
        assert re.search(rf"\b{count} {word}", text), part
