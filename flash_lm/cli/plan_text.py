"""A plan in plain words, a line for each thing that a run will need."""

from flash_lm.training.plan import GPU_FRACTION, Plan

SHARES = (15, 30, 45)  # percent of the peak rate
_WIDTH = 11  # of the first column


def plan_text(plan: Plan) -> str:
    """The lines of a plan."""
    rows = {
        "model": _model(plan),
        "batch": _batch(plan),
        "run": _run(plan),
        "FLOPs": _flops(plan),
        "devices": _devices(plan),
        "memory": _memory(plan),
        "time": _time(plan),
    }
    return "\n".join(f"{name:{_WIDTH}}{text}".replace("\n", "\n" + " " * _WIDTH) for name, text in rows.items())


def _model(plan: Plan) -> str:
    model = plan.config.model
    return f"{model.label}, {model.num_layers} layers x {model.model_dim}, {plan.parameters:,} parameters"


def _batch(plan: Plan) -> str:
    data, count = plan.config.data, plan.config.train.accumulate
    batch = f"{data.tokens_per_batch:,} tokens a step: {data.batch_size:,} sequences x {data.length:,}"
    return f"{batch}, in {count} microbatch{'es' if count > 1 else ''} of {plan.rows:,} a device"


def _run(plan: Plan) -> str:
    steps = plan.config.train.steps
    return f"{steps:,} steps, {steps * plan.config.data.tokens_per_batch:,} tokens"


def _flops(plan: Plan) -> str:
    a_token, total = plan.step_flops / plan.config.data.tokens_per_batch, plan.step_flops * plan.config.train.steps
    return f"{a_token / 1e9:,.3g} GFLOP a token, {total:.3g} FLOP in all (of the model, forward and backward)"


def _devices(plan: Plan) -> str:
    axes = " x ".join(f"{name} {size}" for name, size in plan.mesh.items())
    where = "of this machine" if plan.target.is_here else "named, not here"
    return f"{plan.target.count:,} x {plan.target.name}, {where}; mesh: {axes}"


def _memory(plan: Plan) -> str:
    """The memory of each device, and whether a step fits."""
    memory, target = plan.memory, plan.target
    lines = [f"of each device: state {_gb(memory.state)} (parameters, moments of the optimizer)"]
    if memory.temporary is None or memory.total is None:
        lines.append(f"temporary arrays of a step: not known, {target.why}")
    else:
        lines[0] += f", temporary arrays of a step {_gb(memory.temporary)}, in all {_gb(memory.total)}"
    lines.append(f"{_room(plan)}: {_verdict(plan)}")
    return "\n".join(lines)


def _room(plan: Plan) -> str:
    if plan.target.memory is None:
        return "room for programs: not known"
    room = f"room for programs: {_gb(plan.target.memory)}"
    if plan.target.is_gpu and not plan.target.is_here:
        return f"{room}, as {GPU_FRACTION} says"
    return f"{room} are free" if plan.target.is_here else room


def _verdict(plan: Plan) -> str:
    if plan.fits is None:
        return "the state fits" if plan.target.memory is not None else "not known whether it fits"
    return "fits" if plan.fits else f"does not fit. Try {'; '.join(plan.advice())}"


def _time(plan: Plan) -> str:
    """The hours at each share of the peak."""
    hours = [plan.hours(share / 100) for share in SHARES]
    if plan.peak is None or None in hours:
        return f"no estimate: the peak rate of {plan.target.name} is not known; name a chip, such as --plan=H200"
    factor, unit = (1, "hours") if max(hours) >= 1 else (60, "minutes")  # type: ignore[type-var]
    numbers = " / ".join(f"{factor * x:,.1f}" for x in hours if x is not None)
    shares = " / ".join(map(str, SHARES))
    return (
        f"{numbers} {unit} at {shares} % of the peak of {plan.peak / 1e12:,.0f} TFLOP/s a device "
        f"({plan.config.model.dtype})\nan estimate, not a measurement: steps only, without evaluation and saves"
    )


def _gb(size: float) -> str:
    return f"{size / 1e9:,.2f} GB" if size < 1e10 else f"{size / 1e9:,.1f} GB"
