"""Chat templates: Jinja programs that come with a model and write a chat as the text that it was trained on.

The variables and functions are those of `apply_chat_template` of Hugging Face's transformers, so that templates written
for it render the same text. A template of a downloaded model is untrusted: it runs in Jinja's sandbox.
"""

import datetime
import functools
import json
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from flash_lm.errors import InputError, first_line

Message = Mapping[str, str]  # role and content

_MOST_SECONDS = 10.0  # of one rendering; usual ones take less than a millisecond
_MOST_CHARACTERS = 1 << 24  # of one rendering, and of one value
_LARGEST_INTEGER = 1 << 64  # that is computed with
_ADVICE = "import the model's folder with another one in its chat_template.jinja"


class ChatTemplate:
    """A compiled chat template.

    The sandbox gives no access to Python, files or the network. A rendering also ends in an error when its text is too
    long, or when it takes too long, which is checked at each turn of a loop, call, filter, test and operation that can
    make a value larger. One operation alone, such as a comparison of lists in lists, and the memory of a template are
    not bounded.
    """

    def __init__(self, source: str, begin: str | None, end: str):
        """Compiles a template; raises InputError if it is none.

        Args:
            source: Jinja source.
            begin: what `bos_token` stands for; None: it is undefined, and so empty.
            end: what `eos_token` stands for.
        """
        self._environment = environment = _Environment()
        self._tokens = {"eos_token": end} if begin is None else {"bos_token": begin, "eos_token": end}
        try:
            tree = environment.parse(source)
            tree = _check_often(tree)
            tree.set_environment(environment)  # of the new nodes, too
            code = environment.compile(tree)
            self._template = environment.template_class.from_code(environment, code, environment.make_globals(None))
        except Exception as error:  # a syntax error, but also one of Python for strange sources, such as deep nesting
            raise InputError(f"the chat template is no valid Jinja ({_reason(error)}): {_ADVICE}") from None

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        """The text of a chat, which can be encoded as UTF-8.

        Args:
            messages: role and content of each message.
            add_generation_prompt: whether it ends with the beginning of an answer.

        Raises:
            InputError: the template refuses the messages, or fails on them.
        """
        # Copies of plain text, for a template could otherwise reach methods of other types.
        chat = [{key: str(value) for key, value in message.items()} for message in messages]
        pieces, size = [], 0
        self._environment.start()
        try:
            for piece in self._template.generate(
                messages=chat,
                add_generation_prompt=add_generation_prompt,
                tools=None,
                documents=None,
                **self._tokens,
            ):
                pieces.append(piece)
                size += len(piece)
                if size > _MOST_CHARACTERS:
                    raise SecurityError(f"its text has over {_MOST_CHARACTERS:,} characters")
        except _RefusedError as error:
            raise InputError(f"the chat template refuses these messages: {_reason(error)}") from None
        except Exception as error:  # whatever its program does wrong
            raise InputError(f"the chat template fails ({_reason(error)}): {_ADVICE}") from None
        text = "".join(pieces)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            wrong = f"U+{ord(text[error.start]):04X}"
            raise InputError(f"the chat template writes {wrong}, which is not UTF-8 text: {_ADVICE}") from None
        return text


class _RefusedError(TemplateError):
    """What a template raises about messages, such as roles that do not alternate."""


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with what chat templates expect, and with checks of time and of the size of values."""

    intercepted_binops = frozenset({"+", "-", "*", "//", "%", "**"})

    def __init__(self):
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        self._started = threading.local()  # a service renders in several threads
        self.filters["tojson"] = _to_json
        self.filters = {name: self._timed(function) for name, function in self.filters.items()}
        self.tests = {name: self._timed(function) for name, function in self.tests.items()}
        # The class `dict` and Jinja's own namespaces, whose names may be Python's internal ones, stay out of reach, and
        # so does its generator of filler text, which takes as long as it is told to.
        del self.globals["lipsum"]
        self.globals |= {
            "raise_exception": _refuse,
            "strftime_now": lambda form: datetime.datetime.now().strftime(form),
            "dict": lambda *pairs, **values: dict(*pairs, **values),
            "namespace": _namespace,
        }

    def start(self) -> None:
        """Sets the time at which a rendering of this thread must have ended."""
        self._started.at = time.monotonic()

    def check_time(self) -> None:
        """Raises SecurityError if a rendering takes too long."""
        if time.monotonic() - self._started.at > _MOST_SECONDS:
            raise SecurityError(f"it takes over {_MOST_SECONDS:.0f} s")

    def call(*args: Any, **kwargs: Any) -> Any:
        """The sandbox's check of each call, after one of time; keyword arguments of a template may have any name."""
        args[0].check_time()
        return ImmutableSandboxedEnvironment.call(*args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """An operation that could take for ever, or all memory: alone, or as one of many that each double a value."""
        self.check_time()
        if operator == "**":
            raise SecurityError("it computes a power, which chat templates may not")
        sizes = [len(x) for x in (left, right) if isinstance(x, str | list | tuple)]
        numbers = [x for x in (left, right) if isinstance(x, int)]
        if any(abs(x) > _LARGEST_INTEGER for x in numbers):
            raise SecurityError("it computes with an integer over 2**64")
        self._check_size(math.prod(sizes + numbers) if sizes and operator == "*" else sum(sizes))
        return super().call_binop(context, operator, left, right)

    def concat(self, pieces: Iterable[str]) -> str:
        """What macros and blocks write, as one text."""
        self.check_time()
        texts = list(pieces)
        self._check_size(sum(map(len, texts)))
        return "".join(texts)

    def join(self, *values: Any) -> str:
        """The operator ~."""
        return self.concat(map(str, values))

    def _check_size(self, size: int) -> None:
        if size > _MOST_CHARACTERS:
            raise SecurityError(f"it makes a value of over {_MOST_CHARACTERS:,} characters or elements")

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A filter or test behind a check of time."""

        @functools.wraps(function)  # with the mark of what Jinja must pass to it
        def timed(*args: Any, **kwargs: Any) -> Any:
            self.check_time()
            return function(*args, **kwargs)

        return timed


class _Generation(Extension):
    """The tag `generation`, with which some templates mark answers for training; its content is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012 (as Jinja declares it)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The nodes between the tag and its end."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _JoinChecked(NodeTransformer):
    """Lets the environment do what the operator ~ does."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Call:  # noqa: N802 (as Jinja names it)
        """A call in place of the operator."""
        self.generic_visit(node)
        return nodes.Call(nodes.EnvironmentAttribute("join"), node.nodes, [], None, None, lineno=node.lineno)


def _check_often(tree: nodes.Template) -> nodes.Template:
    """The program with checks of time and size where Jinja has no hook; refuses internal names in namespaces."""
    for loop in tree.find_all(nodes.For):
        check = nodes.Call(nodes.EnvironmentAttribute("check_time"), [], [], None, None)
        loop.body.insert(0, nodes.ExprStmt(check, lineno=loop.lineno))
    for reference in tree.find_all(nodes.NSRef):
        _check_public([reference.attr])
    return _JoinChecked().visit(tree)


def _check_public(names: Any) -> None:
    if internal := [name for name in names if str(name).startswith("_")]:
        raise SecurityError(f"it sets {internal[0]}, and names in a namespace may not begin with _")


def _namespace(*pairs: Any, **values: Any) -> Namespace:
    attributes = dict(*pairs, **values)
    _check_public(attributes)
    return Namespace(attributes)


def _reason(error: Exception) -> str:
    """Why a template failed, in text that can be printed whatever the template has put into it."""
    return first_line(error).encode(errors="replace").decode()


def _refuse(message: str) -> NoReturn:
    raise _RefusedError(message)


def _to_json(
    x: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without Jinja's escapes for HTML."""
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
