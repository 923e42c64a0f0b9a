"""Ask a running server with the real client libraries, plain and guided, whole and streamed.

    make serve    # in another terminal
    CLIENTS/bin/python -m tools.real_clients --url http://127.0.0.1:8000 [--only NAME ...]

The libraries do not fit this project's pins, so CLIENTS is a virtual environment of their own:

    python3 -m venv CLIENTS
    CLIENTS/bin/pip install openai anthropic langchain-openai litellm instructor \\
        llama-index-llms-openai-like

litellm holds openai at version 2: for a later one, install openai alone, and say --only openai.

instructor's mode TOOLS names a tool that must be called. vLLM refuses that without a parser of tool
calls, and lets the model write other arguments than the tool's if the tool is not strict. So the
server's YAML needs this under `args`, which configs/cfg.yaml has not:

    frontend:
      {enable_auto_tool_choice: true, tool_call_parser: hermes, tool_strict_level: parameter}

Every request is for temperature 0. An answer must have text, and a stream more than one piece. A
guided answer must have a `guidance` object with guided_tokens > 0, as the library shows it. Where
a library drops fields that it does not know, the guided text must differ from the plain one
instead: those cells say `differs`, and the notes below the table say what is dropped. The exit
status is 1 if a cell failed.

pytest does not collect this file. test_clients.py replays bodies of these libraries in the
project's own environment.
"""
