"""Direct calls: from the ingress to a generator replica over a TCP connection, without Ray Serve.

Serve still places replicas, scales them, checks their health and restarts them. Only the calls that
generate text go past it, because Serve's path costs more CPU for each message than the rest of the
ingress. `listener` is the replica's side and `connections` the ingress's side.

A connection carries one call at a time, and is used again when the call has ended. So TCP's own
flow control holds back the answer of a client that does not read, and closing the connection
cancels the call. All messages are frames (`protocol`):

    listener: challenge                       at once
    caller:   challenge, proof                proofs show that both know the replica's secret
    listener: proof                           nothing is unpickled before this point
    then, as often as the caller likes:
    caller:   the pickled call
    listener: one pickled item per frame, then END; or REFUSED in place of an answer

The secret is random. A replica publishes it through Serve, with its address (`address`). Frames are
not encrypted, like Ray's own without TLS. Where Ray uses TLS, there are no direct calls
(generator/replica.py). Imports neither Ray, vLLM nor torch.
"""
