"""torch's zip files without torch: what `torch.save` writes for tensors in nested dicts, byte for byte of the
same structure, and whatever else a test wants in the pickle."""

import collections
import io
import pickle
import sys
import types
import zipfile
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

STORAGES = {
    "float32": "FloatStorage",
    "float64": "DoubleStorage",
    "float16": "HalfStorage",
    "int64": "LongStorage",
    "bfloat16": "BFloat16Storage",
}


class View(NamedTuple):
    """A tensor that lies in its storage in its own way."""

    data: np.ndarray  # the storage
    offset: int
    shape: tuple
    stride: tuple


def fake_modules():
    """Modules with torch's names, so that pickle can write them."""
    torch = types.ModuleType("torch")
    utils: Any = types.ModuleType("torch._utils")

    def _rebuild_tensor_v2(*args):
        raise AssertionError("only named, never called")

    _rebuild_tensor_v2.__module__ = "torch._utils"
    _rebuild_tensor_v2.__qualname__ = "_rebuild_tensor_v2"
    utils._rebuild_tensor_v2 = _rebuild_tensor_v2
    for name in STORAGES.values():
        setattr(torch, name, type(name, (), {"__module__": "torch"}))
    return {"torch": torch, "torch._utils": utils}


def save_zip(path, content, drop=0, order=b"little"):
    """Write `content`, in which arrays and Views stand for tensors. drop: bytes that every storage lacks."""
    modules, storages, buffer = fake_modules(), [], io.BytesIO()

    class Pickler(pickle.Pickler):
        def persistent_id(self, obj):
            if isinstance(obj, _Storage):
                storages.append(obj.data)
                kind = getattr(modules["torch"], STORAGES[obj.data.dtype.name])
                return ("storage", kind, str(len(storages) - 1), "cpu", obj.data.size)
            return None

        def reducer_override(self, obj):
            if isinstance(obj, _Tensor):
                view = obj.view
                place = (_Storage(view.data), view.offset, view.shape, view.stride)
                return modules["torch._utils"]._rebuild_tensor_v2, (*place, False, collections.OrderedDict())
            return NotImplemented

    with mock.patch.dict(sys.modules, modules):
        Pickler(buffer, protocol=2).dump(wrapped(content))
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", buffer.getvalue())
        archive.writestr("archive/byteorder", order)
        for i, data in enumerate(storages):
            whole = np.ascontiguousarray(data).tobytes()
            archive.writestr(f"archive/data/{i}", whole[: len(whole) - drop])
    return str(path)


class _Storage:
    def __init__(self, data):
        self.data = data


class _Tensor:
    def __init__(self, view):
        self.view = view


def wrapped(content):
    """Arrays and Views as what the pickler writes as tensors."""
    if isinstance(content, np.ndarray):
        strides = tuple(step // content.itemsize for step in np.ascontiguousarray(content).strides)
        return _Tensor(View(content.ravel(), 0, content.shape, strides))
    if isinstance(content, View):
        return _Tensor(content)
    if isinstance(content, dict):
        return type(content)((name, wrapped(value)) for name, value in content.items())
    return content
