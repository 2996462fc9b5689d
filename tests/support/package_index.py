"""Serves a package index with the files of a folder."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

JSON = "application/vnd.pypi.simple.v1+json"


@contextmanager
def serving(folder: Path, *, links: Sequence[str], html: bool = False) -> Iterator[str]:
    """Yield the URL of an index whose every project has these files, relative to ``/files/``."""
    hrefs = [f"../../files/{link}#sha256=0" for link in links]
    if html:
        kind, page = "text/html", "".join(f'<a href="{href}">{href}</a>' for href in hrefs)
    else:
        kind, page = JSON, json.dumps({"files": [{"filename": "", "url": href} for href in hrefs]})

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_page = self.path.startswith("/simple/")
            path = folder / self.path.rpartition("/")[2]
            if not is_page and not path.is_file():
                self.send_error(404)
                return
            body = page.encode() if is_page else path.read_bytes()
            self.send_response(200)
            self.send_header("content-type", kind if is_page else "application/octet-stream")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/simple/"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
