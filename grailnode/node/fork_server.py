"""Ignores SIGINT in the fork server, which imports this module before any other; nothing else imports it.

The terminal sends Ctrl-C to every process of the group, but the supervisor alone handles it. Children inherit the fork
server's handler, so ignoring the signal here leaves no moment in which it could interrupt a new process.
"""

import signal

signal.signal(signal.SIGINT, signal.SIG_IGN)
