"""Imported by the fork server, first of all and by nobody else: Ctrl-C is the supervisor's business.

The terminal sends it to every process of the group. The fork server gives its children the handler that it found at its
own start, so ignoring it here leaves no moment in which a new process could be interrupted.
"""

import signal

signal.signal(signal.SIGINT, signal.SIG_IGN)
