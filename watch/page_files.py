"""The files of the page, and the page as one HTML document that asks for no other file.

A document that is opened from a disk cannot import modules beside it, as browsers treat each file
as a site of its own. So the modules become one script: each is a function that returns its exports,
and an import takes them from there. That covers the forms of `import` and `export` that our modules
use; any other is refused, so that it is found by a test and not by a reader.

The content security policy of the document allows only the scripts that were written here, by their
hashes, and no request.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from penstock.configs.errors import UserError

STATIC = Path(__file__).with_name("static")
IMPORT = re.compile(r'^import \{([^{}]*)\} from "\./([\w-]+\.js)";$', re.MULTILINE)
EXPORT = re.compile(
    r"^export (?=(?:async )?(?:function|class|const) (?P<name>[A-Za-z_$][\w$]*))", re.MULTILINE
)
# Forms of import and export that are not understood.
REFUSED = re.compile(r"^(?:import|export)\b.*|\bimport(?:\(|\.meta).*", re.MULTILINE)
# The links of the page to its own files.
LINKS = (
    '<link rel="icon" href="icon.svg" type="image/svg+xml">\n',
    '<link rel="stylesheet" href="style.css">\n',
    '<script type="module" src="app.js"></script>\n',
)


def plotly_script() -> Path:
    """Returns the script of plotly.js that the installed package plotly ships.

    Raises UserError if the package is not installed.
    """
    package = find_spec("plotly")
    folders = package.submodule_search_locations if package else None
    for folder in folders or ():
        path = Path(folder) / "package_data" / "plotly.min.js"
        if path.is_file():
            return path
    raise UserError(
        "the charts need the package plotly, which is not installed: pip install 'penstock[watch]'"
    )


def bundle(modules: Mapping[str, str], entry: str) -> str:
    """Returns the text of one script: of the module ``entry`` and all that it imports.

    ``modules`` are the texts of the modules by the names of their files.

    Raises ValueError for a form of import or export that is not understood.
    """
    functions: dict[str, str] = {}

    def add(name: str) -> None:
        """Add a module after those that it imports."""
        if name not in functions:
            for statement in IMPORT.finditer(modules[name]):
                add(statement[2])
            functions[name] = _as_function(name, modules[name])

    add(entry)
    return "\n".join(functions.values())


def document(
    html: str,
    *,
    style: str,
    scripts: Sequence[str],
    data: Mapping[str, Any],
    icon: str,
) -> str:
    """Returns ``html`` with its style, its scripts and ``data`` inside.

    Args:
        html: the document of the page, with the three links to its own files.
        style: a style sheet.
        scripts: each the text of a script, in the order in which they run.
        data: by the id of its element, what becomes the text of a data block: JSON of it, or a text
            of base64 as it is.
        icon: an SVG.

    Raises ValueError if ``html`` does not have the links.
    """
    for link in LINKS:
        if html.count(link) != 1:
            raise ValueError(f"the page must contain {link.strip()} once")
        html = html.replace(link, "")

    # The head allows the scripts by their hashes.
    script_texts = [_script_text(text) for text in scripts]
    hashes = " ".join(f"'sha256-{_sha256(text)}'" for text in script_texts)
    policy = (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; "
        "img-src data: blob:; media-src blob:; base-uri 'none'; form-action 'none'"
    )
    icon_url = f"data:image/svg+xml;base64,{base64.b64encode(icon.encode()).decode()}"
    head = (
        f'<meta http-equiv="content-security-policy" content="{policy}">\n'
        f'<link rel="icon" href="{icon_url}">\n<style>\n{style}</style>\n'
    )

    # The data and the scripts end the body.
    elements = [
        f'<script type="text/plain" id="{name}">{block_text(value)}</script>\n'
        for name, value in data.items()
    ]
    *first_scripts, last_script = script_texts
    elements += [f"<script>{text}</script>\n" for text in first_scripts]
    # A module runs when the document is complete.
    elements.append(f'<script type="module">{last_script}</script>\n')

    html = html.replace("</head>", f"{head}</head>")
    content, _, ending = html.partition("</body>")
    return "".join((content, *elements, "</body>", ending))


def block_text(value: Any) -> str:
    """Returns the text of a data block, in which no tag or comment can begin.

    So it ends no element of a document. It is JSON, or a text without such characters as it is.
    """
    if isinstance(value, str) and "<" not in value:
        return value
    return json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _script_text(text: str) -> str:
    """Returns a script that ends no element.

    The replacements mean the same within the strings, templates and regular expressions of
    JavaScript, where such text is.
    """
    # A browser compares the hash of the text that its parser passes on, with these replacements.
    text = text.replace("\r\n", "\n").replace("\r", "\n").replace("\0", "\ufffd")

    text = re.sub(r"</(?=script)", r"<\\/", text, flags=re.IGNORECASE)
    return text.replace("<!--", "\\x3c!--")


def _sha256(text: str) -> str:
    """Returns the hash of a script as a content security policy has it, in base64."""
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _as_function(name: str, text: str) -> str:
    """Returns a module as a constant: the object of its exports."""
    exports = [match["name"] for match in EXPORT.finditer(text)]
    text = IMPORT.sub(_as_pattern, EXPORT.sub("", text))
    if refused := REFUSED.search(text):
        raise ValueError(f"{name} has a form of import or export that is not known: {refused[0]}")
    return (
        f"const {_variable(name)} = (() => {{\n{text}\nreturn {{ {', '.join(exports)} }};\n}})();"
    )


def _as_pattern(match: re.Match[str]) -> str:
    """Returns `import { a, b as c } from "./x.js";` as a constant pattern."""
    names = [name.strip() for name in match[1].split(",") if name.strip()]
    fields = ", ".join(name.replace(" as ", ": ") for name in names)
    return f"const {{ {fields} }} = {_variable(match[2])};"


def _variable(name: str) -> str:
    """Returns the name of the constant that has the exports of a module."""
    return "module_" + re.sub(r"\W", "_", name)
