"""Structures of copies of rectangles, for calls of the driver API."""

import ctypes


class Side(ctypes.Structure):
    """One side of `CUDA_MEMCPY2D`."""

    _fields_ = [
        ("x", ctypes.c_size_t),
        ("y", ctypes.c_size_t),
        ("kind", ctypes.c_int),
        ("host", ctypes.c_void_p),
        ("device", ctypes.c_uint64),
        ("array", ctypes.c_void_p),
        ("pitch", ctypes.c_size_t),
    ]


class Image(ctypes.Structure):
    """`CUDA_MEMCPY2D`"""

    _fields_ = [("source", Side), ("target", Side), ("width", ctypes.c_size_t), ("height", ctypes.c_size_t)]
