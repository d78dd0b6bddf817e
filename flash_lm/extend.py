"""The plugin interface: all that a module imports to register a family, task, corpus, head, optimizer and more.

docs/extend.md has examples.

Other modules of the package may move; these names stay.
"""

from flash_lm.config.keys import above, at_least, below, fraction, key, one_of, section
from flash_lm.data.answers import Answers
from flash_lm.data.conditioning import Conditioning
from flash_lm.data.corpora import CorpusKind, register_corpus
from flash_lm.data.corpus import Piece
from flash_lm.data.examples import Example, ExampleCorpus
from flash_lm.data.tasks import Task, register_task
from flash_lm.families.family import Family, register_family
from flash_lm.families.feed_forward import GLU_SPEC, MLP_SPEC
from flash_lm.families.flash import GatedAttentionUnit
from flash_lm.families.sublayer_spec import SublayerSpec
from flash_lm.layers.attention import MultiHeadAttention
from flash_lm.layers.attention_core import Pair, PlainCore, UndecodableCore
from flash_lm.layers.dense import Dense, Output
from flash_lm.layers.kernel_packages import CoreKernel
from flash_lm.layers.linear_core import LinearCore, LinearOptions
from flash_lm.layers.parameter import VECTORS
from flash_lm.layers.sublayer import Sublayer
from flash_lm.models.formats.format import TRANSPOSED, Format, Layout, Setting, Tensor, register_format
from flash_lm.models.output_heads import Head, HeadInputs, HeadKind, Losses, register_head, weighted_sum
from flash_lm.training.loggers import LoggedRun, Logger, register_logger
from flash_lm.training.optimizer import Optimizer, register_optimizer

__all__ = [
    "GLU_SPEC",
    "MLP_SPEC",
    "TRANSPOSED",
    "VECTORS",
    "Answers",
    "Conditioning",
    "CoreKernel",
    "CorpusKind",
    "Dense",
    "Example",
    "ExampleCorpus",
    "Family",
    "Format",
    "GatedAttentionUnit",
    "Head",
    "HeadInputs",
    "HeadKind",
    "Layout",
    "LinearCore",
    "LinearOptions",
    "LoggedRun",
    "Logger",
    "Losses",
    "MultiHeadAttention",
    "Optimizer",
    "Output",
    "Pair",
    "Piece",
    "PlainCore",
    "Setting",
    "Sublayer",
    "SublayerSpec",
    "Task",
    "Tensor",
    "UndecodableCore",
    "above",
    "at_least",
    "below",
    "fraction",
    "key",
    "one_of",
    "register_corpus",
    "register_family",
    "register_format",
    "register_head",
    "register_logger",
    "register_optimizer",
    "register_task",
    "section",
    "weighted_sum",
]
