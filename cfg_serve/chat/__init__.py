"""`cfg-serve chat`: a conversation with a server in the terminal.

session    the state and the commands, pure
client     requests, and the pieces of answers as they come
terminal   reads lines and shows answers, side by side if there are several scales
"""
