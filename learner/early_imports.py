"""Imports the modules of a learner in its process, before that has its role.

Loading torch's library takes a sixth of `import torch` and no interpreter lock. A thread loads it
while this one imports other modules. Extension modules come first, as the loader serves one thread
at a time.
"""

from __future__ import annotations

import ctypes
import os
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from threading import Thread

# Torch's libraries, with the scope in which `import torch` loads each.
LIBRARIES = {"libtorch_global_deps.so": os.RTLD_GLOBAL, "libtorch_cpu.so": os.RTLD_LOCAL}
# Extension modules, and other modules, that are imported meanwhile.
EXTENSIONS = ("numpy", "numpy.random", "pydantic_core")
OTHERS = (
    "penstock.configs.schema",
    "penstock.algos.registry",
    "penstock.envs",
    "penstock.replay",
    "penstock.transport.shm.host",
)
# The role itself, which imports everything else.
ALL = "penstock.learner.role"


def load_libraries() -> None:
    """Load torch's libraries in the way that `import torch` does.

    If one cannot be loaded, or has another name, that import does it, or reports why not.
    """
    torch = find_spec("torch")
    dlopen = getattr(ctypes.CDLL(None), "dlopen", None)
    if torch is None or torch.origin is None or dlopen is None:
        return

    # `dlopen` is called directly, as ctypes.CDLL keeps the interpreter lock.
    dlopen.argtypes = [ctypes.c_char_p, ctypes.c_int]
    dlopen.restype = ctypes.c_void_p
    for name, scope in LIBRARIES.items():
        path = Path(torch.origin).parent / "lib" / name
        if path.exists():
            dlopen(os.fsencode(path), os.RTLD_NOW | scope)


def import_modules() -> None:
    """Import a learner's modules, and load torch's libraries in a thread meanwhile."""
    for module in EXTENSIONS:
        import_module(module)
    Thread(target=load_libraries, name="libraries", daemon=True).start()
    for module in (*OTHERS, ALL):
        import_module(module)
