"""The files of a server's page, as they lie in a folder. Needs starlette, of penstock[watch]."""

from __future__ import annotations

from pathlib import Path

from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, Response
from starlette.routing import Route

# The media types of the files that are served, by their suffix.
KINDS = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}


def static_route(folder: Path) -> Route:
    """Returns the route of each file of a ``folder``, by its name; "/" is that of index.html.

    It answers all other paths with 404, so it is the last route of an application.
    """
    files = {f"/{path.name}": path for path in folder.iterdir() if path.suffix in KINDS}
    files["/"] = folder / "index.html"

    async def static(request: Request) -> Response:
        """Answer with a file of the page."""
        path = files.get(request.url.path)
        if path is None:
            return PlainTextResponse("penstock: no such page\n", 404)
        headers = {"cache-control": "no-cache"}
        return FileResponse(path, media_type=KINDS[path.suffix], headers=headers)

    return Route("/{path:path}", static, methods=["GET"])
