"""The files of the page: its document, scripts and style, and the script of plotly.js."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from penstock.configs.errors import UserError

STATIC = Path(__file__).with_name("static")
KINDS = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}


def plotly_script() -> Path:
    """The script of plotly.js that the installed package plotly ships. Raises UserError."""
    found = find_spec("plotly")
    for folder in (found.submodule_search_locations or ()) if found else ():
        path = Path(folder) / "package_data" / "plotly.min.js"
        if path.is_file():
            return path
    raise UserError(
        "the charts need the package plotly, which is not installed: pip install 'penstock[watch]'"
    )
