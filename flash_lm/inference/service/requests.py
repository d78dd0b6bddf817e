"""The service's requests and answers as pydantic models, which define its OpenAPI description."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from flash_lm.inference.sampling import Sampling

Text = Annotated[str, Field(min_length=1, max_length=100_000)]
MOST_CANDIDATES = 100  # per mask
Seed = Annotated[
    int, Field(ge=-(2**63), lt=2**63, description="random seed of sampling; -1: another one for each request")
]


_STRANGE = 8  # unknown keys that an error lists
_NULL = {"type": "null"}
_ABOUT_A_FIELD = ("title", "description", "default")  # keys of a schema that do not concern the type of its values


def _or_null(schema: dict[str, Any]) -> None:
    """Adds null to the types of each optional field of a schema."""
    # The type of a field is either spelled out, or a list of alternatives.
    for name, field in schema["properties"].items():
        kinds = field.get("anyOf") or [{key: field.pop(key) for key in [*field] if key not in _ABOUT_A_FIELD}]
        if name not in schema.get("required", []) and _NULL not in kinds:
            kinds = [*kinds, _NULL]
        field.update({"anyOf": kinds} if len(kinds) > 1 else kinds[0])


class Asked(BaseModel):
    """A request: no unknown keys, no silent conversions; null is the default of an optional field."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, json_schema_extra=_or_null)

    @model_validator(mode="before")
    @classmethod
    def _few_keys(cls, values: Any) -> Any:
        """Refuses many unknown keys at once: otherwise each of ten thousand would be listed."""
        if isinstance(values, dict) and len(values) > len(cls.model_fields) + _STRANGE:
            raise ValueError(f"{len(values)} keys, but only {len(cls.model_fields)} are known")
        return values

    @model_validator(mode="before")
    @classmethod
    def _null_is_the_default(cls, values: Any) -> Any:
        """Drops null values of optional fields: clients write out fields that are not set."""
        if not isinstance(values, dict):
            return values
        optional = {name for name, field in cls.model_fields.items() if not field.is_required()}
        return {name: value for name, value in values.items() if value is not None or name not in optional}


class SamplingAsked(Asked):
    """The sampling settings of a request."""

    temperature: float = Field(1.0, ge=0, le=1e4, description="0: always the most likely token")
    top_k: int = Field(0, ge=0, le=2**31 - 1, description="only the k most likely tokens; 0: all")
    top_p: float = Field(
        1.0, ge=1e-6, le=1, description="only the most likely tokens that together have this probability"
    )
    min_p: float = Field(0.0, ge=0, le=1, description="only tokens with at least this share of the highest probability")
    repetition_penalty: float = Field(
        1.0, ge=1e-3, le=1e3, description="penalty of tokens that are already in the text; 1: none"
    )

    def sampling(self) -> Sampling:
        """The settings for the decode loop.

        Raises:
            InputError: the temperature is too small, but not 0.
        """
        return Sampling(**{name: getattr(self, name) for name in SamplingAsked.model_fields})


class TextAsked(SamplingAsked):
    """A text to continue."""

    prompt: Text
    max_tokens: int | None = Field(
        None, ge=1, le=2**20, description="new tokens; default: as many as the service allows"
    )
    seed: Seed = 0


class SecondLinesAsked(SamplingAsked):
    """The first line of a couplet."""

    first: Text
    candidates: int = Field(8, ge=1, le=64, description="second lines to sample; duplicates are returned once")
    seed: Seed = 0


class FillInAsked(Asked):
    """A text with [MASK]s."""

    prompt: Text
    candidates: int = Field(5, ge=1, le=MOST_CANDIDATES, description="candidates per mask")


class LabelAsked(Asked):
    """A text, or a pair of texts, to label."""

    text: Text
    pair: Text | None = Field(None, description="the second text, of a model of pairs")


class TextPiece(BaseModel):
    """The text since the last piece, and the progress so far."""

    text: str
    tokens: int = Field(description="tokens generated so far")
    tokens_per_second: float
    state_bytes: int


class TextAnswer(BaseModel):
    """The continuation of a prompt; at the end of a stream, the complete text again."""

    text: str
    tokens: int = Field(description="tokens generated")
    finish_reason: Literal["end", "length"] = Field(
        description="end: the model ended the text; length: max_tokens was reached"
    )
    seconds: float
    tokens_per_second: float


class SecondLine(BaseModel):
    """A second line and its log-probability under the model."""

    text: str
    log_prob: float


class SecondLinesAnswer(BaseModel):
    """Second lines, most likely first."""

    first: str
    candidates: list[SecondLine]
    seconds: float


class Candidate(BaseModel):
    """A token for a mask."""

    text: str
    probability: float


class FillInAnswer(BaseModel):
    """The text with the most likely tokens, and the candidates of each mask, most likely first."""

    text: str
    masks: list[list[Candidate]]
    seconds: float


class LabelFound(BaseModel):
    """A label and its probability."""

    label: str
    probability: float


class LabelAnswer(BaseModel):
    """The likeliest label, and all labels, most likely first; `left_out`: number of tokens that were cut off."""

    label: str
    labels: list[LabelFound]
    left_out: int
    seconds: float


class ModelAnswer(BaseModel):
    """The checkpoint that is served."""

    name: str
    kind: Literal["text", "couplets", "fill_in", "labels", "label_pairs"]
    family: str
    corpus: str
    step: int
    parameters: int
    most_prompt_tokens: int
    most_new_tokens: int
    of_pairs: bool = Field(description="whether a prompt is a first text, and the answer a second one")
    chat: bool = Field(description="whether it has a chat template, for /v1/chat/completions")
    state_bytes: int = Field(description="decode state of one sequence of the largest length")


class Problem(BaseModel):
    """The problem of a request, and what to change."""

    error: str
