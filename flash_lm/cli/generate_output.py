"""The output of the generate command: a prompt and settings in, text or JSON out."""

import dataclasses
import json
from collections.abc import Callable, Iterator
from typing import Any

from flash_lm.data.chat_template import Message
from flash_lm.errors import InputError
from flash_lm.inference.couplets import CoupletWriter
from flash_lm.inference.fill_in import Filler
from flash_lm.inference.generation import Generator
from flash_lm.inference.model import TrainedModel, load_model
from flash_lm.inference.settings import CAUSAL_ONLY, MASKED_ONLY, BeamSearch, Sampling

# Flags that a model of this kind does not support.
_UNSUPPORTED_FLAGS = {
    "causal": MASKED_ONLY.keys(),
    "masked": CAUSAL_ONLY.keys() | {"chat"} | {field.name for field in dataclasses.fields(Sampling)},
}


def render_output(prompt: str, flags: dict[str, Any]) -> Iterator[str]:
    """Yields the output to print, piece by piece.

    Args:
        prompt: the text to continue or fill in.
        flags: the command's flags by name; None: the flag's default.

    Raises:
        InputError: flags are out of range or for another kind of model; also as `load_model`, `Generator`, `Filler`.
    """
    sampling = {field.name: flags[field.name] for field in dataclasses.fields(Sampling)}
    sampling = Sampling(**{name: value for name, value in sampling.items() if value is not None})
    numbers = CAUSAL_ONLY | MASKED_ONLY
    set_ = {name: default if flags[name] is None else flags[name] for name, (_, default, _) in numbers.items()}
    if set_["samples"] < 1:
        raise InputError(f"--samples={set_['samples']} must be 1 or more")
    # Which flags are allowed depends on the model, so it is loaded before they are checked.
    search = _search(flags, set_)
    _check_chat(flags)
    trained = load_model(flags["workdir"], dtype=flags["dtype"], mesh_shape=flags["mesh"])
    kind = trained.task.answers.kind
    if wrong := sorted(name for name in _UNSUPPORTED_FLAGS[kind] if flags[name] is not None):
        raise InputError(f"{trained.name} is a {kind} language model and does not support --{', --'.join(wrong)}")
    print_as = _PRINTED.get(trained.writes, _continue_text)
    return print_as(trained, prompt, search or sampling, flags, set_)


def _search(flags: dict[str, Any], set_: dict[str, Any]) -> BeamSearch | None:
    """The settings of a beam search; None: samples are asked for."""
    if flags["beams"] is None:
        if flags["length_penalty"] is not None:
            raise InputError("--length_penalty is of a beam search: set --beams, too")
        return None
    # A search has no random numbers, so settings of sampling would be ignored silently.
    sampling = [field.name for field in dataclasses.fields(Sampling)]
    if wrong := [name for name in (*sampling, "seed", "continuation") if flags[name] is not None]:
        raise InputError(
            f"a beam search neither samples nor scores a given text: leave out --{', --'.join(wrong)} or --beams"
        )
    search = BeamSearch(set_["beams"], set_["length_penalty"])
    if set_["samples"] > search.beams:
        raise InputError(f"--samples={set_['samples']} are more than --beams={search.beams} can find")
    return search


def _check_chat(flags: dict[str, Any]) -> None:
    """Raises InputError for flags that need --chat, or do not go with it."""
    if flags["system"] is not None and not flags["chat"]:
        raise InputError("--system is a message of a chat: set --chat, too")
    if flags["continuation"] is not None and flags["chat"]:
        raise InputError("--continuation is scored after a text, not in a chat: leave out --continuation or --chat")


def _continue_text(
    trained: TrainedModel, prompt: str, how: Sampling | BeamSearch, flags: dict[str, Any], set_: dict[str, Any]
) -> Iterator[str]:
    generator, as_json = Generator(trained), flags["json"]
    max_tokens, seed, samples = set_["max_tokens"], set_["seed"], set_["samples"]
    if set_["continuation"] is not None:
        (scored,) = generator.score([prompt], [set_["continuation"]])
        return iter([_json(scored) if as_json else f"log-probability {sum(scored.log_probs):.4f} nats\n"])
    # A continuation is printed after its prompt, a separate text alone.
    given = trained.chat_encoder.prompt(_messages(prompt, flags["system"])) if flags["chat"] else prompt
    before = "" if flags["chat"] or generator.of_pairs else prompt
    # A single sample is streamed; other answers are printed when all are complete.
    if isinstance(how, BeamSearch):
        answers = generator.search([given], max_tokens, how)[0][:samples]
    elif samples == 1 and not as_json:
        texts = generator.stream(given, max_tokens, how, seed)
        return (text for part in ([before], texts, ["\n"]) for text in part)
    else:
        answers = generator.generate([given] * samples, max_tokens, how, seed)
    answers = (dataclasses.replace(one, prompt=prompt) for one in answers)
    return (_json(one) if as_json else f"{before}{one.text}\n\n" for one in answers)


def _messages(prompt: str, system: str | None) -> list[Message]:
    """A chat of one message of the user."""
    first = [] if system is None else [{"role": "system", "content": system}]
    return [*first, {"role": "user", "content": prompt}]


def _second_lines(
    trained: TrainedModel, prompt: str, how: Sampling | BeamSearch, flags: dict[str, Any], set_: dict[str, Any]
) -> Iterator[str]:
    """Candidates for each line of the prompt, the most likely first; below that line if the prompt has several."""
    del set_  # its defaults are those of continuations
    if flags["chat"]:
        raise InputError(f"{trained.name} writes second lines of couplets: leave out --chat")
    if wrong := [name for name in ("max_tokens", "continuation") if flags[name] is not None]:
        raise InputError(f"a second line is as long as the first: couplets do not support --{', --'.join(wrong)}")
    # Flags that are not set leave the writer's defaults.
    settings = {
        name: flags[key] for name, key in (("candidates", "samples"), ("seed", "seed")) if flags[key] is not None
    }
    writer = CoupletWriter(trained)
    firsts = prompt.split("\n")
    if isinstance(how, BeamSearch):
        answers = [writer.search(first, how)[: flags["samples"]] for first in firsts]
    else:
        answers = [writer(first, sampling=how, **settings) for first in firsts]
    if flags["json"]:
        return (_json(one) for candidates in answers for one in candidates)
    heads = [f"{first}\n" if len(firsts) > 1 else "" for first in firsts]
    text_of = lambda candidates: "".join(f"{one.text}  {one.log_prob:.2f}\n" for one in candidates)
    return (head + text_of(candidates) for head, candidates in zip(heads, answers, strict=True))


def _fill_masks(
    trained: TrainedModel, prompt: str, how: Sampling | BeamSearch, flags: dict[str, Any], set_: dict[str, Any]
) -> Iterator[str]:
    del how  # nothing is drawn
    (filled,) = Filler(trained)([prompt], set_["candidates"])
    if flags["json"]:
        return iter([_json(filled)])
    lines = [", ".join(f"{c.text!r} {c.probability:.3f}" for c in mask) for mask in filled.masks]
    return iter([f"{filled.text}\n", *(f"mask {i + 1}: {line}\n" for i, line in enumerate(lines))])


def _json(answer: Any) -> str:
    return json.dumps(dataclasses.asdict(answer)) + "\n"


# Output type of a model -> how it is printed, if it does not continue a text.
_PRINTED: dict[str | None, Callable[..., Iterator[str]]] = {"couplets": _second_lines, "fill_in": _fill_masks}
