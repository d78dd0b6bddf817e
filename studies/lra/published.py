"""Published accuracies on Long Range Arena, in %, at its full sizes. They are not our results.

Tay et al. 2020 (arXiv:2011.04006), table 1 in the version of the benchmark's README of November 2020; Mega from Ma et
al. 2022 (arXiv:2209.10655), table 2. Local Attention is a Longformer without global tokens, like ours here. The
benchmark's Longformer has them.
"""

NOTE = (
    "Ours: ListOps of 50 to 200 symbols, reviews in 1024 bytes, MNIST. Published: Tay et al. 2020, Mega: Ma et al. "
    "2022, at full size: ListOps of 500 to 2000 symbols, reviews in 4000 bytes, CIFAR-10. The published figures for "
    "longformer are those of Local Attention, which has no global tokens, like ours; with global tokens they are 35.6, "
    "62.9 and 42.2."
)
# Two tasks with stand-ins of the same labels, and CIFAR-10, where ours is MNIST.
TASKS = ("listops", "text", "image")
ACCURACY = {
    "transformer": (36.37, 64.27, 42.44),
    "longformer": (15.82, 52.98, 41.46),
    "linear_transformer": (16.13, 65.90, 42.34),
    "performer": (18.01, 65.40, 42.77),
    "linformer": (35.70, 53.94, 38.56),
    "reformer": (37.27, 56.10, 38.07),
    "mega": (63.14, 90.43, 90.44),
}
