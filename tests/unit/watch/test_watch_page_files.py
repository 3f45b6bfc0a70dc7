"""The page as one document: bundled modules, and texts that cannot end an element."""

from __future__ import annotations

import base64
import hashlib
import html.parser
import json
import re

import pytest

from penstock.watch.page_files import STATIC, block_text, bundle, document, plotly_script

EVIL = "</script><script>alert(1)</script><!-- <script> ]]>"
PAGE = """<!doctype html>
<html lang="en">
<head>
<link rel="icon" href="icon.svg" type="image/svg+xml">
<link rel="stylesheet" href="style.css">
<script type="module" src="app.js"></script>
</head>
<body>
<p>Text</p>
</body>
</html>
"""


class Elements(html.parser.HTMLParser):
    """The scripts of a document with their attributes, and the names of all elements."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.policy = ""
        self.inside = False
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.inside = tag == "script"
        if tag == "script":
            self.scripts.append((dict(attrs), ""))
        if dict(attrs).get("http-equiv") == "content-security-policy":
            self.policy = dict(attrs)["content"] or ""

    def handle_endtag(self, tag: str) -> None:
        self.inside = False

    def handle_data(self, data: str) -> None:
        if self.inside:
            attrs, before = self.scripts[-1]
            self.scripts[-1] = attrs, before + data


def test_modules_become_functions_in_the_order_of_their_imports() -> None:
    modules = {
        "app.js": 'import { a as one, B } from "./lib.js";\nimport { c } from "./deep.js";\nc();',
        "lib.js": 'import {\n  c,\n} from "./deep.js";\nexport function a() {}\nexport class B {}',
        "deep.js": "export const c = 1;\nexport async function d() {}\nconst hidden = 2;\n",
        "unused.js": "import broken",
    }
    text = bundle(modules, "app.js")
    places = [text.index(f"const module_{name}_js = ") for name in ("deep", "lib", "app")]
    assert places == sorted(places)
    assert "const { a: one, B } = module_lib_js;" in text
    assert "return { c, d };" in text
    assert "return { a, B };" in text
    assert "unused" not in text
    assert not re.search(r"^\s*(import|export)\b", text, re.MULTILINE)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('import * as all from "./x.js";', "not known: import"),
        ('import value from "./x.js";', "not known: import"),
        ("export default 1;", "not known: export"),
        ("export let counter = 0;", "not known: export"),
        ('const x = await import("./x.js");', "not known"),
    ],
)
def test_other_forms_of_modules_are_refused(text: str, error: str) -> None:
    with pytest.raises(ValueError, match=re.escape(error)):
        bundle({"app.js": text, "x.js": "export const a = 1;\n"}, "app.js")


def test_the_modules_of_the_page_can_be_bundled() -> None:
    modules = {path.name: path.read_text() for path in STATIC.glob("*.js")}
    text = bundle(modules, "app.js")
    for name in modules:
        assert f"const module_{name.replace('.', '_').replace('-', '_')} = " in text, name


def test_embedded_data_cannot_end_its_element() -> None:
    data = {"text": EVIL, EVIL: [EVIL, 1.5, None]}
    script = f"const a = {json.dumps(EVIL)}, b = /<!--|<\\/script>/, c = `</SCRIPT>`;"
    made = document(
        PAGE,
        style="p { color: red }\n",
        scripts=["one()", script],
        data={"frozen": data},
        icon="<svg/>",
    )
    found = Elements(made)
    assert found.tags.count("script") == 3
    assert len(found.scripts) == 3
    (attrs, block), (_, first), (module, second) = found.scripts
    assert (attrs["id"], attrs["type"]) == ("frozen", "text/plain")
    assert json.loads(block) == data
    assert "<" not in block
    assert first == "one()"
    assert module == {"type": "module"}
    assert "</script" not in second.lower()
    assert "<!--" not in second


def test_content_policy_allows_only_the_scripts_of_the_page_and_no_request() -> None:
    made = document(PAGE, style="", scripts=["one()", "two('é')"], data={}, icon="<svg/>")
    found = Elements(made)
    for _, text in found.scripts:
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in found.policy
    assert "default-src 'none'" in found.policy
    assert "unsafe-inline" not in found.policy.partition("script-src")[2].partition(";")[0]
    assert "connect-src" not in found.policy, "so that of default-src holds"
    assert not re.search(r'(?:src|href)="(?!data:)', made)


def test_a_page_without_its_links_is_refused() -> None:
    with pytest.raises(ValueError, match="once"):
        document(PAGE.replace("app.js", "other.js"), style="", scripts=[], data={}, icon="")


def test_numbers_that_are_not_json_are_refused() -> None:
    with pytest.raises(ValueError, match="JSON"):
        block_text({"a": float("nan")})


def test_plotly_script_needs_no_change() -> None:
    """It is some 5 MB: a change within a regular expression or code would be seen by no test."""
    pytest.importorskip("plotly")
    text = plotly_script().read_text()
    assert "<!--" not in text
    assert "</script" not in text.lower()


@pytest.mark.parametrize("view", ["view-learning.js", "view-time.js"])
def test_names_in_charts_are_escaped(view: str) -> None:
    """plotly.js reads a part of HTML in the names of traces, such as links."""
    text = (STATIC / view).read_text()
    body = text[text.index("async redraw(plot)") :].partition("\n  }\n")[0]
    names = re.findall(r"\bname(?:: | = )([^,]+)", body)
    fixed = re.compile(r'"[a-z ]*"|`mean of \$\{line.count\} *`')
    assert names
    assert all(name.lstrip("`${").startswith("escaped(") or fixed.match(name) for name in names)
