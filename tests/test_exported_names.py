"""The public names: there, sorted, documented, and with the arguments that users were promised."""

import inspect
import re
import rlcompleter
import sys
from itertools import count, takewhile
from types import ModuleType

import pytest

import baguakit as bk

# What may be given, in this order. An argument whose feature is still to come may be missing; none may be added,
# reordered or given another default.
PROMISED = {
    "attach": "(model, optimizer, *algorithms, comm=None, bucket_bytes=None, broadcast=True, scaler=None, "
    "timeout=None, weight=None)",
    "Comm": "(group=None, mesh=None, flows=1, between=None, kernels=False)",
    "Bucket": "(params, multiple_of=1)",
}


def public(module):
    """The names that a module offers: its `__all__`, or else what is defined in it."""
    defined = [name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
    return getattr(module, "__all__", [name for name in defined if not name.startswith("_")])


def exported():
    """Yield (dotted name, object) of everything public."""
    for name in bk.__all__:
        value = getattr(bk, name)
        yield f"bk.{name}", value
        if isinstance(value, ModuleType):
            yield from ((f"bk.{name}.{inner}", getattr(value, inner)) for inner in public(value))


def in_order(name):
    """As one reads: Float8 before Float16, constants and classes before functions."""
    return not name[:1].isupper(), [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def namespaces(home=bk):
    """Yield the public modules: the package, and every module that a public one exports."""
    yield home
    for name in home.__all__:
        # Of others a name may need an extra.
        if isinstance(inner := getattr(home, name) if home is bk else vars(home).get(name), ModuleType):
            yield from namespaces(inner)


@pytest.mark.parametrize("home", [*namespaces()], ids=lambda home: home.__name__)
def test_all_is_sorted_and_true(home):
    assert list(home.__all__) == sorted(set(home.__all__), key=in_order)
    assert not [each for each in home.__all__ if not hasattr(home, each)]


@pytest.mark.parametrize("home", [*namespaces()], ids=lambda home: home.__name__)
def test_dir_shows_what_is_public_and_nothing_else(home):
    """So do rlcompleter, IPython and pydoc, which ask it."""
    assert [name for name in dir(home) if not name.startswith("_")] == sorted(home.__all__)
    assert {"__all__", "__doc__", "__name__"} <= set(dir(home))
    with pytest.raises(AttributeError, match=f"module '{home.__name__}' has no attribute 'no_such_name'"):
        home.no_such_name  # noqa: B018 to ask for it is the test


def test_completion_shows_an_extra_without_importing_it(monkeypatch):
    for name in [
        name for name in sys.modules if name.split(".")[0] == "lightning" or name.endswith("interop.strategy")
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "lightning", None)  # as where it is not installed
    assert "bk.interop.lightning" in completions("bk.interop.") and "bk.primitives.pieces" not in completions("bk.")
    with pytest.raises(ImportError, match=r"^BaguaStrategy needs Lightning: pip install 'lightning>=2\.5'$"):
        bk.interop.lightning.BaguaStrategy  # noqa: B018


def completions(text):
    """Return what a terminal completes a text with."""
    completer = rlcompleter.Completer({"bk": bk})
    return list(takewhile(bool, (completer.complete(text, i) for i in count())))


def test_everything_public_is_documented():
    assert not [name for name, value in exported() if not documented(value)]


def test_every_public_method_is_documented():
    assert not [
        f"{name}.{attribute}"
        for name, value in exported()
        if inspect.isclass(value)
        for attribute, member in inspect.getmembers(value)
        if not attribute.startswith("_")
        and (inspect.isfunction(member) or isinstance(member, property))
        and not inspect.getdoc(member)
    ]


MADE_FOR_USERS = {
    "bk.Attachment",
    "bk.Handle",
    "bk.interop.Handle",
    "bk.tune.Tuner",
}  # not by them: their arguments are nobody's business
AS_IN = {  # "all else as in"
    "bk.primitives.adamw_step_": bk.primitives.adam_step_,
    "bk.data.LoadBalancedBatchSampler": bk.data.LoadBalancedSampler,
}


def test_every_argument_is_documented():
    """Each is named in the docstring of its function or class."""
    silent = {}
    for name, value in exported():
        error = inspect.isclass(value) and issubclass(value, BaseException)
        if name not in MADE_FOR_USERS and callable(value) and not error:
            text = f"{inspect.getdoc(value)} {inspect.getdoc(AS_IN.get(name, value))}"
            asked = [
                argument
                for argument in inspect.signature(value).parameters
                if not argument.startswith("_") and argument not in ("args", "kwargs")
            ]
            left_out = [argument for argument in asked if not re.search(rf"\b{argument}\b", text)]
            silent |= {name: left_out} if left_out else {}
    assert not silent


def documented(value):
    if isinstance(value, str):  # __version__
        return True
    text = inspect.getdoc(value)
    # A dataclass without a docstring is given its signature as one.
    return bool(text) and not (inspect.isclass(value) and text.startswith(f"{value.__name__}("))


@pytest.mark.parametrize("name", PROMISED)
def test_promised_arguments(name):
    namespace = {}
    exec(f"def promised{PROMISED[name]}: ...", namespace)
    promised = inspect.signature(namespace["promised"]).parameters
    ours = {
        argument: parameter
        for argument, parameter in inspect.signature(getattr(bk, name)).parameters.items()
        if not argument.startswith("_")
    }
    assert list(ours) == [argument for argument in promised if argument in ours]
    for argument, parameter in ours.items():
        assert parameter.default == promised[argument].default
        # A promised positional argument stays positional; to allow more breaks nobody.
        assert parameter.kind == promised[argument].kind or promised[argument].kind is inspect.Parameter.KEYWORD_ONLY
