"""`cfg-serve serve`: a Ray of its own in the foreground, until Ctrl-C.

server       the order of things: check, start, wait, tell, stop
environment  what the processes of Ray get in their environment; HAProxy
preflight    what this machine lacks for a configuration, before Ray starts
child        the process that runs Ray and Serve; it writes what Serve says into a file
status       reads that file
causes       finds in the log why a start failed, and what to do
processes    ends every process that was started
examples     what is told when the server is ready
"""
