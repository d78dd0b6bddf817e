"""`Format`: a format of another library's models, as data that is read in both directions; and its registry."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from flash_lm.config.model import ModelConfig
from flash_lm.config.registry import FORMATS
from flash_lm.errors import InputError

Settings = Mapping[str, Any]  # of their config.json
Arrays = Mapping[str, Callable[[], np.ndarray]]  # functions that read their arrays, by name


class Layout(NamedTuple):
    """How an array of theirs becomes ours, and back.

    Attributes:
        read: theirs -> ours.
        write: ours -> theirs.
    """

    read: Callable[[np.ndarray], np.ndarray]
    write: Callable[[np.ndarray], np.ndarray]


AS_IS = Layout(lambda x: x, lambda x: x)
TRANSPOSED = Layout(lambda x: x.T, lambda x: x.T)  # PyTorch's linear maps are (outputs, inputs), ours (inputs, outputs)
TAPS = Layout(lambda x: x[:, 0].T, lambda x: x.T[:, None])  # depthwise filters (C, 1, W), ours (W, C)
CHANNELS = Layout(lambda x: x[0, 0], lambda x: x[None, None])  # (1, 1, C), ours (C,)


# Keys of `config.model` that all formats share: they are of causal language models, with the same layer all along.
COMMON: Mapping[str, Any] = {"pattern": (), "causal": True, "head": "softmax", "softmax.cap": 0.0}


class Tensor:
    """An array of theirs, and the parameters of ours that it holds.

    Attributes:
        theirs: its name; {i} stands for the number of a layer.
        ours: names of parameters. If there are several, they are joined along the last dimension, after the layout;
            {unit} stands for the number of a layer of theirs in one of ours.
        layout: its layout.
    """

    def __init__(self, theirs: str, *ours: str, layout: Layout = AS_IS):
        """Takes the names, with the layout of both."""
        self.theirs, self.ours, self.layout = theirs, ours, layout


class Setting(NamedTuple):
    """A setting of their config.json that has the value of one of our keys.

    Attributes:
        name: its name.
        kind: its type: int, float, bool or str; numbers are positive.
    """

    name: str
    kind: type = int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Format:
    """A format of another library's models.

    Attributes:
        title: what it is, for messages: the class that reads it.
        recognises: whether a config.json is of this format.
        tensors: their arrays. One whose parameters our model lacks, such as those of an untied head, must be absent.
        keys: keys of `config.model` -> settings of theirs with the same value.
        needs: further settings of theirs that `read` needs, with their types.
        ours: values that keys of `config.model` must have, besides `COMMON`.
        theirs: values that their settings must have, if they are present; an export has them.
        inactive: values under which settings of other variants have no effect; an export leaves them out.
        defaults: values of their settings that may be missing.
        read: function (their settings with defaults) -> further keys of `config.model`, and further settings that
            cannot be read, such as "rope_scaling=yarn".
        write: function (a complete config) -> further settings of theirs.
        problems: function (a complete config) -> further reasons why a model cannot be written, besides `ours`.
        units: how many of their layers one of ours has.
        float32: whether parameters are float32, whatever the file's are.
        ignored: ends of names of arrays that follow from the settings, in old files.
        prepare: function applied to their arrays first, such as one that folds one into another.
        one_way: why a model cannot be written in this format; empty: it can.
        library: how its card calls the library that loads it: transformers, or fla.
    """

    title: str
    recognises: Callable[[Settings], bool]
    tensors: tuple[Tensor, ...]
    keys: Mapping[str, Setting]
    ours: Mapping[str, Any]
    needs: Mapping[str, type] = dataclasses.field(default_factory=dict)
    theirs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    inactive: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    read: Callable[[Settings], tuple[dict[str, Any], list[str]]] = lambda settings: ({}, [])
    write: Callable[[ModelConfig], dict[str, Any]] = lambda config: {}
    problems: Callable[[ModelConfig], list[str]] = lambda config: []
    units: int = 1
    float32: bool = False
    ignored: tuple[str, ...] = ()
    prepare: Callable[[Arrays], Arrays] = lambda arrays: arrays
    one_way: str = ""
    library: str = "transformers"


def register_format(name: str, row: Format) -> None:
    """Registers a format, for `import_model` and `export --format`.

    >>> from flash_lm.models.formats.llama import LLAMA
    >>> register_format("my_llama", dataclasses.replace(LLAMA, recognises=lambda x: x.get("model_type") == "my_llama"))
    >>> find_format({"model_type": "my_llama"})
    'my_llama'
    """
    FORMATS.register(name, row)


def of_type(name: str) -> Callable[[Settings], bool]:
    """Recognises a config.json by its `model_type`."""
    return lambda settings: settings.get("model_type") == name


def find_format(settings: Settings) -> str:
    """The name of the format of a config.json; of several that recognise it, the one that was registered last.

    Raises:
        InputError: no format recognises it.
    """
    for name, row in reversed([*FORMATS.items()]):
        if row.recognises(settings):
            return name
    kind = settings.get("model_type")
    listed = ", ".join(FORMATS)
    raise InputError(f"config.json has model_type={kind}, which no format of flash_lm recognises: it reads {listed}")
