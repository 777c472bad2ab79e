"""nginx, as Debian packages it."""

from __future__ import annotations

from pathlib import Path

from proxies.base import POOL, Proxy, Start, first_line, program


def _program() -> Path:
    return program("nginx", Path("/usr/sbin"), Path("/usr/bin"), Path("/usr/local/sbin"))


def configuration(start: Start) -> str:
    """One worker that keeps connections open and passes bodies and events on as they arrive."""
    servers = "\n    ".join(f"server {host}:{port};" for host, port in start.addresses)
    return f"""
daemon off;
worker_processes 1;
pid {start.folder}/nginx.pid;
error_log stderr warn;
events {{ worker_connections 4096; }}
http {{
  access_log off;
  client_body_temp_path {start.folder}/body;
  proxy_temp_path {start.folder}/proxy;
  fastcgi_temp_path {start.folder}/fastcgi;
  uwsgi_temp_path {start.folder}/uwsgi;
  scgi_temp_path {start.folder}/scgi;
  client_max_body_size 64m;
  keepalive_requests 1000000;
  upstream backends {{
    {servers}
    keepalive {POOL};
    keepalive_requests 1000000;
  }}
  server {{
    listen 127.0.0.1:{start.port} backlog=2048;
    location / {{
      proxy_pass http://backends;
      proxy_http_version 1.1;
      proxy_set_header Connection "";
      proxy_buffering off;
      proxy_request_buffering off;
      proxy_read_timeout 600s;
    }}
  }}
}}
"""


def _command(start: Start) -> list[str]:
    file = start.folder / "nginx.conf"
    file.write_text(configuration(start))
    return [str(_program()), "-p", str(start.folder), "-c", str(file)]


PROXY = Proxy(
    "nginx",
    "nginx",
    _command,
    lambda: first_line(_program(), "-v").rpartition("/")[2],
    "one worker, HTTP/1.1 and kept-alive connections to backends, no buffering, no access log",
)
