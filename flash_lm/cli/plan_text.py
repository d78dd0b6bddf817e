"""A plan in plain words, a line for each thing that a run will need."""

from flash_lm.data.tokenising_progress import in_bytes
from flash_lm.training.chips import CHIPS
from flash_lm.training.plan import Plan
from flash_lm.training.teacher_losses import TEACHER_LOSSES

SHARES = (15, 30, 45)  # percent of the peak rate
_WIDTH = 13  # of the first column
_TIMES = ((3600, "hours"), (60, "minutes"), (1, "seconds"))


def plan_text(plan: Plan) -> str:
    """The lines of a plan."""
    rows = [
        ("model", _model(plan)),
        ("batch", _batch(plan)),
        ("run", _run(plan)),
        ("FLOPs", _flops(plan)),
        ("devices", _devices(plan)),
        ("memory", "per device"),
        *_memory(plan),
        *_time(plan),
    ]
    return "\n".join(f"{name:{_WIDTH}}{text}" for name, text in rows)


def _model(plan: Plan) -> str:
    model = plan.config.model
    return f"{model.label}, {model.num_layers} layers x {model.model_dim}, {plan.parameters:,} parameters"


def _batch(plan: Plan) -> str:
    data, count = plan.config.data, plan.config.train.microbatches
    batch = f"{data.tokens_per_batch:,} tokens per step: {data.batch_size:,} sequences x {data.length:,}"
    if plan.config.train.accumulate is None:
        return f"{batch}, in as few microbatches as fit"
    return f"{batch}, in {count} microbatch{'es' if count > 1 else ''} of {plan.rows:,} per device"


def _run(plan: Plan) -> str:
    steps = plan.config.train.steps
    return f"{steps:,} steps, {steps * plan.config.data.tokens_per_batch:,} tokens"


def _flops(plan: Plan) -> str:
    a_token, train = plan.step_flops / plan.config.data.tokens_per_batch, plan.config.train
    what = TEACHER_LOSSES[train.teacher_loss].counts if train.teacher else "of the model, forward and backward"
    return f"{a_token:.3g} per token, {plan.flops:.3g} in total ({what})"


def _devices(plan: Plan) -> str:
    axes = " x ".join(f"{name} {size}" for name, size in plan.mesh.items())
    where = ", of this machine" if plan.target.is_here else ""
    return f"{plan.target.count:,} x {plan.target.name}{where}; mesh: {axes}"


def _memory(plan: Plan) -> list[tuple[str, str]]:
    """The memory of each device, and whether a step fits."""
    memory = plan.memory
    teacher = ", and the teacher's parameters" if plan.config.train.teacher else ""
    rows = [("  state", f"{in_bytes(memory.state)}: parameters and the optimizer's moments{teacher}")]
    if memory.total is None or memory.temporary is None:
        rows.append(("  temporary", f"not known: {plan.target.why}"))
        total = "at least the state"
    else:
        rows.append(("  temporary", f"{in_bytes(memory.temporary)}: other arrays of a step, as XLA compiles it"))
        total = in_bytes(memory.total)
    return [*rows, ("  in total", f"{total}, {_room(plan)}: {_verdict(plan)}")]


def _room(plan: Plan) -> str:
    target = plan.target
    if target.memory is None:
        return "of an unknown memory"
    if target.is_here:
        return f"of {in_bytes(target.memory)} that are free"
    if target.fraction == 1:
        return f"of {in_bytes(target.memory)}"
    of_all = f"{100 * target.fraction:.0f} % of {in_bytes(CHIPS[target.name].memory * 1e9)}"
    return f"of {in_bytes(target.memory)} that JAX takes ({of_all})"


def _verdict(plan: Plan) -> str:
    if plan.fits is None:
        return "not known whether it fits"
    return "fits" if plan.fits else f"does not fit; in this order try {', '.join(plan.advice())}"


def _time(plan: Plan) -> list[tuple[str, str]]:
    """The time at each share of the peak."""
    if plan.peak is None:
        dtype = plan.config.model.dtype
        return [("time", f"no estimate: no peak rate of {plan.target.name} in {dtype} is known; name another chip")]
    seconds = [plan.flops / (share / 100 * plan.peak * plan.target.count) for share in SHARES]
    factor, unit = next((row for row in _TIMES if max(seconds) >= row[0]), _TIMES[-1])
    peak = f"{plan.peak / 1e12:,.0f} TFLOP/s per device, {plan.config.model.dtype}"
    return [
        ("time", f"estimated {unit} of the steps at a share of the peak ({peak}); not a measurement"),
        *((f"  at {share} %", _number(x / factor)) for share, x in zip(SHARES, seconds, strict=True)),
    ]


def _number(x: float) -> str:
    return f"{x:,.1f}" if x >= 1 else f"{x:.2g}"
