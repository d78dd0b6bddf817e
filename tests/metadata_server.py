"""A local server that answers as Google's metadata server does."""

import http.server
import threading
import urllib.parse


class MetadataServer(http.server.ThreadingHTTPServer):
    """`values` by the last word of the key; a question with wait_for_change is answered when the tag is another one."""

    daemon_threads = True

    def __init__(self, **values: str):
        super().__init__(("127.0.0.1", 0), Answer)
        self.values = {key.replace("_", "-"): value for key, value in values.items()}
        self.flavor, self.status, self.asked = "Google", 200, []
        self.changed = threading.Condition()
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def change(self, key: str, value: str) -> None:
        with self.changed:
            self.values[key] = value
            self.changed.notify_all()

    def wait_until_watched(self) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: {key for key, waits in self.asked if waits} == {*self.values}, 20)


class Answer(http.server.BaseHTTPRequestHandler):
    server: MetadataServer

    def do_GET(self):
        server, url = self.server, urllib.parse.urlsplit(self.path)
        words, key = dict(urllib.parse.parse_qsl(url.query)), url.path.rpartition("/")[2]
        assert url.path.startswith("/computeMetadata/v1/instance/") and self.headers["Metadata-Flavor"] == "Google"
        with server.changed:
            server.asked.append((key, "wait_for_change" in words))
            server.changed.notify_all()
            if words.get("wait_for_change") == "true":
                other = lambda: server.values[key] != words["last_etag"]
                server.changed.wait_for(other, float(words["timeout_sec"]))
            value = server.values.get(key, "")
            self.send_response(server.status if key in server.values else 404)
        self.send_header("Metadata-Flavor", server.flavor)
        self.send_header("ETag", value)
        self.end_headers()
        self.wfile.write(value.encode())

    def log_message(self, *words):
        pass
