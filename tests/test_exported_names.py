"""The public names: there, sorted, documented, and with the arguments that users were promised."""

import inspect
import re
import rlcompleter
import sys
from itertools import count, takewhile
from types import ModuleType

import pytest

import baguakit as bk

REQUIRED = {
    "": [
        "Attachment",
        "Bucket",
        "Comm",
        "Fragment",
        "Handle",
        "PeerError",
        "RankError",
        "Ranks",
        "Report",
        "Rule",
        "Timeline",
        "after_step",
        "backend",
        "algorithms",
        "attach",
        "between_steps",
        "compressors",
        "during_backward",
        "elastic",
        "free_running",
        "data",
        "hierarchical",
        "net",
        "interop",
        "optim",
        "pictures",
        "primitives",
        "ranks",
        "stages",
        "topology",
        "tune",
    ],
    "algorithms": [
        "async_model_average",
        "bytegrad",
        "choco",
        "decentralized",
        "decoupled_momentum",
        "diloco",
        "ef21",
        "gradient_allreduce",
        "gradient_tracking",
        "lion_vote",
        "local_sgd",
        "low_precision_decentralized",
        "power_sgd",
        "push_sum",
        "qadam",
        "signum",
        "top_k",
    ],
    "compressors": [
        "BFloat16",
        "Compressor",
        "Float8",
        "Float16",
        "MinMaxUInt8",
        "Sign",
        "TopK",
        "UInt2",
        "UInt4",
        "Uniform",
    ],
    "backend": ["Policy", "Report", "Row", "exact", "register", "report"],
    "interop": ["Handle", "ddp", "fsdp", "lightning"],
    "net": ["SocketSettings", "build", "measure", "nccl_socket_settings", "serve"],
    "pictures": ["consensus_decay", "error_histogram", "roofline", "score_by_bytes"],
    "primitives": [
        "Fixed",
        "adam_step_",
        "adamw_step_",
        "compressed_mean_",
        "gradient_norm",
        "launch",
        "lion_step_",
        "mean_",
        "neighbor_gather",
        "neighbor_mean_",
        "sgd_step_",
        "sparse_mean_",
    ],
    "optim": ["Report", "fuse", "report", "unfuse"],
    "ranks": ["RankError", "Ranks", "progress"],
    "stages": [
        "Adaptive",
        "CompressedMean",
        "ErrorFeedback",
        "Hierarchical",
        "Mean",
        "NeighborMean",
        "SparseMean",
        "Stage",
        "finite",
        "keep_",
    ],
    "topology": [
        "BaseK",
        "Chosen",
        "Exponential",
        "FromDigraph",
        "FromGraph",
        "FromMatrix",
        "FullyConnected",
        "Grid2D",
        "Hypercube",
        "OnePeerExact",
        "OnePeerExponential",
        "RandomMatching",
        "Ring",
        "ShiftOne",
        "Star",
        "SymmetricExponential",
        "Topology",
    ],
    "tune": [
        "Codec",
        "Compute",
        "Cost",
        "Line",
        "Link",
        "Load",
        "Network",
        "Place",
        "Plan",
        "Prediction",
        "Trial",
        "Tuner",
        "autotune",
        "cost",
        "plan",
        "predict",
        "probe",
    ],
}
# What may be given, in this order. An argument whose feature is still to come may be missing; none may be added,
# reordered or given another default.
PROMISED = {
    "attach": "(model, optimizer, *algorithms, comm=None, bucket_bytes=26214400, broadcast=True, scaler=None, "
    "timeout=None)",
    "Comm": "(group=None, mesh=None, flows=1)",
    "Bucket": "(params, multiple_of=1)",
}


def module(name):
    return getattr(bk, name) if name else bk


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


@pytest.mark.parametrize("name", REQUIRED)
def test_promised_names_are_exported(name):
    assert set(REQUIRED[name]) <= set(public(module(name)))


def in_order(name):
    """As one reads: Float8 before Float16, constants and classes before functions."""
    return not name[:1].isupper(), [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


@pytest.mark.parametrize("name", REQUIRED)
def test_all_is_sorted_and_true(name):
    names = getattr(module(name), "__all__", [])
    assert list(names) == sorted(set(names), key=in_order)
    assert not [each for each in names if not hasattr(module(name), each)]


def namespaces(home=bk):
    """Yield the public modules: the package, and every module that a public one exports."""
    yield home
    for name in home.__all__:
        # Of others a name may need an extra.
        if isinstance(inner := getattr(home, name) if home is bk else vars(home).get(name), ModuleType):
            yield from namespaces(inner)


@pytest.mark.parametrize("home", [*namespaces()], ids=lambda home: home.__name__)
def test_dir_shows_what_is_public_and_nothing_else(home):
    """So do rlcompleter, IPython and pydoc, which ask it."""
    assert [name for name in dir(home) if not name.startswith("_")] == sorted(home.__all__)
    assert {"__all__", "__doc__", "__name__"} <= set(dir(home))
    with pytest.raises(AttributeError, match=f"module '{home.__name__}' has no attribute 'no_such_name'"):
        home.no_such_name  # noqa: B018 to ask for it is the test


def test_every_promised_namespace_is_one():
    names = {home.__name__.removeprefix("baguakit").removeprefix(".") for home in namespaces()}
    assert names >= {*REQUIRED, "data", "interop.lightning"}
    assert callable(bk.attach)  # and no namespace: the function has the name of its folder


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
        error = inspect.isclass(value) and issubclass(value, Exception)
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
