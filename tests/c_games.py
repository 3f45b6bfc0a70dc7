"""Games in C and C++, compiled with the clients."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
C_CLIENT = ROOT / "clients" / "c"
CPP_CLIENT = ROOT / "clients" / "cpp"
POLE_GAME = ROOT / "examples" / "cpp_game"

needs_compilers = pytest.mark.skipif(
    shutil.which("gcc") is None or shutil.which("g++") is None, reason="no gcc and g++"
)


def build(folder: Path, source: Path, *options: str) -> Path:
    """Compile a game with the C client. Returns the path of the program."""
    library = folder / "penstock_game.o"
    program = folder / source.stem
    words: list[str | Path] = ["gcc", "-std=c99", *options, "-c", C_CLIENT / "penstock_game.c"]
    subprocess.run([*words, "-o", library], check=True)
    words = ["gcc", "-std=c99"] if source.suffix == ".c" else ["g++", "-std=c++17"]
    words += [*options, f"-I{C_CLIENT}", f"-I{CPP_CLIENT}", source, library, "-lm"]
    subprocess.run([*words, "-o", program], check=True)
    return program
