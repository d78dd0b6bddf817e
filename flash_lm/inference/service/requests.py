"""What the service is asked and answers, as its OpenAPI description tells it."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from flash_lm.inference.sampling import Sampling

Text = Annotated[str, Field(min_length=1, max_length=100_000)]
MOST_CANDIDATES = 100  # of a mask
Seed = Annotated[int, Field(ge=0, lt=2**32, description="of the draws")]


_STRANGE = 8  # unknown keys that are named


class _Asked(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _few_keys(cls, values: Any) -> Any:
        """Else each of ten thousand unknown keys would get a sentence."""
        if isinstance(values, dict) and len(values) > len(cls.model_fields) + _STRANGE:
            raise ValueError(f"{len(values)} keys, and there are {len(cls.model_fields)}")
        return values


class SamplingAsked(_Asked):
    """How the next token is chosen."""

    temperature: float = Field(1.0, ge=0, le=1e4, description="0: always the likeliest token")
    top_k: int = Field(0, ge=0, le=2**31 - 1, description="only the k likeliest; 0: all")
    top_p: float = Field(1.0, ge=1e-6, le=1, description="only the likeliest that together have this probability")
    min_p: float = Field(0.0, ge=0, le=1, description="only those with this share of the likeliest one's probability")
    repetition_penalty: float = Field(1.0, ge=1e-3, le=1e3, description="of tokens that have come already; 1: none")

    def sampling(self) -> Sampling:
        """For the decode loop.

        Raises:
            InputError: a temperature that is neither 0 nor large enough.
        """
        return Sampling(**{name: getattr(self, name) for name in SamplingAsked.model_fields})


class TextAsked(SamplingAsked):
    """A text to continue."""

    prompt: Text
    max_tokens: int | None = Field(None, ge=1, le=2**20, description="new tokens; default: as many as are allowed")
    seed: Seed = 0


class SecondLinesAsked(SamplingAsked):
    """A couplet's first line."""

    first: Text
    candidates: int = Field(8, ge=1, le=64, description="second lines that are sampled; of equal ones, one is given")
    seed: Seed = 0


class FillInAsked(_Asked):
    """A text with [MASK]s."""

    prompt: Text
    candidates: int = Field(5, ge=1, le=MOST_CANDIDATES, description="a mask")


class TextPiece(BaseModel):
    """What has come since the last piece, and how it goes."""

    text: str
    tokens: int = Field(description="that were generated so far")
    tokens_per_second: float
    state_bytes: int


class TextAnswer(BaseModel):
    """What followed a prompt, or, in a stream, all of it once more at the end."""

    text: str
    tokens: int = Field(description="that were generated")
    finish_reason: Literal["end", "length"] = Field(description="the model ended the text, or max_tokens did")
    seconds: float
    tokens_per_second: float


class SecondLine(BaseModel):
    """A second line and its log-probability under the model."""

    text: str
    log_prob: float


class SecondLinesAnswer(BaseModel):
    """The likeliest first."""

    first: str
    candidates: list[SecondLine]
    seconds: float


class Candidate(BaseModel):
    """A token for a mask."""

    text: str
    probability: float


class FillInAnswer(BaseModel):
    """The text with the likeliest tokens, and the candidates of each mask, the likeliest first."""

    text: str
    masks: list[list[Candidate]]
    seconds: float


class ModelAnswer(BaseModel):
    """Which checkpoint is served."""

    name: str
    kind: Literal["text", "couplets", "fill_in"]
    family: str
    corpus: str
    step: int
    parameters: int
    most_prompt_tokens: int
    most_new_tokens: int
    state_bytes: int = Field(description="of a row, for as many tokens as it may have")


class Problem(BaseModel):
    """What was wrong, and what to change."""

    error: str
