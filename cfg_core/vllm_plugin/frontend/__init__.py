"""What runs in vLLM's frontend: the process of LLM, AsyncLLM or the API server.

On the way in, admission.py refuses a request or resolves its guidance, and grammar_sandbox.py tries
its grammar. On the way back, guided_tokens.py and logprobs.py take out of the engine's outputs what
the engine core and the workers have added.
"""
