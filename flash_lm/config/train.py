"""The schema of `config.train`: the keys that every optimizer shares."""

import dataclasses

from flash_lm.config.keys import Group, above, at_least, fraction, key, one_of
from flash_lm.config.regexes import MOST_REGEXES, regex_problem
from flash_lm.config.registry import LOGGERS, OPTIMIZERS

DECAYS = ("linear", "cosine", "sqrt")  # schedules with a final learning rate


def _regexes(names: tuple) -> str | None:
    wanted = f"at most {MOST_REGEXES} regexes of parameters, such as ('embedding', 'layers/.*/kernel')"
    # A regex from somebody else's config may be long, or slow to match.
    for name in names[:MOST_REGEXES]:
        if problem := regex_problem(name):
            return f"{wanted}, and {name!r:.80} is not one: it {problem}"
    return wanted if len(names) > MOST_REGEXES else None


def _boundaries(steps: tuple) -> str | None:
    good = all(type(x) is int and x > 0 for x in steps) and list(steps) == sorted(set(steps))
    return None if good else "a tuple of positive, increasing steps, such as (3000,)"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig(Group, name="train"):
    """The keys of `config.train`: optimizer, schedule, evaluation and checkpoints."""

    steps: int = key(None, "updates; open: as many as train.tokens needs, or 300", at_least(1))
    tokens: int = key(
        None,
        "tokens to train on, instead of train.steps, rounded up to full steps; open: train.steps",
        lambda x: None if x >= 1 else "1 or more",
    )
    optimizer: str = key("adamw", "name of an optimizer", OPTIMIZERS.rule)
    learning_rate: float = key(3e-3, "peak", above(0))
    end_learning_rate: float = key(0.0, "final rate of linear, cosine and sqrt, after the last step", at_least(0))
    warmup_steps: int = key(None, "open: a tenth of the steps", at_least(0))
    schedule: str = key(
        "linear",
        "linear, cosine, sqrt (1 − √), step or constant, after the warm-up",
        one_of(*DECAYS, "step", "constant"),
    )
    decay_steps: int = key(
        None,
        "linear, cosine and sqrt: number of final steps with decay, after a constant rate; open: all steps",
        at_least(1),
    )
    boundaries: tuple = key((), "step: the steps at which the rate drops to a tenth", _boundaries)
    b1: float = key(
        0.9,
        "of adamw, radam, lion, lamb and of muon's Adam; of schedule_free_adamw the share of the average in the point "
        "where gradients are taken",
        fraction,
    )
    b2: float = key(0.999, "of all but adafactor", fraction)
    # Gradients of AFT's position bias start at 1e-7; with a larger eps it would not learn.
    eps: float = key(1e-8, "of adamw, radam, lamb, schedule_free_adamw and of muon's Adam", above(0))
    weight_decay: float = key(0.01, "for matrices; not for gains, offsets and biases", at_least(0))
    clip: float = key(1.0, "largest norm of the gradient; 0 = off", at_least(0))
    clip_mode: str = key(
        "global",
        "global (the norm over all parameters) or parameter (each parameter of each layer separately)",
        one_of("global", "parameter"),
    )
    label_smoothing: float = key(
        0.0,
        "softmax head: share of a target's probability that is spread over the vocabulary; its term is logged "
        "separately from the loss; 0 = off",
        fraction,
    )
    z_loss: float = key(0.0, "weight of log² Z of the softmax head in the loss; 0 = off", at_least(0))
    ema: float = key(
        0.0,
        "decay of an exponential moving average of the parameters, which is evaluated and saved, too; at most "
        "(1 + step) / (10 + step) in a step; 0 = off",
        fraction,
    )
    accumulate: int = key(
        None,
        "microbatches per step; open: as few as fit the memory of the devices, which a step compiled for them shows",
        at_least(1),
        same=(1,),
    )
    carry_state: bool = key(
        False,
        "read documents in order: a sequence continues the one at its index in the previous batch, from its decode "
        "state and without a gradient into it; data.pack then applies only to scores of independent sequences",
    )
    on_nonfinite: str = key(
        "stop",
        "stop or skip: what to do at a step whose loss or gradient is not finite",
        one_of("stop", "skip"),
    )
    loss_chunk: int = key(
        None,
        "tokens per device whose logits exist at the same time; open: 1024; on a GPU or TPU the largest power of "
        "two whose float32 logits take at most 1 GiB, unless few tokens of a row are targets",
        at_least(1),
        same=(1024,),
    )
    log_every: int = key(10, "steps", at_least(1))
    log_to: tuple = key(
        ("tensorboard",),
        "where lines go besides metrics.jsonl: tensorboard, wandb, trackio or loggers of plugins, between commas",
        lambda names: next((problem for name in names if (problem := LOGGERS.rule(name))), None),
    )
    project: str = key("flash_lm", "the project in a tracker of train.log_to")
    sample_prompt: str = key(
        "", "a text that the model continues at every evaluation, always the likeliest token; empty: none"
    )
    sample_tokens: int = key(40, "tokens of a sample", at_least(1))
    log_groups: bool = key(False, "log the gradient's norm for each group of parameters, such as layers/sublayer_0")
    eval_every: int = key(100, "steps; 0 = only at the end", at_least(0))
    eval_steps: int = key(
        0,
        "batches of data.tokens_per_batch tokens per evaluation during training, spread over the split; "
        "train.accumulate does not change which text is read; 0 = all",
        at_least(0),
    )
    stop_accuracy: float = key(
        None,
        "ends training when the accuracy on the validation split is this or more; open: train.steps alone ends it",
        lambda x: None if 0 < x <= 1 else "more than 0 and at most 1",
    )
    checkpoint_every: int = key(100, "steps; 0 = only at the end", at_least(0))
    keep: int = key(2, "number of newest checkpoints to keep, besides the best", at_least(1))
    best_metric: str = key(
        "loss", "loss or bits_per_byte of the validation split; the lowest is best", one_of("loss", "bits_per_byte")
    )
    branch_from: str = key(None, "RUN[@best|@STEP]: continue its state, step and data order in a new workdir")

    init_from: str = key(
        None,
        "RUN[@best|@STEP], the folder of an exported model, or hub:OWNER/NAME: start with its parameters and tokenizer",
    )
    init_positions: str = key(
        "refuse",
        "refuse or interpolate: what to do if train.init_from has positions for another model.max_length",
        one_of("refuse", "interpolate"),
    )
    teacher: str = key(
        None,
        "RUN[@best|@STEP], the folder of an exported model, or hub:OWNER/NAME: a model with the same tokenizer, which "
        "this one learns to imitate",
    )
    teacher_loss: str = key(
        "distribution",
        "distribution (the loss and the divergence from the teacher's distribution over next tokens) or layers (the "
        "relative error of each layer's token mixer, at the teacher's input; nothing but these mixers changes)",
        one_of("distribution", "layers"),
    )
    teacher_weight: float = key(9.0, "distribution: weight of the divergence beside the loss", above(0))
    freeze: tuple = key((), "regexes of parameters, as in mesh.rules, that training leaves unchanged", _regexes)

    @property
    def microbatches(self) -> int:
        """Microbatches per step; one as long as their number is open."""
        return self.accumulate or 1

    def problems(self) -> list[str]:
        """Sentences on keys that do not go together."""
        sentences = []
        if self.init_from and self.branch_from:
            sentences.append("train.init_from loads parameters, train.branch_from the complete state: give one of them")
        # The schedule must fit into the steps.
        if self.warmup_steps >= self.steps and self.schedule != "constant":
            sentences.append(
                f"train.warmup_steps={self.warmup_steps} must be less than train.steps={self.steps}: lower it, or "
                f"leave it open with --config.train.warmup_steps="
            )
        if self.decay_steps and self.schedule not in DECAYS:
            sentences.append(f"train.decay_steps needs a train.schedule of {', '.join(DECAYS)}, not {self.schedule}")
        elif self.decay_steps and self.decay_steps > self.steps - self.warmup_steps:
            sentences.append(
                f"train.decay_steps={self.decay_steps} must be at most the {self.steps - self.warmup_steps} steps "
                f"after the warm-up"
            )
        if bool(self.boundaries) != (self.schedule == "step"):
            sentences.append(
                f"train.schedule=step and train.boundaries go together, but they are {self.schedule} and "
                f"{self.boundaries}: set both, or neither"
            )
        elif not all(self.warmup_steps < boundary < self.steps for boundary in self.boundaries):
            sentences.append(
                f"train.boundaries={self.boundaries} must lie between train.warmup_steps={self.warmup_steps} and "
                f"train.steps={self.steps}"
            )
        return sentences
