"""The images' health check: exits with 0 when the server of this container takes requests, else with 1.

It asks where S2MOE_HOST and S2MOE_PORT say, so in a container set these, not --host and --port.
"""

from __future__ import annotations

import http.client
import os
import sys

TIMEOUT_SECONDS = 4
"""Less than what the image gives the check, so that the reason is still printed."""
ANYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104


def main() -> int:
    host = os.environ.get("S2MOE_HOST") or "127.0.0.1"
    port = int(os.environ.get("S2MOE_PORT") or 8080)
    connection = http.client.HTTPConnection(ANYWHERE.get(host, host), port, timeout=TIMEOUT_SECONDS)
    try:
        connection.request("GET", "/health")
        answer = connection.getresponse()
        print(answer.read().decode(errors="replace"))
        return 0 if answer.status == http.HTTPStatus.OK else 1
    except (OSError, http.client.HTTPException) as error:
        print(f"no answer on {host}:{port}: {error}")
        return 1
    finally:
        connection.close()


if __name__ == "__main__":
    sys.exit(main())
