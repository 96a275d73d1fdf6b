"""An application of ours behind a real server, for tests in a browser."""

import threading
from contextlib import contextmanager

from werkzeug.serving import make_server


@contextmanager
def served(application):
    """The address at which an application answers."""
    server = make_server("127.0.0.1", 0, application, threaded=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.port}/"
    finally:
        server.shutdown()
        server.server_close()
