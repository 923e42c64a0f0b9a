"""`cfg-serve doctor`: what of this machine and this installation is wrong, and what to do.

checks        one function for each subject; they import neither vllm nor ray
engine        runs tiny_engine in a process of its own, with a time limit
tiny_engine   a guided token from a tiny engine with random weights
command       prints what was found
"""
