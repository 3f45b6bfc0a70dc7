"""Show that commits changed nothing but blank lines, comments and docstrings.

    python .ci/same_syntax.py [RANGE]

Looks at each commit of RANGE (default: all of HEAD) whose subject begins with "Paragraphs:", and
compares the syntax tree of each Python file with that of the commit before it, without docstrings.
Exits with 1 if one differs.
"""

from __future__ import annotations

import ast
import subprocess
import sys

PREFIX = "Paragraphs:"


def git(*arguments: str) -> str:
    return subprocess.run(("git", *arguments), check=True, capture_output=True, text=True).stdout


def tree(source: str) -> str:
    """The syntax tree of ``source`` without its docstrings, as text."""
    module = ast.parse(source)
    for node in ast.walk(module):
        documented = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:]
    # A string below an attribute documents it.
    for node in ast.walk(module):
        if isinstance(node, ast.ClassDef):
            node.body = [line for line in node.body if not _is_text(line)]
    return ast.dump(module)


def _is_text(line: ast.stmt) -> bool:
    value = line.value if isinstance(line, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def main() -> int:
    commits = git(
        "log", "--no-merges", "--format=%H %s", sys.argv[1] if len(sys.argv) > 1 else "HEAD"
    )
    count = 0
    changed = 0
    for line in commits.splitlines():
        commit, subject = line.split(" ", 1)
        if not subject.startswith(PREFIX):
            continue

        count += 1
        for path in git("diff", "--name-only", f"{commit}^", commit).split():
            previous_source = git("show", f"{commit}^:{path}")
            source = git("show", f"{commit}:{path}")
            if not path.endswith(".py") or tree(previous_source) != tree(source):
                print(f"{commit[:8]} {subject}: {path} changed more than its texts")
                changed += 1
    print(f"{count} commits of paragraphs and sentences, {changed} files changed more than that")
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())
