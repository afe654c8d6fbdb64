"""Serves a model with any options of the engine until it is killed.

usage: server.py OPTIONS    (a JSON object of `AsyncLLM`'s options; the first line out is the URL)
"""

import json
import sys
import threading

from cbrs import AsyncLLM

options = json.loads(sys.argv[1])
llm = AsyncLLM(**options)
with llm.serve_in_background(port=0, served_model_name="null") as server:
    print(server.url, flush=True)
    threading.Event().wait()
