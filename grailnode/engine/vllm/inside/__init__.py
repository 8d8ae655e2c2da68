"""The code that runs inside vLLM's processes: sampling, hidden states, and patches of the weights in place.

It imports protocol, torch and vLLM, and nothing else of grailnode: vLLM's environment has no trio and no httpx.
"""
