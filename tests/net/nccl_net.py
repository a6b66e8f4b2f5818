"""NCCL's network interface, versions 8 and 11, called as NCCL calls it. Names and order are those of NCCL's headers."""

import ctypes
import time
from ctypes import CFUNCTYPE, POINTER, Structure, byref, c_char_p, c_float, c_int, c_size_t, c_uint64, c_void_p

HANDLE_BYTES = 128
PTR_HOST, PTR_CUDA = 1, 2
OPTIONAL_RECV_COMPLETION = 1  # what NCCL may leave in *request before irecv
Logger = CFUNCTYPE(None, c_int, ctypes.c_ulong, c_char_p, c_int, c_char_p, c_char_p)
Handle = ctypes.c_char * HANDLE_BYTES


class NetError(Exception):
    """A call returned this ncclResult_t."""

    SYSTEM, INTERNAL, INVALID_ARGUMENT, INVALID_USAGE, REMOTE = 2, 3, 4, 5, 6

    def __init__(self, code, *sentences):
        super().__init__(code, *sentences)
        self.code = code


IDENTITY = (
    ("name", c_char_p),
    ("pciPath", c_char_p),
    ("guid", c_uint64),
    ("ptrSupport", c_int),
    ("regIsGlobal", c_int),
)
LIMITS = (
    ("speed", c_int),
    ("port", c_int),
    ("latency", c_float),
    ("maxComms", c_int),
    ("maxRecvs", c_int),
    ("netDeviceType", c_int),
    ("netDeviceVersion", c_int),
)


class PropertiesV8(Structure):
    _fields_ = IDENTITY + LIMITS


class PropertiesV11(Structure):
    _fields_ = (
        *IDENTITY,
        ("forceFlush", c_int),
        *LIMITS,
        ("ndevs", c_int),
        ("devs", c_int * 4),
        ("maxP2pBytes", c_size_t),
        ("maxCollBytes", c_size_t),
        ("maxMultiRequestSize", c_int),
    )


def function(*arguments):
    return CFUNCTYPE(c_int, *arguments)


OUT = POINTER(c_void_p)
COMMON = {
    "devices": function(POINTER(c_int)),
    "accept": function(c_void_p, OUT, OUT),
    "regMr": function(c_void_p, c_void_p, c_size_t, c_int, OUT),
    "regMrDmaBuf": c_void_p,
    "deregMr": function(c_void_p, c_void_p),
    "iflush": function(c_void_p, c_int, OUT, POINTER(c_int), OUT, OUT),
    "test": function(c_void_p, POINTER(c_int), POINTER(c_int)),
    "closeSend": function(c_void_p),
    "closeRecv": function(c_void_p),
    "closeListen": function(c_void_p),
    "getDeviceMr": c_void_p,
    "irecvConsumed": c_void_p,
}
ORDER = [
    *("init", "devices", "getProperties", "listen", "connect", "accept", "regMr", "regMrDmaBuf", "deregMr"),
    *("isend", "irecv", "iflush", "test", "closeSend", "closeRecv", "closeListen", "getDeviceMr", "irecvConsumed"),
]
V8 = COMMON | {
    "init": function(Logger),
    "getProperties": function(c_int, POINTER(PropertiesV8)),
    "listen": function(c_int, c_void_p, OUT),
    "connect": function(c_int, c_void_p, OUT, OUT),
    "isend": function(c_void_p, c_void_p, c_int, c_int, c_void_p, OUT),
    "irecv": function(c_void_p, c_int, OUT, POINTER(c_int), POINTER(c_int), OUT, OUT),
}
V11 = COMMON | {
    "init": function(OUT, c_uint64, c_void_p, Logger, c_void_p),
    "getProperties": function(c_int, POINTER(PropertiesV11)),
    "listen": function(c_void_p, c_int, c_void_p, OUT),
    "connect": function(c_void_p, c_int, c_void_p, OUT, OUT),
    "isend": function(c_void_p, c_void_p, c_size_t, c_int, c_void_p, c_void_p, OUT),
    "irecv": function(c_void_p, c_int, OUT, POINTER(c_size_t), POINTER(c_int), OUT, OUT, OUT),
    "makeVDevice": c_void_p,
    "finalize": function(c_void_p),
    "setNetAttr": function(c_void_p, c_void_p),
}
MORE = ["makeVDevice", "finalize", "setNetAttr"]


def table(names, types):
    fields = [("name", c_char_p), *((name, types[name]) for name in names)]
    return type("Table", (Structure,), {"_fields_": fields})


TABLES = {8: table(ORDER, V8), 11: table(ORDER + MORE, V11)}


class Net:
    """One version of the plugin in `path`, initialised."""

    def __init__(self, path, version):
        self.version, self.said = version, []
        self.functions = TABLES[version].in_dll(ctypes.CDLL(path), f"ncclNetPlugin_v{version}")
        self.logger = Logger(lambda level, about, file, line, form, text: self.said.append((level, text.decode())))
        self.context = c_void_p()
        if version == 8:
            self.check(self.functions.init(self.logger))
        else:
            self.check(self.functions.init(byref(self.context), 7, None, self.logger, None))

    def check(self, code):
        if code:
            raise NetError(code, *[text for level, text in self.said if level == 2])

    @property
    def before(self):
        """The first arguments of `listen` and `connect`."""
        return () if self.version == 8 else (self.context,)

    def devices(self):
        count = c_int()
        self.check(self.functions.devices(byref(count)))
        return count.value

    def properties(self, device=0):
        found = (PropertiesV8 if self.version == 8 else PropertiesV11)()
        self.check(self.functions.getProperties(device, byref(found)))
        return found

    def listen(self, device=0):
        handle, listener = Handle(), c_void_p()
        self.check(self.functions.listen(*self.before, device, handle, byref(listener)))
        return handle, listener

    def connect(self, handle, device=0):
        """None until there is a connection."""
        sender = c_void_p()
        self.check(self.functions.connect(*self.before, device, handle, byref(sender), None))
        return sender if sender.value else None

    def accept(self, listener):
        receiver = c_void_p()
        self.check(self.functions.accept(listener, byref(receiver), None))
        return receiver if receiver.value else None

    def register(self, connection, buffer, size, kind=PTR_HOST):
        region = c_void_p()
        self.check(self.functions.regMr(connection, buffer, size, kind, byref(region)))
        return region

    def isend(self, sender, buffer, size, region=None, tag=3):
        """None if there is no room for a request."""
        request = c_void_p()
        more = () if self.version == 8 else (None,)
        self.check(self.functions.isend(sender, buffer, size, tag, region, *more, byref(request)))
        return request.value

    def irecv(self, receiver, buffer, size, region=None, tag=3, n=1):
        request = c_void_p(OPTIONAL_RECV_COMPLETION)
        sizes = ((c_int if self.version == 8 else c_size_t) * n)(*[size] * n)
        buffers = (c_void_p * n)(*[ctypes.addressof(buffer)] * n)
        regions, tags = (c_void_p * n)(region), (c_int * n)(*[tag] * n)
        more = () if self.version == 8 else ((c_void_p * n)(),)
        self.check(self.functions.irecv(receiver, n, buffers, sizes, tags, regions, *more, byref(request)))
        return request.value

    def test(self, request):
        """The size of the message, or None if the request is not done."""
        done, size = c_int(), c_int(-1)
        self.check(self.functions.test(request, byref(done), byref(size)))
        return size.value if done.value else None

    def wait(self, request, limit=40.0):
        return until(lambda: self.test(request), limit)

    def flush(self, receiver):
        request = c_void_p(5)
        self.check(self.functions.iflush(receiver, 1, None, None, None, byref(request)))
        return request.value

    def finalize(self):
        self.check(self.functions.finalize(self.context))


def until(poll, limit=40.0):
    """Poll until there is something, as NCCL's proxy does."""
    end = time.monotonic() + limit
    while (found := poll()) is None:
        if time.monotonic() > end:
            raise TimeoutError(f"nothing within {limit:g} s")
        time.sleep(0.0001)
    return found
