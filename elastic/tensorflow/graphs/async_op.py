"""Graph operation that starts a Python function and completes asynchronously, without blocking a TensorFlow thread.

``tf.numpy_function`` occupies a thread of TensorFlow's pool until it returns, so a graph with more collectives in
flight than the pool has threads would deadlock. The operation in this module is an ``AsyncOpKernel`` instead,
registered through TensorFlow's C API (``tensorflow/c/kernels.h``). `bridge` decides what runs in it.

The C API passes a kernel the address of a ``std::function`` that the caller destroys when the kernel returns. This
module therefore moves the ``std::function`` to its own memory, as libstdc++'s move constructor does. `available`
returns False if TensorFlow lacks a symbol or was built with another C++ library.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import secrets
import sys
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf
import torch

from elastic.errors import UnsupportedType
from elastic.tensorflow.graphs.lent_memory import LentMemory

OP = "ElasticCall"

# Function that starts a call. It must call ``call.succeed`` or ``call.fail`` exactly once, possibly later and from
# another thread. It may raise an exception only before that.
Start = Callable[["AsyncCall"], None]

_DTYPES = {
    tf.float32: torch.float32,
    tf.float64: torch.float64,
    tf.float16: torch.float16,
    tf.bfloat16: torch.bfloat16,
    tf.uint8: torch.uint8,
    tf.int8: torch.int8,
    tf.int16: torch.int16,
    tf.int32: torch.int32,
    tf.int64: torch.int64,
    tf.bool: torch.bool,
    tf.complex64: torch.complex64,
    tf.complex128: torch.complex128,
    tf.uint16: torch.uint16,
    tf.uint32: torch.uint32,
    tf.uint64: torch.uint64,
}
_OF_NUMBER = {dtype.as_datatype_enum: of_torch for dtype, of_torch in _DTYPES.items()}
_NUMBERS = {of_torch: number for number, of_torch in _OF_NUMBER.items()}

_at, _int, _i64, _size = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_size_t
_text = ctypes.c_char_p

# Result type and argument types, as in tensorflow/c/{kernels,ops,tf_status,tf_tensor}.h.
_FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "TF_NewStatus": (_at, ()),
    "TF_DeleteStatus": (None, (_at,)),
    "TF_SetStatus": (None, (_at, _int, _text)),
    "TF_GetCode": (_int, (_at,)),
    "TF_Message": (_text, (_at,)),
    "TF_NewOpDefinitionBuilder": (_at, (_text,)),
    "TF_OpDefinitionBuilderAddAttr": (None, (_at, _text)),
    "TF_OpDefinitionBuilderAddInput": (None, (_at, _text)),
    "TF_OpDefinitionBuilderAddOutput": (None, (_at, _text)),
    "TF_OpDefinitionBuilderSetIsStateful": (None, (_at, ctypes.c_bool)),
    "TF_OpDefinitionBuilderSetShapeInferenceFunction": (None, (_at, _at)),
    "TF_RegisterOpDefinition": (None, (_at, _at)),
    "TF_NewAsyncKernelBuilder": (_at, (_text, _text, _at, _at, _at)),
    "TF_RegisterKernelBuilder": (None, (_text, _at, _at)),
    "TF_OpKernelConstruction_GetAttrInt64": (None, (_at, _text, _at, _at)),
    "TF_NumInputs": (_int, (_at,)),
    "TF_NumOutputs": (_int, (_at,)),
    "TF_InputDatatype": (_int, (_at, _int)),
    "TF_ExpectedOutputDataType": (_int, (_at, _int)),
    "TF_GetInput": (None, (_at, _int, _at, _at)),
    "TF_AllocateOutput": (_at, (_at, _int, _int, _at, _int, _size, _at)),
    "TF_SetOutput": (None, (_at, _int, _at, _at)),
    "TF_NewTensor": (_at, (_int, _at, _int, _at, _size, _at, _at)),
    "TF_DeleteTensor": (None, (_at,)),
    "TF_NumDims": (_int, (_at,)),
    "TF_Dim": (_i64, (_at, _int)),
    "TF_TensorByteSize": (_size, (_at,)),
    "TF_TensorData": (_at, (_at,)),
    "TF_OpKernelContext_Failure": (None, (_at, _at)),
}
_DONE = "TF_RunAsyncOpKernelDoneCallback"
_SHAPES = "TF_ShapeInferenceContextSetUnknownShape"

# Symbol with libstdc++'s std::function as a parameter. Its mangled name differs with other C++ libraries.
_LIBSTDCXX = (
    "_ZN10tensorflow16ThreadPoolDevice12ComputeAsyncEPNS_13AsyncOpKernelEPNS_15OpKernelContextE"
    "St8functionIFvvEE"
)
# std::function of libstdc++: 16 bytes for the callable, then two function pointers, its manager and its invoker.
_FUNCTION_BYTES, _MANAGER = 32, 16
_DESTROY = 3  # std::_Manager_operation::__destroy_functor

_Create = ctypes.CFUNCTYPE(_at, _at)
_Compute = ctypes.CFUNCTYPE(None, _at, _at, _at)
_Manager = ctypes.CFUNCTYPE(ctypes.c_bool, _at, _at, _int)

_starts: weakref.WeakValueDictionary[int, _Callee] = weakref.WeakValueDictionary()
# Tokens start at a random number, so that a graph saved by another process matches no entry of ``_starts``.
_tokens = itertools.count(secrets.randbits(62) + 1)


class _Callee:
    def __init__(self, start: Start) -> None:
        self.start = start


def available() -> bool:
    """Return whether this TensorFlow supports the operation. The first call registers it."""
    return _library() is not None


def add(
    start: Start, tensors: Sequence[tf.Tensor], dtypes: Sequence[tf.DType], name: str
) -> list[tf.Tensor]:
    """Add the operation to the graph under construction. ``start`` is called at each run of the operation.

    Call this only if `available` returns True. The results have no static shapes.
    """
    graph = tf.compat.v1.get_default_graph()
    held = _Callee(start)
    token = next(_tokens)
    _starts[token] = held
    _keep(graph, held)
    made = graph.create_op(
        OP,
        list(tensors),
        list(dtypes),
        name=name,
        attrs={
            "Tin": _types([tensor.dtype for tensor in tensors]),
            "Tout": _types(dtypes),
            "token": tf.compat.v1.AttrValue(i=token),
        },
    )
    return list(made.outputs)


def _types(dtypes: Sequence[tf.DType]) -> Any:
    numbers = [dtype.as_datatype_enum for dtype in dtypes]
    return tf.compat.v1.AttrValue(list=tf.compat.v1.AttrValue.ListValue(type=numbers))


def _keep(graph: Any, held: _Callee) -> None:
    """Keep the start function in the outermost graph, like ``tf.numpy_function``.

    Operations built inside a function's graph may outlive that graph.
    """
    while (outer := getattr(graph, "outer_graph", None)) is not None:
        graph = outer
    if not hasattr(graph, "_elastic_calls"):
        graph._elastic_calls = []
    graph._elastic_calls.append(held)


class AsyncCall:
    """Pending run of the operation. Call `succeed` or `fail` exactly once, from any thread."""

    def __init__(self, lib: _TensorFlowLibrary, context: int, done: int) -> None:
        self._lib = lib
        self._context = context
        self._done = (ctypes.c_char * _FUNCTION_BYTES).from_buffer_copy(
            (ctypes.c_char * _FUNCTION_BYTES).from_address(done)
        )
        _at.from_address(done + _MANAGER).value = None  # mark the source as moved-from

    def inputs(self) -> list[torch.Tensor]:
        """Return the input tensors as views of TensorFlow's memory, which is kept until the last view is freed.

        Raises:
            UnsupportedType: torch has no dtype for one of the tensors.
        """
        lib, found = self._lib, []
        for number in range(lib.TF_NumInputs(self._context)):
            dtype = _OF_NUMBER.get(lib.TF_InputDatatype(self._context, number))
            if dtype is None:
                kind = tf.as_dtype(lib.TF_InputDatatype(self._context, number)).name
                raise UnsupportedType(
                    f"a tensor of {kind} can't be sent: cast it to a numeric dtype of torch"
                )
            tensor = _at()
            with lib.status() as status:
                lib.TF_GetInput(self._context, number, ctypes.addressof(tensor), status)
            shape = [lib.TF_Dim(tensor, axis) for axis in range(lib.TF_NumDims(tensor))]
            size = lib.TF_TensorByteSize(tensor)
            if size == 0:
                lib.TF_DeleteTensor(tensor)
                found.append(torch.empty(shape, dtype=dtype, device="cpu"))
                continue
            memory = (ctypes.c_char * size).from_address(lib.TF_TensorData(tensor))
            # Keep the memory as long as any view exists: an aborted group may still read it after the operation has
            # failed.
            weakref.finalize(memory, lib.TF_DeleteTensor, tensor).atexit = False
            found.append(torch.frombuffer(memory, dtype=dtype).view(shape))
        return found

    def succeed(self, results: list[torch.Tensor]) -> None:
        """Complete the operation with these results.

        ``results`` must be CPU tensors of the expected dtypes, otherwise the operation fails. The list is emptied
        before the operation completes, so that subsequent operations can reuse the memory of the results.
        """
        try:
            wanted = self._lib.TF_NumOutputs(self._context)
            if len(results) != wanted:
                raise ValueError(
                    f"the function returned {len(results)} results instead of {wanted}: return one result per"
                    " declared output"
                )
            for number in range(wanted):
                self._give(number, results[number].detach().contiguous())
            results.clear()
        except BaseException as error:
            self.fail(tf.errors.INTERNAL, f"{type(error).__name__}: {error}")
            return
        self._end()

    def _give(self, number: int, result: torch.Tensor) -> None:
        lib, kind = self._lib, _NUMBERS[result.dtype]
        wanted = lib.TF_ExpectedOutputDataType(self._context, number)
        if kind != wanted:
            raise TypeError(
                f"result {number} of the function has type {result.dtype}, but the operation declares"
                f" {_OF_NUMBER.get(wanted)}: cast the result"
            )
        shape, rank, size = (_i64 * result.dim())(*result.shape), result.dim(), result.nbytes
        dims = ctypes.addressof(shape)
        flag = lib.lent.lend(result)
        with lib.status() as status:
            if flag is not None:
                data, let_go = result.data_ptr(), lib.lent.let_go
                made = lib.TF_NewTensor(kind, dims, rank, data, size, let_go, flag)
                lib.TF_SetOutput(self._context, number, made, status)
            else:
                made = lib.TF_AllocateOutput(self._context, number, kind, dims, rank, size, status)
        if made and size and flag is None:
            ctypes.memmove(lib.TF_TensorData(made), result.data_ptr(), size)
        lib.TF_DeleteTensor(made)

    def fail(self, code: int, message: str) -> None:
        """Fail the operation with a TensorFlow error code, such as ``tf.errors.INTERNAL``."""
        lib = self._lib
        status = lib.TF_NewStatus()
        lib.TF_SetStatus(status, code, message.encode())
        lib.TF_OpKernelContext_Failure(self._context, status)
        lib.TF_DeleteStatus(status)
        self._end()

    def _end(self) -> None:
        address = ctypes.addressof(self._done)
        self._lib.done(address)
        _manager(address)(address, address, _DESTROY)


def _manager(function: int) -> Any:
    return _Manager(_at.from_address(function + _MANAGER).value or 0)


class _TensorFlowLibrary:
    """Binding to TensorFlow's C API.

    Raises:
        OSError: the library is missing.
        AttributeError: the library lacks a function.
    """

    def __init__(self) -> None:
        file = str(Path(tf.__file__).parent / "libtensorflow_framework.so.2")
        # Short calls hold the GIL. Completing an operation releases the GIL, because it starts the next operations.
        quick, self._slow = ctypes.PyDLL(file), ctypes.CDLL(file)
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(quick, name)
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)
        self.done = getattr(self._slow, _DONE)
        self.done.restype, self.done.argtypes = None, (_at,)
        getattr(self._slow, _LIBSTDCXX)
        self.lent = LentMemory()
        # Keep references, because TensorFlow calls these functions until the process exits.
        self._create = _Create(self._created)
        self._compute = _Compute(self._computed)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)

    def status(self) -> _CallStatus:
        return _CallStatus(self)

    def register(self) -> None:
        """Register the operation and its kernel. Raises RuntimeError if TensorFlow rejects either."""
        with self.status() as status:
            made = self.TF_NewOpDefinitionBuilder(OP.encode())
            for attribute in ("Tin: list(type) >= 0", "Tout: list(type) >= 0", "token: int"):
                self.TF_OpDefinitionBuilderAddAttr(made, attribute.encode())
            self.TF_OpDefinitionBuilderAddInput(made, b"input: Tin")
            self.TF_OpDefinitionBuilderAddOutput(made, b"output: Tout")
            self.TF_OpDefinitionBuilderSetIsStateful(made, True)
            shapes = ctypes.cast(getattr(self._slow, _SHAPES), _at)
            self.TF_OpDefinitionBuilderSetShapeInferenceFunction(made, shapes)
            self.TF_RegisterOpDefinition(made, status)
        with self.status() as status:
            create, compute = ctypes.cast(self._create, _at), ctypes.cast(self._compute, _at)
            kernel = self.TF_NewAsyncKernelBuilder(OP.encode(), b"CPU", create, compute, None)
            self.TF_RegisterKernelBuilder(OP.encode(), kernel, status)

    def _created(self, construction: int) -> int:
        token = _i64()
        with self.status() as status:
            self.TF_OpKernelConstruction_GetAttrInt64(
                construction, b"token", ctypes.addressof(token), status
            )
        return token.value

    def _computed(self, token: int, context: int, done: int) -> None:
        # Catch every exception, since ctypes would only print it, and the operation would never complete.
        call = AsyncCall(self, context, done)
        try:
            self.lent.collect()
            held = _starts.get(token)
            if held is None:
                raise RuntimeError(
                    "the graph of this operation was created by another process, or no longer exists: build the graph"
                    " in this process"
                )
            held.start(call)
        except BaseException as error:
            call.fail(tf.errors.INTERNAL, f"{type(error).__name__}: {error}")


class _CallStatus:
    """Status of the calls in a block. Raises RuntimeError after the block if a call failed."""

    def __init__(self, lib: _TensorFlowLibrary) -> None:
        self._lib = lib
        self._status = 0

    def __enter__(self) -> int:
        self._status = self._lib.TF_NewStatus()
        return self._status

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        code = self._lib.TF_GetCode(self._status)
        message = self._lib.TF_Message(self._status).decode(errors="replace")
        self._lib.TF_DeleteStatus(self._status)
        if code and error is None:
            raise RuntimeError(
                f"TensorFlow's C API reported an error: {message}. Check the shapes and dtypes of the"
                " tensors"
            )


@functools.cache
def _library() -> _TensorFlowLibrary | None:
    if sys.platform != "linux":
        return None
    try:
        lib = _TensorFlowLibrary()
        lib.register()
    except (AttributeError, OSError, RuntimeError):
        return None
    tf.no_gradient(OP)
    return lib
