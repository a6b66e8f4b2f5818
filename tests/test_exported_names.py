"""The public names: there, sorted, documented, and with the arguments that users were promised."""

import inspect
import re
from types import ModuleType

import pytest

import baguakit as bk

REQUIRED = {
    "": [
        "Bucket",
        "Comm",
        "Fragment",
        "Ranks",
        "after_step",
        "algorithms",
        "attach",
        "between_steps",
        "compressors",
        "during_backward",
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
        "diloco",
        "gradient_allreduce",
        "gradient_tracking",
        "local_sgd",
        "low_precision_decentralized",
        "power_sgd",
        "push_sum",
        "qadam",
        "top_k",
    ],
    "compressors": ["BFloat16", "Compressor", "Float8", "Float16", "MinMaxUInt8", "Sign", "TopK", "UInt4"],
    "interop": ["Handle", "ddp", "fsdp"],
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
    "stages": ["CompressedMean", "ErrorFeedback", "Hierarchical", "Mean", "NeighborMean", "SparseMean", "Stage"],
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


def test_the_package_says_what_is_public():
    assert bk.__all__


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


MADE_FOR_USERS = {"bk.interop.Handle", "bk.tune.Tuner"}  # not by them: their arguments are nobody's business
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
        # What was promised by position works by position; to allow more than was promised breaks nobody.
        assert parameter.kind == promised[argument].kind or promised[argument].kind is inspect.Parameter.KEYWORD_ONLY
